"""What runs before torch.distributed starts: read hostfiles, read srun's variables, and tie ranks to their launcher."""

"""What precedes torch.distributed: hostfiles, srun's variables, and ranks that end with their launcher."""

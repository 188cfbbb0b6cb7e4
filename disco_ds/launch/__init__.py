"""Code that runs before torch.distributed starts: it reads srun's variables, and ends a rank when its launcher ends."""

"""Code that runs before torch.distributed starts: hostfiles, srun's variables, and the watchdog of the launcher."""

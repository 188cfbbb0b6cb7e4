"""Code that runs before torch.distributed starts: srun's variables and the watchdog of the launcher."""

"""What a launch needs before torch.distributed: hostfiles, srun's variables, and ranks that end
with their launcher."""

"""Ranks together: collectives, agreement, heartbeat, signals. The only user of deepspeed.comm and torch.distributed."""

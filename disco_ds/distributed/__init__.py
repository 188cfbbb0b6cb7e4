"""Ranks working together: collectives, agreement, heartbeat, signals. Only its comm.py uses torch.distributed."""

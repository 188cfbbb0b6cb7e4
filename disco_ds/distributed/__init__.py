"""How ranks work together: collectives, agreement, heartbeats, signals. Only comm.py uses
torch.distributed."""

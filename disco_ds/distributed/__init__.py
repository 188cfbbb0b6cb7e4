"""Coordination of ranks: collectives, agreement, heartbeats and signals.

Only comm.py uses torch.distributed.
"""

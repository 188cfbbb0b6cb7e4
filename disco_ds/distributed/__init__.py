"""Coordination of ranks: joining, collectives, agreement, heartbeats and signals.

Only comm.py uses torch.distributed.
"""

"""Cooperation of ranks: collectives, agreement, heartbeats, signals.

Only comm.py uses torch.distributed.
"""

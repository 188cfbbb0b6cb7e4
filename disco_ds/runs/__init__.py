"""The run folder: its files, its log, and how several hosts agree on it.

metrics and all rooms above it import this room.
"""

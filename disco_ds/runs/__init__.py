"""The run folder: its files, its log, and how all hosts agree on it.

Imported by disco_ds.metrics and by packages in higher layers (see docs/architecture.md).
"""

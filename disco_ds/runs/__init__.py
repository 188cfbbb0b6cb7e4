"""The run folder: its files, its log, messages on the terminal, and how all hosts agree on the folder.

Imported by disco_ds.metrics and by packages in higher layers (see docs/architecture.md).
"""

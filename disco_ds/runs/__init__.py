"""The run folder: its files, its log, and how all hosts agree on it.

The package disco_ds.metrics and the packages in higher layers import this package.
"""

"""Command lines: each module is one command of `disco-ds`."""

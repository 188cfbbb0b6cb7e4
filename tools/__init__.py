"""Programs that developers and operators run from a clone of the repository (README.md)."""

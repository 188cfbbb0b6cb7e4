"""Records of a run in its folder: figures, times of the phases, the report."""

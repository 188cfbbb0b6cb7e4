"""The model that a run trains, the parameter groups of its optimizer, its operation count, and the known GPUs."""

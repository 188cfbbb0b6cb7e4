"""The model that a run trains, the parameter groups of its optimizer, and its cost on a GPU."""

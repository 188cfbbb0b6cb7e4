"""The open_clip model a run trains, its optimizer's parameter groups, and what it costs on a GPU."""

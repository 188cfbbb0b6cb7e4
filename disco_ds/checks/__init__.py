"""Checks to run before training starts. `disco-ds doctor` prints the findings and the remedies.

recipe.py   settings, loss, model, kernels and data, on this host
samples.py  a few samples, in the form that the model gets, on this host
hosts.py    runs folder, GPUs, and whether all hosts have the same software
ranks.py    settings and one training step, on all ranks
report.py   the line that a check prints
"""

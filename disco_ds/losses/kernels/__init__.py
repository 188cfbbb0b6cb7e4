"""Sums and gradients of similarity matrices that are computed in tiles and never stored as a whole.

The only third-party packages that this folder imports are torch, Triton and packaging.
"""

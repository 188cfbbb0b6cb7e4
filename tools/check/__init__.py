"""Comparisons with references, and simulated machines."""

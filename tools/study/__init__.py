"""Comparisons of whole trainings."""

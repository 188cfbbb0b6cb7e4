"""Predict what a run will need: memory of each GPU and host, and the time of a step.

No GPU is needed.
"""

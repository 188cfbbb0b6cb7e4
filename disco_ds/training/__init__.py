"""Training: building a run, the loop, the step, the DeepSpeed engine, and steps for custom loops."""

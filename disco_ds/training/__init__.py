"""Training: building a run, the training loop, the optimizer step, the DeepSpeed engine, and custom loops."""

"""Training: a run and what it is built of, the loop, the step, the DeepSpeed engine, checkpoints and resuming."""

"""A run: what it is built of, the loop, the step, DeepSpeed's engine, checkpoints and going on from them."""

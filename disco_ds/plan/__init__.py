"""What a run will need before it is run: memory of each GPU and host by part, and the time of a step. No GPU needed."""

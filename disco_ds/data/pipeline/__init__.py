"""The way from samples to micro-batches on the device: worker processes, shared buffers and a rank's loader."""

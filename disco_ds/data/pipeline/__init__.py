"""From samples to micro-batches on the device: worker processes, shared buffers and the loader of a rank."""

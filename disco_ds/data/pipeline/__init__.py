"""The pipeline that turns samples into micro-batches on the device: worker processes, shared buffers and the loader."""

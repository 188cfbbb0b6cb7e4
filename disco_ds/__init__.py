"""disco_ds: large-batch CLIP training on DeepSpeed whose gradient is the full-batch one at any number of ranks."""

__version__ = "0.1.0"

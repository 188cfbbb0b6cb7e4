"""The dtypes of a run."""

import torch

DTYPES = {
    "autocast": torch.float32,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""Maps the precision in the ds_config to the dtype of the parameters. Also maps optim.muon_precision to a dtype."""

"""The dtype of a run's parameters."""

import torch

from disco_ds.distributed.comm import DTYPES

PARAMETER_DTYPES = DTYPES | {"autocast": torch.float32}
"""Maps the precision in the ds_config to the dtype of the parameters."""

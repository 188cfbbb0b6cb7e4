"""Assumptions of a plan: values that can be neither traced nor counted.

Import-light: the options of `disco-ds plan` include these fields.
"""

from pydantic import BaseModel, ConfigDict, Field


class Assumptions(BaseModel):
    """Values that a plan assumes; replace them with measured ones where you can."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    data_samples: int | None = Field(None, ge=1, title="N")
    """Number of samples in the data (default: from the manifest)."""
    slack: float = Field(0.05, ge=0, le=1, title="FRACTION")
    """Memory lost to fragmentation, as a fraction of all other memory."""
    context_gib: float = Field(1.0, ge=0, title="GIB")
    """Memory of each GPU for the CUDA context, NCCL's buffers and library workspaces."""
    text_tokens: float | None = Field(None, ge=1, title="N")
    """Mean number of tokens per caption, for text towers that skip padding (default: as many as the model allows)."""
    per_host: int = Field(8, ge=1, title="N")
    """GPUs per host."""
    efficiency: float | None = Field(None, gt=0, le=1, title="FRACTION")
    """Fraction of the GPU's peak rate that is reached (default: as measured on other runs, see docs/planning.md)."""
    bandwidth: float = Field(25.0, gt=0, title="GB/S")
    """Rate at which a GPU receives from other hosts."""


DEFAULTS = Assumptions()
"""Assumptions of a plan for which none are given."""

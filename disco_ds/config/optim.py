"""The `optim` section of a recipe: the optimizer and its learning rate schedule."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from disco_ds.config.data import Settings

Fraction = Annotated[float, Field(ge=0, lt=1)]


class TowerOptimSettings(Settings):
    """Optimizer settings of one tower."""

    lr_factor: float = Field(1.0, gt=0)
    """Multiplier on the learning rate of this tower."""
    weight_decay: float | None = Field(None, ge=0)
    """Weight decay of this tower; None: optim.weight_decay."""
    layer_decay: float = Field(1.0, gt=0, le=1)
    """Factor on the learning rate from each layer to the layer below it; 1: the same rate everywhere."""


class OptimSettings(Settings):
    """The optimizer and its schedule."""

    name: Literal["adamw", "lamb", "lion", "sgd"] = "adamw"
    """The optimizer. lamb works at ZeRO 0 only."""
    lr: float | None = Field(None, gt=0, lt=1e38)
    """Peak learning rate; None: base_lr x global_batch / 32,768."""
    base_lr: float = Field(5e-4, gt=0, lt=1e38)
    """Peak learning rate at a global batch of 32,768, which scales linearly with the batch
    (DisCo-CLIP)."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.98)
    """Betas of AdamW, LAMB and Lion."""
    eps: float = Field(1e-6, gt=0)
    """Epsilon of AdamW and LAMB."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Momentum of SGD."""
    weight_decay: float = Field(0.2, ge=0)
    """Weight decay. It applies to matrices only, not to biases, norms, the logit scale or the
    logit bias."""
    clip_norm: float = Field(0.0, ge=0)
    """Gradient clipping by global norm; 0: off."""
    schedule: Literal["cosine", "constant", "cooldown"] = "cosine"
    """Schedule after warmup: cosine down to lr_min, constant, or constant with a linear cooldown
    at the end."""
    warmup_steps: int = Field(2000, ge=0)
    """Steps in which the learning rate rises linearly to its peak."""
    cooldown_steps: int = Field(0, ge=0)
    """Length of the linear cooldown of schedule=cooldown."""
    lr_min: float = Field(0.0, ge=0)
    """Learning rate at the end of schedule=cosine or cooldown."""
    tau_lr: float | None = Field(None, gt=0)
    """Constant learning rate of the logit scale and bias, without warmup; None: the same as for
    the other parameters."""
    tau_slow: float = Field(0.0, ge=0)
    """Temperature at or below which a third of tau_lr is used (FastCLIP: 0.03); 0: off."""
    image: TowerOptimSettings = TowerOptimSettings()
    text: TowerOptimSettings = TowerOptimSettings()

    @model_validator(mode="after")
    def _check_schedule(self) -> OptimSettings:
        if self.tau_slow and self.tau_lr is None:
            raise ValueError(
                f"optim.tau_slow ({self.tau_slow:g}) has no effect without optim.tau_lr; set both or neither"
            )
        if (self.schedule == "cooldown") != (self.cooldown_steps > 0):
            raise ValueError(
                f"optim.cooldown_steps ({self.cooldown_steps}) and optim.schedule=cooldown (got {self.schedule}) need "
                "each other"
            )
        return self

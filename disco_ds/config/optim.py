"""The `optim` section of a recipe: the optimizer and its learning rate schedule."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from disco_ds.config.settings import Settings

Fraction = Annotated[float, Field(ge=0, lt=1)]


class TowerOptimSettings(Settings):
    """Optimizer settings of one tower."""

    lr_factor: float = Field(1.0, gt=0)
    """Factor on the learning rate of this tower. Lower it for a pretrained tower."""
    weight_decay: NonNegativeFloat | None = None
    """Weight decay of this tower. Null: optim.weight_decay."""
    layer_decay: float = Field(1.0, gt=0, le=1)
    """Each layer's learning rate is this fraction of the rate of the layer above it. 1: all layers
    have the same rate."""


class OptimSettings(Settings):
    """The optimizer and its schedule."""

    name: Literal["adamw", "lamb", "lion", "sgd"] = "adamw"
    """The optimizer. lamb works at ZeRO 0 only."""
    lr: float | None = Field(None, gt=0, lt=1e38)
    """Peak learning rate. Null: base_lr x global_batch / 32,768, so that it follows the batch."""
    base_lr: float = Field(5e-4, gt=0, lt=1e38)
    """Peak learning rate at a global batch of 32,768, from which the default of `lr` is scaled
    linearly (DisCo-CLIP)."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.98)
    """Betas of AdamW, LAMB and Lion."""
    eps: float = Field(1e-6, gt=0)
    """Epsilon of AdamW and LAMB."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Momentum of SGD."""
    weight_decay: float = Field(0.2, ge=0)
    """Weight decay of matrices. Biases, norms, the logit scale and the logit bias have none."""
    clip_norm: float = Field(0.0, ge=0)
    """Maximum global norm of the gradient; larger gradients are scaled down. 0: no clipping. Set
    it, to 1 for instance, if the gradient norm has spikes."""
    schedule: Literal["cosine", "constant", "cooldown"] = "cosine"
    """Schedule after warmup: cosine decay to lr_min; constant; or constant with a linear cooldown to
    lr_min at the end."""
    warmup_steps: int = Field(2000, ge=0)
    """Steps in which the learning rate rises linearly to its peak. Lower it for short runs."""
    cooldown_steps: int = Field(0, ge=0)
    """Steps of the linear cooldown of schedule=cooldown."""
    lr_min: float = Field(0.0, ge=0)
    """Learning rate at the end of schedule=cosine or cooldown."""
    tau_lr: PositiveFloat | None = None
    """Constant learning rate of the logit scale and bias, without warmup. Null: the same rate as for
    the other parameters."""
    tau_slow: float = Field(0.0, ge=0)
    """Temperature at or below which tau_lr is divided by 3 (FastCLIP: 0.03). 0: off."""
    image: TowerOptimSettings = TowerOptimSettings()
    text: TowerOptimSettings = TowerOptimSettings()

    @model_validator(mode="after")
    def _check_schedule(self) -> OptimSettings:
        if self.tau_slow and self.tau_lr is None:
            raise ValueError(
                f"optim.tau_slow={self.tau_slow:g} has no effect without optim.tau_lr: set both or "
                "neither"
            )
        if (self.schedule == "cooldown") != (self.cooldown_steps > 0):
            raise ValueError(
                "optim.schedule=cooldown and optim.cooldown_steps above 0 need each other, got "
                f"optim.schedule={self.schedule} and optim.cooldown_steps={self.cooldown_steps}"
            )
        return self

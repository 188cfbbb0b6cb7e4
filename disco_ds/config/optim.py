"""The settings of the optimizer and its schedule, `optim` of a recipe."""

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
    """Factor of the learning rate from each layer to the one before it; 1: all alike."""


class OptimSettings(Settings):
    """The optimizer and its schedule."""

    name: Literal["adamw", "lamb", "lion", "sgd"] = "adamw"
    """The optimizer; lamb at ZeRO 0 only."""
    lr: float | None = Field(None, gt=0, lt=1e38)
    """Peak learning rate, as it is; None: base_lr x global_batch / 32,768."""
    base_lr: float = Field(5e-4, gt=0, lt=1e38)
    """Peak learning rate at a global batch of 32,768 (DisCo-CLIP's linear rule)."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.98)
    """Betas of AdamW, LAMB and Lion."""
    eps: float = Field(1e-6, gt=0)
    """Epsilon of AdamW and LAMB."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Momentum of SGD."""
    weight_decay: float = Field(0.2, ge=0)
    """Weight decay, on matrices only: never on biases, norms, the logit scale or the logit bias."""
    clip_norm: float = Field(0.0, ge=0)
    """Gradient clipping by global norm; 0: off."""
    schedule: Literal["cosine", "constant", "cooldown"] = "cosine"
    """After the warm-up: cosine to lr_min, constant, or constant with a linear descent at the end."""
    warmup_steps: int = Field(2000, ge=0)
    """Steps in which the learning rate rises linearly to its peak."""
    cooldown_steps: int = Field(0, ge=0)
    """Length of the descent of schedule=cooldown."""
    lr_min: float = Field(0.0, ge=0)
    """Learning rate at the end of schedule=cosine or cooldown."""
    tau_lr: float | None = Field(None, gt=0)
    """Learning rate of the logit scale (and bias), without warm-up or schedule; None: that of everything else."""
    tau_slow: float = Field(0.0, ge=0)
    """While the temperature is at most this, a third of tau_lr (FastCLIP: 0.03)."""
    image: TowerOptimSettings = TowerOptimSettings()
    text: TowerOptimSettings = TowerOptimSettings()

    @model_validator(mode="after")
    def _schedule(self) -> OptimSettings:
        if self.tau_slow and self.tau_lr is None:
            raise ValueError(f"optim.tau_slow ({self.tau_slow:g}) divides optim.tau_lr, which is not given")
        if (self.schedule == "cooldown") != (self.cooldown_steps > 0):
            raise ValueError(
                f"optim.cooldown_steps ({self.cooldown_steps}) goes with optim.schedule=cooldown ({self.schedule})"
            )
        return self

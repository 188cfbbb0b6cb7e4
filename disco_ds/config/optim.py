"""The `optim` section of a recipe: the optimizer and its learning rate schedule."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from disco_ds.config.settings import Count, PositiveCount, Settings
from disco_ds.names import CUSTOM_CODE

Fraction = Annotated[float, Field(ge=0, lt=1)]


class TowerOptimSettings(Settings):
    """Optimizer settings of one tower."""

    lr_factor: float = Field(1.0, gt=0)
    """Factor by which the learning rate is multiplied for this tower. Lower it for a pretrained
    tower."""
    weight_decay: NonNegativeFloat | None = None
    """Weight decay of this tower. Null: optim.weight_decay."""
    layer_decay: float = Field(1.0, gt=0, le=1)
    """Ratio of each layer's learning rate to the learning rate of the next layer. The last layer of
    the tower has the full rate. 1: all layers have the same rate."""


class EmaSettings(Settings):
    """The exponential moving average (EMA) of the weights."""

    decay: float = Field(0.9999, gt=0, lt=1)
    """Factor by which the old average is multiplied in every step. After n steps, the factor is at
    most (1 + n) / (10 + n), so that the average soon forgets the first weights."""
    every_steps: PositiveCount = 1
    """Number of steps between two updates of the average. Each update uses decay to the power of this
    number."""


class OptimSettings(Settings):
    """The optimizer and its learning rate schedule."""

    name: Literal["adamw", "lamb", "lion", "muon", "sgd"] = "adamw"
    """Name of the optimizer. lamb requires ZeRO stage 0. muon applies Muon to the weight matrices and
    convolution filters of layers with a number in their name (such as `resblocks.0`), and AdamW to
    all other parameters."""
    factory: str | None = Field(None, pattern=CUSTOM_CODE)
    """Custom optimizer to use instead of `name`, as `package.module:function`, which must be importable
    through PYTHONPATH. The function takes parameter groups and returns a torch optimizer. ZeRO 1 to 3
    need `elementwise`."""
    elementwise: bool = False
    """True: the optimizer that `factory` builds updates each element independently of all others. ZeRO
    1 to 3 require such an optimizer, because they call `step()` once for each parameter group, with flat parts of its
    parameters. An optimizer that counts steps in its parameter groups works up to ZeRO 2."""
    lr: float | None = Field(None, gt=0, lt=1e38)
    """Peak learning rate. Null: it follows from base_lr, lr_rule and the global batch."""
    base_lr: float = Field(5e-4, gt=0, lt=1e38)
    """Peak learning rate for a global batch of 32,768 samples. It is used only if `lr` is null."""
    lr_rule: Literal["linear", "sqrt", "none"] = "linear"
    """How the peak learning rate follows from base_lr if `lr` is null. With r = global_batch /
    32,768: `linear`: base_lr x r (DisCo-CLIP, section 5.1). `sqrt`: base_lr x the square root of r.
    `none`: base_lr."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.98)
    """Betas of AdamW, LAMB, Lion and the AdamW part of muon."""
    eps: float = Field(1e-6, gt=0)
    """Epsilon of AdamW, LAMB and the AdamW part of muon."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Momentum of SGD and Muon. Muon is usually trained with 0.95."""
    muon_precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Precision in which Muon orthogonalizes updates. On CPUs, fp32 may be faster."""
    weight_decay: float = Field(0.2, ge=0)
    """Weight decay of the weight matrices. The following have no weight decay: biases, normalization parameters and
    other vectors; position embeddings (absolute or relative); parameters that a module's `no_weight_decay()` names; the
    logit scale and the logit bias."""
    clip_norm: float = Field(0.0, ge=0)
    """Maximum norm of the gradient of all parameters together. Larger gradients are scaled down to
    this norm. 0: no clipping. If the gradient norm has spikes, set a value such as 1."""
    schedule: Literal["cosine", "constant", "cooldown"] = "cosine"
    """Learning rate schedule after warmup. `cosine`: cosine decay to lr_min. `constant`: no change.
    `cooldown`: constant, then a linear decay to lr_min over the last cooldown_steps."""
    warmup_steps: Count = 2000
    """Number of steps over which the learning rate rises linearly to its peak. Lower it for short
    runs."""
    cooldown_steps: Count = 0
    """Number of steps of the linear decay at the end of the run, if schedule is cooldown."""
    lr_min: float = Field(0.0, ge=0)
    """Learning rate at the end of the run, if schedule is cosine or cooldown."""
    tau_lr: PositiveFloat | None = None
    """Constant learning rate of the logit scale and the logit bias, without warmup. Null: they have
    the same learning rate as the other parameters."""
    tau_slow: float = Field(0.0, ge=0)
    """While the temperature is at or below this value (0.03 in FastCLIP), tau_lr is divided by 3.
    0: off."""
    ema: EmaSettings | None = None
    """Also keep a moving average of the weights, and evaluate both the weights and the average. The
    average takes 4 bytes per parameter, which ZeRO 1 to 3 divide among the ranks. Null: off."""
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
                "optim.schedule=cooldown and optim.cooldown_steps above 0 must be set together, got "
                f"optim.schedule={self.schedule} and optim.cooldown_steps={self.cooldown_steps}"
            )
        return self

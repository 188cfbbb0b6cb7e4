"""The length of a run in steps and in samples. The global batch may change within the run."""

from dataclasses import dataclass

from disco_ds.config.recipe import Config


@dataclass(frozen=True)
class Schedule:
    """The length of a run, and the conversion from steps to samples.

    No other code converts steps to samples, because the global batch may change within a run. All
    steps and samples are counted from the start of the run.
    """

    global_batch: int
    """Number of samples per step of the current stage."""
    last_step: int
    """Step after which the current stage ends."""
    num_steps: int
    """Number of steps of the whole run."""
    num_samples: int
    """Number of samples of the whole run."""
    warmup_batch: int
    """The recipe's global_batch when the run started, even if the first stage has another one.

    optim.warmup_steps and optim.cooldown_steps count steps of this size.
    """
    first_step: int = 0
    """Number of steps that were completed before the run was resumed or the current stage began; 0 for a new run."""
    first_samples: int = 0
    """Number of samples in the first `first_step` steps of the run."""
    previous_batch: int = 0
    """Number of samples in the last of the first `first_step` steps; 0 for a new run."""

    def samples(self, step: int) -> int:
        """Return the number of samples that the run has seen after its first `step` steps.

        Args:
            step: Number of steps, from first_step - 1 to last_step.
        """
        done = step - self.first_step
        return self.first_samples + done * (self.global_batch if done > 0 else self.previous_batch)


def make_schedule(
    config: Config, step: int = 0, samples: int = 0, previous_batch: int = 0, warmup_batch: int = 0
) -> Schedule:
    """Return the schedule for the rest of a run, after its first `step` steps.

    Args:
        config: Settings of the whole run.
        step: Number of completed steps.
        samples: Number of samples in the completed steps.
        previous_batch: Number of samples in the last completed step.
        warmup_batch: The recipe's global_batch when the run started; 0 for a new run, which uses config.global_batch.

    Raises:
        ValueError: If a stage would end in the middle of a step, or the run is shorter than its warmup and cooldown.
    """
    config.check_stages(samples)
    stage = config.at_sample(samples)
    num_steps, num_samples = config.find_end(step, samples)
    warmup_batch = warmup_batch or config.global_batch
    warmup, cooldown = config.optim.warmup_steps, config.optim.cooldown_steps
    most = num_samples // warmup_batch
    if warmup + cooldown > most:
        raise ValueError(
            f"optim.warmup_steps + optim.cooldown_steps ({warmup} + {cooldown}) exceed the run's "
            f"{most} steps of {warmup_batch} samples; set, for instance, optim.warmup_steps={most // 10}"
        )
    return Schedule(
        global_batch=stage.global_batch,
        last_step=stage.find_end(step, samples)[0],
        num_steps=num_steps,
        num_samples=num_samples,
        warmup_batch=warmup_batch,
        first_step=step,
        first_samples=samples,
        previous_batch=previous_batch,
    )


def find_late(config: Config, num_steps: int | None, num_epochs: float | None) -> list[str]:
    """Return warnings: one if no checkpoint is due before the end of the run, and one if no evaluation is due.

    Args:
        config: Settings of the run.
        num_steps: Length of the run in steps; None if it is unknown.
        num_epochs: Length of the run in epochs; None if it is unknown.
    """
    found = []
    for name, settings in (("checkpoint", config.checkpoint), ("eval", config.eval)):
        if config.checkpoint.every_minutes if name == "checkpoint" else not config.eval.sets:
            continue
        unit = "steps"
        length: float | None = num_steps
        if settings.every_epochs:
            unit, length = "epochs", num_epochs
        every = getattr(settings, f"every_{unit}")
        if length is not None and not 0 < every < length:
            found.append(
                f"no {name} is due before the end of the run, which has {length:,.6g} {unit}: {name}.every_{unit}="
                f"{every:g}"
            )
    return found

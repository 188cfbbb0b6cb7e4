"""open_clip_train's flags, and other words that people bring, beside the settings here.

An unknown setting or option is explained by it, and docs/from_open_clip.md has it as a table (tools/make_reference.py).
"""

from __future__ import annotations

from typing import NamedTuple


class Flag(NamedTuple):
    """What stands here for a flag: settings by their dotted names, or options of the command line, if any; a note."""

    ours: tuple[str, ...] = ()
    note: str = ""


def _ours(names: str, note: str = "") -> Flag:
    return Flag(tuple(names.split()), note)


FLAGS = {
    "train-data": _ours("data.shards data.sources", "a folder, braces, a csv, or several sources by weight"),
    "train-data-upsampling-factors": _ours("data.sources[].weight", "the share of each source in the samples"),
    "val-data": _ours("eval.validation", "name: folder of shards, or a csv"),
    "train-num-samples": Flag(note="not needed: `disco-ds index` counts the samples; the run's length is `samples`"),
    "val-num-samples": Flag(note="not needed: the sets are read to their end"),
    "dataset-type": _ours("data.source", "not needed for shards and csv files, which are told apart by their names"),
    "dataset-resampled": _ours("data.sources[].replacement", "by default every sample comes once an epoch"),
    "csv-separator": _ours("data.csv_separator"),
    "csv-img-key": _ours("data.image_key"),
    "csv-caption-key": _ours("data.captions", 'a template, as in {"{title}": 1}'),
    "imagenet-val": _ours("eval.labelled", "name: folder; several sets are allowed"),
    "imagenet-v2": _ours("eval.labelled"),
    "cache-dir": Flag(note="the environment's HF_HOME, as Hugging Face has it"),
    "logs": _ours("runs"),
    "log-local": Flag(note="not needed: ranks that fail say so, with their host's name"),
    "name": _ours("name"),
    "workers": _ours("data.workers"),
    "batch-size": _ours("micro_batch global_batch", "samples per rank and pass, and per step over all ranks"),
    "epochs": _ours("epochs", "or `steps`, or `samples`"),
    "epochs-cooldown": _ours("optim.cooldown_steps", "in steps, with `optim.schedule: cooldown`"),
    "lr": _ours("optim.lr"),
    "beta1": _ours("optim.betas"),
    "beta2": _ours("optim.betas"),
    "eps": _ours("optim.eps"),
    "wd": _ours("optim.weight_decay"),
    "momentum": _ours("optim.momentum"),
    "warmup": _ours("optim.warmup_steps", "2,000 unless set, not 10,000"),
    "opt": _ours("optim.name", "adamw, lamb, lion or sgd; timm's are not there"),
    "use-bn-sync": Flag(note="not there; batch statistics are those of a micro-batch"),
    "skip-scheduler": _ours("optim.schedule", "`constant`"),
    "lr-scheduler": _ours("optim.schedule", "cosine, constant (their const) or cooldown (their const-cooldown)"),
    "lr-cooldown-end": _ours("optim.lr_min"),
    "lr-cooldown-power": Flag(note="not there: a cooldown is linear"),
    "save-frequency": _ours(
        "checkpoint.every_epochs checkpoint.every_steps", "only the newest 3 stay unless `checkpoint.keep_last: null`"
    ),
    "save-most-recent": _ours("checkpoint.keep_last"),
    "delete-previous-checkpoint": _ours("checkpoint.keep_last"),
    "zeroshot-frequency": _ours("eval.every_epochs eval.every_steps"),
    "val-frequency": _ours("eval.every_epochs eval.every_steps"),
    "resume": _ours("--resume", "`latest`, a run's folder or a checkpoint's; shape and data place are kept"),
    "precision": _ours("deepspeed", "bf16 autocast by default (their amp_bf16); the others: docs/from_open_clip.md"),
    "model": _ours("model.name"),
    "pretrained": _ours("model.pretrained"),
    "pretrained-image": _ours("model.pretrained_image", "`timm`, or a file"),
    "lock-image": _ours("model.lock_image"),
    "lock-image-unlocked-groups": _ours("model.unlocked_layers"),
    "lock-image-freeze-bn-stats": Flag(note="not needed: the statistics of a locked tower stay"),
    "lock-text": _ours("model.lock_text"),
    "lock-text-unlocked-layers": _ours("model.unlocked_layers"),
    "lock-text-freeze-layer-norm": Flag(note="not needed: all of a locked tower's norms are frozen"),
    "image-mean": _ours("model.image_mean"),
    "image-std": _ours("model.image_std"),
    "image-interpolation": _ours("model.interpolation"),
    "image-resize-mode": _ours("model.resize_mode"),
    "aug-cfg": _ours("data.augment data.crop_scale data.crop_ratio", "scale and ratio are the crop's"),
    "grad-checkpointing": _ours("model.activation_checkpointing"),
    "local-loss": Flag(note="not needed: no loss here holds the whole matrix on a rank, but `clip`"),
    "gather-with-grad": Flag(note="not needed: every loss has the gradient of the global batch"),
    "force-context-length": Flag(note="not there; a model config (.json) of your own as `model.name` has it"),
    "force-image-size": _ours("model.image_size"),
    "force-quick-gelu": _ours("model.quick_gelu"),
    "force-patch-dropout": _ours("model.patch_dropout"),
    "force-custom-text": Flag(note="not there; a model config (.json) of your own as `model.name` has it"),
    "torchscript": Flag(note="not there"),
    "torchcompile": _ours("model.compile"),
    "trace": Flag(note="not there"),
    "accum-freq": _ours("global_batch", "the micro-batches of a step are global_batch / (ranks x micro_batch)"),
    "device": Flag(note="not needed: the accelerator that DeepSpeed finds; DS_ACCELERATOR=cpu for a CPU"),
    "dist-url": Flag(note="not needed: the launcher sets it"),
    "dist-backend": Flag(note="not needed: the accelerator's own"),
    "report-to": _ours("log.tensorboard log.wandb"),
    "wandb-notes": Flag(note="not there"),
    "wandb-project-name": _ours("log.wandb.project"),
    "debug": Flag(note="not there"),
    "copy-codebase": Flag(note="not there; a run's folder records the version and the settings"),
    "horovod": Flag(note="not there: DeepSpeed runs the ranks"),
    "ddp-static-graph": Flag(note="not needed: there is no DDP"),
    "no-set-device-rank": Flag(note="not needed: CUDA_VISIBLE_DEVICES is respected"),
    "seed": _ours("seed"),
    "grad-clip-norm": _ours("optim.clip_norm"),
    "log-every-n-steps": _ours("log.every_steps"),
    "coca-caption-loss-weight": Flag(note="not there: contrastive models only"),
    "coca-contrastive-loss-weight": Flag(note="not there: contrastive models only"),
    "remote-sync": _ours("checkpoint.copy_command", "run after each save"),
    "remote-sync-frequency": _ours("checkpoint.copy_command", "run after each save"),
    "remote-sync-protocol": _ours("checkpoint.copy_command", "any program that copies a folder"),
    "distill-model": Flag(note="not there"),
    "distill-pretrained": Flag(note="not there"),
    "use-bnb-linear": Flag(note="not there"),
    "siglip": _ours("loss.name", "`siglip`"),
    "loss-dist-impl": Flag(note="not needed: `siglip` goes round the ring"),
}
"""Every flag of open_clip_train 3.3, without its dashes."""

OTHER_WORDS = {
    "ema": Flag(note="there is no moving average of the weights"),
    "learning-rate": _ours("optim.lr"),
    "weight-decay": _ours("optim.weight_decay"),
    "optimizer": _ours("optim.name"),
    "scheduler": _ours("optim.schedule"),
    "num-epochs": _ours("epochs"),
    "max-steps": _ours("steps"),
    "num-workers": _ours("data.workers"),
    "output-dir": _ours("runs"),
    "gradient-accumulation-steps": _ours("global_batch"),
    "gradient-checkpointing": _ours("model.activation_checkpointing"),
    "bf16": _ours("deepspeed"),
    "fp16": _ours("deepspeed"),
    "amp": _ours("deepspeed"),
    "wandb": _ours("log.wandb"),
    "world-size": _ours("ranks"),
}
"""Words of other trainers."""


def explain_word(name: str) -> str | None:
    """What stands here for a setting or an option of another trainer, in a sentence; None if the word is unknown."""
    flag = (FLAGS | OTHER_WORDS).get(name.lower().lstrip("-").replace("_", "-"))
    if flag is None:
        return None
    note = f"{'; ' if flag.ours else ''}{flag.note}" if flag.note else ""
    return f"here it is {' or '.join(flag.ours)}{note}" if flag.ours else f"{note} (docs/from_open_clip.md)"

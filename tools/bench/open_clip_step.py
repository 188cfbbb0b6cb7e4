"""Measure the training steps of open_clip_train's train_one_epoch on pixels that are already on the device.

open_clip's main() prepares training in one long function, so this module repeats that code. It builds the model, the
schedule, and AdamW with two parameter groups. It can compile the whole model, and enables TF32 and cuDNN's benchmark
mode. The measured steps do not normalize pixels, because open_clip does this before the pixels are copied to the
device. The measured steps of disco_ds do, because disco_ds normalizes pixels on the device.
"""

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import open_clip
import torch
from open_clip_train.params import parse_args
from open_clip_train.scheduler import cosine_lr
from open_clip_train.train import train_one_epoch

from disco_ds.distributed import comm
from disco_ds.models.clip import read_preprocessing, read_text_size
from tools.bench.timing import Clock


class Pixels:
    """Data for train_one_epoch: a data set that is its own loader and repeats one batch.

    It sets a time mark before every measured step and after the last one.
    """

    # Logging waits for the device. With this many batches, only the first step is logged.
    num_batches = num_samples = 10**9

    def __init__(self, batch: tuple[torch.Tensor, torch.Tensor], steps: int, warmups: int):
        self.batch, self.steps, self.warmups = batch, steps, warmups
        self.clock = Clock()
        self.dataloader = self

    def set_epoch(self, epoch: int) -> None:
        pass

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for step in range(self.warmups + self.steps):
            if step == self.warmups and torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            if step >= self.warmups:
                self.clock.mark()
            yield self.batch
        self.clock.mark()


def step_ms(name: str, batch_size: int, compiled: bool, steps: int, warmups: int) -> list[float]:
    """Measure training steps with --precision amp_bf16.

    Args:
        name: Name of an open_clip model.
        batch_size: Number of pairs per step.
        compiled: Whether to use torch.compile.
        steps: Number of measured steps.
        warmups: Number of steps before the measured ones.

    Returns:
        The milliseconds of each measured step.
    """
    device = comm.local_device()
    args: Namespace = parse_args(
        [
            "--model",
            name,
            "--batch-size",
            str(batch_size),
            "--precision",
            "amp_bf16",
            "--log-every-n-steps",
            "1000000",
        ]
    )
    # open_clip's main() adds these values to the parsed arguments.
    alone = {
        "device": str(device),
        "rank": 0,
        "local_rank": 0,
        "world_size": 1,
        "distributed": False,
    }
    vars(args).update(alone, distill=False, wandb=False)
    if torch.cuda.is_available():
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
    torch.manual_seed(args.seed)
    model: Any = open_clip.create_model(
        args.model, precision=args.precision, device=device, output_dict=True
    )
    groups: dict[bool, list[torch.nn.Parameter]] = {False: [], True: []}
    for key, parameter in model.named_parameters():
        decays = parameter.ndim >= 2 and not any(
            x in key for x in ("bn", "ln", "bias", "logit_scale")
        )
        groups[decays].append(parameter)
    optimizer = torch.optim.AdamW(
        [
            {"params": groups[False], "weight_decay": 0.0},
            {"params": groups[True], "weight_decay": args.wd},
        ],
        lr=args.lr,
        betas=(args.beta1, args.beta2),
        eps=args.eps,
    )
    image = torch.randn(batch_size, 3, *read_preprocessing(model).size, device=device)
    context, vocabulary = read_text_size(model)
    data = Pixels(
        (image, torch.randint(1, vocabulary, (batch_size, context), device=device)), steps, warmups
    )
    schedule = cosine_lr(optimizer, args.lr, args.warmup, 10**6)
    trained = torch.compile(model) if compiled else model
    train_one_epoch(
        trained,
        {"train": data},
        open_clip.create_loss(args),
        0,
        optimizer,
        None,
        schedule,
        None,
        args,
    )
    return data.clock.ms()

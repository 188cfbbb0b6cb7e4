"""Run open_clip's training loop, unchanged, with a disco_ds loss that gives the full-batch gradient under DDP.

    torchrun --nproc_per_node 2 examples/open_clip_loop.py

It trains a small CLIP model on the emoji that come with disco_ds, on GPUs if there are any.
"""

import argparse
import os
import types
from pathlib import Path

import open_clip
import torch
import webdataset as wds
from open_clip_train.scheduler import cosine_lr
from open_clip_train.train import train_one_epoch

try:  # open_clip 4
    from open_clip.task import CLIPTask
    from open_clip_train.train import TrainState
except ImportError:  # open_clip 3.3
    CLIPTask = None
from torch.nn.parallel import DistributedDataParallel

import disco_ds

SHARDS = sorted(map(str, Path(disco_ds.__file__).parent.glob("assets/emoji/train/*.tar")))

MODEL = {
    "embed_dim": 128,
    "vision_cfg": {"image_size": 64, "patch_size": 16, "width": 128, "layers": 4, "head_width": 32},
    "text_cfg": {"context_length": 32, "vocab_size": 49408, "width": 128, "heads": 4, "layers": 4},
}


def main() -> float:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=64, help="samples per rank")
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()

    cuda = torch.cuda.is_available()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl" if cuda else "gloo")

    torch.manual_seed(0)
    model = open_clip.CLIP(**MODEL, output_dict=True).to(device)
    # This replaces open_clip.ClipLoss(local_loss=True, ...).
    loss = disco_ds.ClipLoss(rank=rank, world_size=world_size)

    tokenizer = open_clip.SimpleTokenizer(context_length=32)
    transform = open_clip.image_transform(64, is_train=True)
    samples = (
        wds.WebDataset(SHARDS, nodesplitter=wds.split_by_node, shardshuffle=False)
        .decode("pilrgb")
        .to_tuple("png", "txt")
        .map_tuple(transform, lambda text: tokenizer([text])[0])
        .batched(given.batch, partial=False)
        .repeat()
    )
    if CLIPTask is not None:
        samples = samples.map(lambda batch: dict(zip(("image", "text"), batch, strict=True)))
    loader = wds.WebLoader(samples, batch_size=None).with_epoch(given.steps)
    loader.num_batches, loader.num_samples = given.steps, given.steps * given.batch * world_size
    data = {"train": types.SimpleNamespace(dataloader=loader, set_epoch=lambda epoch: None)}

    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.2)
    args = argparse.Namespace(
        device=str(device), precision="amp_bf16" if cuda else "fp32", accum_freq=1, distill=False, horovod=False,
        skip_scheduler=False, grad_clip_norm=1.0, rank=rank, local_rank=rank, world_size=world_size, log_local=False,
        batch_size=given.batch, log_every_n_steps=1, wandb=False, distributed=True,
    )  # fmt: skip
    losses: list[float] = []
    loss.register_forward_hook(
        lambda module, inputs, out: losses.append(out["contrastive_loss"].item())
    )
    scheduler = cosine_lr(optimizer, 5e-4, 5, given.steps)
    if CLIPTask is None:
        model = DistributedDataParallel(model, device_ids=[device.index] if cuda else None)
        train_one_epoch(model, data, loss, 0, optimizer, None, scheduler, None, args)
    else:
        task = CLIPTask(model, loss=loss, device=device)
        task.prepare_distributed(device_ids=[device.index] if cuda else None)
        train_one_epoch(TrainState(task, optimizer, None, scheduler), data, args)
    if rank == 0:
        print(
            f"{world_size} ranks, global batch {given.batch * world_size}: loss {losses[0]:.3f} -> {losses[-1]:.3f}"
        )
    torch.distributed.destroy_process_group()
    return losses[-1]


if __name__ == "__main__":
    main()

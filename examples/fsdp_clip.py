"""Train an open_clip model under FSDP2 (fully_shard), in micro-batches, with the full-batch gradient and clipping.

torchrun --nproc_per_node 2 examples/fsdp_clip.py
"""

import argparse
import os

import open_clip
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from disco_ds import build_loss, contrastive_step

MODEL = {
    "embed_dim": 64,
    "vision_cfg": {"image_size": 32, "patch_size": 8, "width": 64, "layers": 2, "head_width": 32},
    "text_cfg": {"context_length": 16, "vocab_size": 512, "width": 64, "heads": 2, "layers": 2},
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=64, help="samples per rank")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    torch.distributed.init_process_group("nccl" if cuda else "gloo")
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()

    torch.manual_seed(0)
    # FSDP2 cannot shard a 0-d tensor; with nonscalar_logit_scale the logit scale has shape [1].
    model = open_clip.CLIP(**MODEL, nonscalar_logit_scale=True).to(device)
    for block in (*model.visual.transformer.resblocks, *model.transformer.resblocks):
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss = build_loss("disco_fused")

    def forward(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        # The features of both sides (unit rows) and the learned scale.
        return model(batch["image"], batch["text"])[:3]

    generator = torch.Generator().manual_seed(rank)
    values = []
    for _ in range(given.steps):
        # Each sample has one of 64 kinds, which determines both its image and its text.
        kind = torch.randint(0, 64, (given.batch,), generator=generator)
        image = F.interpolate(
            torch.randn(64, 3, 4, 4, generator=torch.Generator().manual_seed(9)), size=32
        )[kind]
        batch = {"image": image.to(device), "text": (kind[:, None] + torch.arange(16)).to(device)}
        out = contrastive_step(model, loss, batch, forward, micro_batches=given.micro_batches)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        values.append(out.metrics["loss"].item())
    if rank == 0:
        size = f"{ranks} ranks, global batch {given.batch * ranks} in {given.micro_batches} micro-batches per rank"
        print(f"{size}, FSDP2: loss {values[0]:.3f} -> {values[-1]:.3f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

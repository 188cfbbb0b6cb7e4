"""Compute every loss of disco_ds and its gradient on random features. The losses do not depend on the number of ranks.

python examples/losses_alone.py
torchrun --nproc_per_node 2 examples/losses_alone.py
"""

import os

import torch
from torch.nn import functional as F

from disco_ds import Embeddings, build_loss, list_losses

B, D = 64, 32


def main() -> None:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank() if ranks > 1 else 0
    # Each rank has a part of the batch.
    rows = slice(rank * B // ranks, (rank + 1) * B // ranks)

    generator = torch.Generator().manual_seed(0)
    image, text = (
        F.normalize(torch.randn(B, D, generator=generator), dim=-1)[rows] for _ in range(2)
    )
    for name in list_losses():
        loss = build_loss(name)
        # FastCLIP losses keep state for each sample of the data set.
        loss.set_num_samples(B, 100 * B)
        bias = loss.initial_bias(B)
        embeddings = Embeddings(
            image.clone().requires_grad_(),
            text.clone().requires_grad_(),
            scale=torch.tensor([loss.initial_scale], requires_grad=True),
            bias=None if bias is None else torch.tensor([bias], requires_grad=True),
            index=torch.arange(B)[rows],
        )
        out = loss(embeddings)
        out.loss.backward()
        # DDP and DeepSpeed average gradients over the ranks, which yields the full-batch gradient.
        length = embeddings.image.grad.norm() / ranks
        if rank == 0:
            print(
                f"{name:14} loss {out.metrics['loss']:8.4f}   |gradient at rank 0's images| {length:.6f}"
            )
    if ranks > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

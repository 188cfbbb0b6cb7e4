"""Print a table of gradient errors: disco_fused at each precision, and open_clip's loss with amp_bf16.

    python -m tools.check.precision           4,096 pairs of width 512, as in docs/exactness.md

All losses get the same unit rows in fp32. The error of a gradient is |gradient - true| / max(|true|, scale / batch),
where `true` is the float64 gradient of disco_fused, and |.| is the largest norm of a row. The table shows the larger of
two errors: that of the image gradient and that of the text gradient.

The tool runs on a CPU, but the errors of disco_fused are also valid for a GPU. On both devices, the operands of matrix
multiplications are rounded in the same way, and sums are in fp32. Only the order of the additions differs.
"""

import argparse
from typing import Any

import torch
from open_clip.loss import ClipLoss
from torch import Tensor
from torch.nn import functional as F

from disco_ds.losses import Embeddings, build_loss

SCALES = (14.3, 100.0)
NOISE = {"random": None, "typical": 2.0, "aligned": 0.05}
"""Kind of pairs -> noise of a text relative to its image. None: texts are independent of images."""
OURS: dict[str, dict[str, Any]] = {
    "fp16 (auto on a GPU)": {"precision": "fp16"},
    "bf16": {"precision": "bf16"},
    "tf32": {"precision": "tf32"},
    "fp32 (auto on a CPU)": {"precision": "fp32"},
}
OPEN_CLIP = "open_clip, amp_bf16"
Gradients = tuple[Tensor, Tensor]


def make_pairs(kind: str, B: int, D: int) -> tuple[Tensor, Tensor]:
    """Return image and text [B, D], unit rows in fp32."""
    generator = torch.Generator().manual_seed(0)
    image, other = (torch.randn(B, D, generator=generator, dtype=torch.float64) for _ in range(2))
    noise = NOISE[kind]
    text = other if noise is None else image + noise * other
    return F.normalize(image, dim=1).float(), F.normalize(text, dim=1).float()


def ours(image: Tensor, text: Tensor, scale: float, **options: Any) -> Gradients:
    image, text = (x.clone().requires_grad_() for x in (image, text))
    embeddings = Embeddings(image, text, torch.tensor([scale], dtype=image.dtype))
    build_loss("disco_fused", **options)(embeddings).loss.backward()
    return image.grad, text.grad  # type: ignore[return-value]


def open_clip(image: Tensor, text: Tensor, scale: float) -> Gradients:
    """Compute the gradients of open_clip's loss, called as in open_clip's trainer with --precision amp_bf16."""
    leaves = [x.clone().requires_grad_() for x in (image, text)]
    with torch.autocast(image.device.type, torch.bfloat16):
        loss = ClipLoss()(*leaves, torch.tensor(scale))
    loss.backward()
    return leaves[0].grad, leaves[1].grad  # type: ignore[return-value]


def error(got: Gradients, true: Gradients, scale: float) -> float:
    def of_side(mine: Tensor, truth: Tensor) -> float:
        floor = scale / len(truth)
        return (
            (mine.double() - truth).norm(dim=1).max() / max(truth.norm(dim=1).max().item(), floor)
        ).item()

    return max(map(of_side, got, true))


def measure(B: int, D: int) -> dict[str, list[float]]:
    """Return the gradient errors of each method, one for each combination of a kind of pairs and a logit scale."""
    table: dict[str, list[float]] = {name: [] for name in (OPEN_CLIP, *OURS)}
    for kind in NOISE:
        image, text = make_pairs(kind, B, D)
        for scale in SCALES:
            true = ours(image.double(), text.double(), scale)
            table[OPEN_CLIP].append(error(open_clip(image, text, scale), true, scale))
            for name, options in OURS.items():
                table[name].append(error(ours(image, text, scale, **options), true, scale))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--width", type=int, default=512)
    args = parser.parse_args()
    table = measure(args.batch, args.width)
    print("| | " + " | ".join(f"{kind}, s {scale:g}" for kind in NOISE for scale in SCALES) + " |")
    print("|---" * (1 + len(NOISE) * len(SCALES)) + "|")
    for name, errors in table.items():
        print(f"| {name} | " + " | ".join(f"{x:.0e}" for x in errors) + " |")


if __name__ == "__main__":
    main()

"""Text towers that do not compute padding.

In a causal tower that takes the feature of a text at its end token, the tokens after the end token change neither the
feature nor the gradients. So only the tokens up to the end token are packed, for all texts of a micro-batch, into one
tensor [T, C]. All layers except attention work on single tokens; attention.py has the attention of packed texts.
Hugging Face towers mask padding, so their texts are cut to the length of the longest one. Towers that attend to
padding, such as SigLIP's, are not changed.
"""

# m texts of L tokens with padding; T tokens without it; C is the width of the tower.

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import open_clip
import torch
from open_clip.hf_model import HFTextEncoder
from open_clip.transformer import TextTransformer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from disco_ds.models.fast.attention import HALVES, MAX_ROWS, Block, Packing, has_kernel

CPU = torch.device("cpu")
CountTokens = Callable[[Tensor], np.ndarray]
"""Function that maps texts [m, L] to the number of tokens that a tower needs of each text, [m].

If the texts are on a GPU, the host waits for the result.
"""


class PackedText(TextTransformer):
    """open_clip's causal text tower, run on packed tokens."""

    def forward(self, text: Tensor, lengths: np.ndarray | None = None) -> Tensor:
        """Return the features of m texts of L tokens, [m, L].

        `lengths`, [m], is the result of `count_tokens`. None: count the needed tokens here.
        """
        return (
            encode_packed(self, text, lengths) if runs_packed(self, text) else super().forward(text)
        )


class CutText(HFTextEncoder):
    """open_clip's wrapper of a Hugging Face text tower, run on texts that are cut to the length of the longest one."""

    def forward(self, x: Tensor, lengths: np.ndarray | None = None) -> Any:
        """Return the features of m texts of L tokens, [m, L].

        `lengths`, [m], is the result of `count_tokens`. None: count the needed tokens here.
        """
        if lengths is None:
            lengths = count_tokens(self, x)
        # Round up to a multiple of 8, so that torch.compile and the allocator see only a few lengths.
        return super().forward(x[:, : -(-int(lengths.max()) // 8) * 8])


def find_counter(
    model: Any, device: torch.device = CPU, is_half: bool = False
) -> CountTokens | None:
    """Return a function that counts the tokens that the model's text tower needs.

    Return None if the tower needs all tokens on this device, or if the model takes two views of each image and no text.
    """
    tower = getattr(model, "text", model)
    is_short = isinstance(tower, CutText) or (packs(tower) and fits_kernels(tower, device, is_half))
    if getattr(model, "two_views", False) or not is_short:
        return None
    return partial(count_tokens, tower)


def count_tokens(tower: Any, text: Tensor) -> np.ndarray:
    """Count the tokens of each text [m, L] that a tower needs, [m]: all tokens up to the last needed one, at least 1.

    `tower` is a CutText, or a tower for which `packs` is true. If the texts are on a GPU, the host waits.
    """
    if not isinstance(tower, CutText):
        return find_ends(tower, text).cpu().numpy() + 1
    positions = torch.arange(1, text.shape[1] + 1, device=text.device)
    is_needed = text != tower.config.pad_token_id
    return (is_needed * positions).amax(1).clamp(min=1).cpu().numpy()


def packs(tower: Any) -> bool:
    """Return whether `encode_packed` can run `tower`.

    `tower` is a text tower, or an open_clip CLIP model, which contains the parts of its text tower directly.
    """
    if (
        type(tower) is TextTransformer
        or not is_causal(tower)
        or getattr(tower, "output_tokens", False)
    ):
        return False
    # Later tokens have no effect on the feature of the end token.
    pooled = read_pooling(tower)[0] in ("argmax", "eos")
    return pooled and all(isinstance(block, Block) for block in tower.transformer.resblocks)


def runs_packed(tower: Any, text: Tensor) -> bool:
    """Return whether the tower runs on packed tokens in the current precision, on the device of `text`."""
    dtype = tower.transformer.get_cast_dtype()
    if text.is_cuda and torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
    return fits_kernels(tower, text.device, dtype in HALVES)


def fits_kernels(tower: Any, device: torch.device, is_half: bool) -> bool:
    """Return whether a tower for which `packs` is true runs on packed tokens.

    On a GPU, packing saves time only with the Triton kernels, which take 16-bit values, short texts and narrow heads.
    """
    return device.type != "cuda" or (is_half and is_small(tower) and has_kernel(device))


def is_small(tower: Any) -> bool:
    """Return whether the texts and the heads of a tower for which `packs` is true fit the Triton kernels."""
    attention = tower.transformer.resblocks[0].attn
    head_width = attention.out_proj.in_features // attention.num_heads
    return max(tower.context_length, head_width) <= MAX_ROWS


def is_causal(tower: Any) -> bool:
    """Return whether this open_clip tower uses the causal mask, and no mask for padding.

    Other classes, also subclasses of open_clip's towers, count as not causal, because their mask may be another one.
    """
    if type(tower) not in (open_clip.CLIP, TextTransformer, PackedText):
        return False
    adds = getattr(tower, "cls_emb", None) is not None or getattr(tower, "use_pad_mask", False)
    return getattr(tower, "attn_mask", None) is not None and not adds


def read_pooling(tower: Any) -> tuple[str | None, int | None]:
    """Return open_clip's pool_type of a text tower, and its end token."""
    if isinstance(tower, TextTransformer):
        return tower.pool_type, tower.eos_id
    return getattr(tower, "text_pool_type", None), getattr(tower, "text_eos_id", None)


def find_ends(tower: Any, text: Tensor) -> Tensor:
    """Return the position in each text [m, L] at which a tower pools, [m]. Its pool_type must be "argmax" or "eos"."""
    pool_type, eos = read_pooling(tower)
    values = text if pool_type == "argmax" else torch.eq(text, eos or 0).int()
    return values.argmax(-1)


def encode_packed(tower: Any, text: Tensor, lengths: np.ndarray | None) -> Tensor:
    """Return the features [m, D] of texts [m, L], without their padding.

    Args:
        tower: A tower for which `packs` is true.
        text: The tokens.
        lengths: [m], the result of `count_tokens`. None: call that function here, for which the host waits.
    """
    if lengths is None:
        lengths = count_tokens(tower, text)
    tokens, positions, last, packing = pack(text, lengths)
    dtype = tower.transformer.get_cast_dtype()
    x = tower.token_embedding(tokens).to(dtype)
    x = x + F.embedding(positions, tower.positional_embedding).to(dtype)
    for block in tower.transformer.resblocks:
        if tower.transformer.grad_checkpointing:
            x = checkpoint(block, x, None, None, None, packing, use_reentrant=False)
        else:
            x = block(x, packing=packing)
    x = tower.ln_final(x.index_select(0, last))
    projection = tower.text_projection
    if projection is None:
        return x
    return projection(x) if isinstance(projection, nn.Linear) else x @ projection


def pack(text: Tensor, lengths: np.ndarray) -> tuple[Tensor, Tensor, Tensor, Packing]:
    """Pack the first tokens of each text, sorted by length, into one tensor. The host does not wait for the device.

    The packed tensor begins with unused texts of one token each. They round its length T up to a multiple of m / 4, so
    that the allocator sees few sizes.

    Args:
        text: [m, L] tokens.
        lengths: [m], the number of tokens of each text.

    Returns:
        The packed tokens, [T]; the position of each token within its text, [T]; the row of the last token of each text,
        [m]; and a description of where the texts are in the packed tensor.
    """
    m = len(lengths)
    unit = max(m // 4, 1)
    num_spare = -int(lengths.sum()) % unit
    order = np.argsort(lengths, kind="stable")
    owner = np.concatenate([np.zeros(num_spare, np.int64), order])
    length = np.concatenate([np.ones(num_spare, np.int64), lengths[order]])
    end = length.cumsum()
    last = np.empty(m, np.int64)
    last[order] = end[num_spare:] - 1
    tiles = _tile(end)
    # Flattened, because torch.compile assumes that two sizes that are equal in the first batch are always equal.
    groups = torch.from_numpy(np.stack(np.unique(length, return_counts=True), 1).flatten())
    # Send all integers to the device in one copy, to a GPU from pinned memory.
    ints = torch.from_numpy(np.concatenate([owner, length, end, last, tiles]))
    ints = (ints.pin_memory() if text.is_cuda else ints).to(text.device, non_blocking=True)
    n = len(length)
    owner_, length_, end_, last_, tiles_ = ints.split([n, n, n, m, len(tiles)])
    T = int(length.sum())
    numbers = torch.arange(n, device=text.device)
    segments = numbers.repeat_interleave(length_, output_size=T)
    start = end_ - length_
    positions = torch.arange(T, device=text.device) - start[segments]
    tokens = text[owner_[segments], positions]
    return tokens, positions, last_, Packing(groups, tiles_.int(), segments.int())


def _tile(end: np.ndarray) -> np.ndarray:
    """Return the first row of each tile and, at the end, the number of rows of all texts.

    A tile contains whole texts, at most MAX_ROWS rows. A longer text is one tile. `end` has the row after each text.
    """
    starts = [0]
    number = 0
    while number < len(end):
        number = max(number + 1, int(np.searchsorted(end, starts[-1] + MAX_ROWS, side="right")))
        starts.append(int(end[number - 1]))
    return np.array(starts)

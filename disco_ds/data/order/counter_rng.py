"""Random numbers as a pure function of keys: the same in every process, on every device, in any order.

The generator is counter-based: the finalizer of splitmix64, applied to a chain of keys in integer arithmetic, which is
the same on CPU and GPU. It has no state, so nothing has to be saved in a checkpoint. It is used by the data order, by
the workers (crop, caption) and by the augmentation on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

CROP_COLUMN = 0
"""Columns of a sample's row of random numbers: 22 for the crop, one for the caption, and for every view ten to move it,
64 for colors and boxes, and one for each pixel."""
CAPTION_COLUMN = 22
AUGMENT_COLUMN = 32
COLOR_COLUMN = 128
NOISE_COLUMN = 1 << 20


_MASK = 0xFFFF_FFFF_FFFF_FFFF


def _signed(value: int) -> int:
    """The int64 with the same 64 bits: torch has no arithmetic on uint64."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


GOLDEN = 0x9E37_79B9_7F4A_7C15
"""2**64 times the fraction of the golden ratio, an odd number."""
_GAMMA = _signed(GOLDEN)
_FACTOR_1 = _signed(0xBF58_476D_1CE4_E5B9)
_FACTOR_2 = _signed(0x94D0_49BB_1331_11EB)


def keyed_uniform(seed: int, epoch: Tensor, index: Tensor, num: int, first: int = 0) -> Tensor:
    """A row of uniform random numbers for each sample; a column's value does not depend on `num` or `first`.

    Args:    epoch, index [m] int64 on one device; num columns, counted from `first`.
    Returns: [m, num] fp32 in [0, 1), multiples of 2**-24, so that CPU and GPU agree to the bit.
    Source:  Steele, Lea, Flood 2014, splitmix64.
    """
    bits = keyed_bits(seed, epoch, index, num, first)
    # The upper 24 bits, as many as the significand of fp32 holds.
    return _shift_right(bits, 40).to(torch.float32) * 2.0**-24


def keyed_bits(seed: int, epoch: Tensor, index: Tensor, num: int, first: int = 0) -> Tensor:
    """As keyed_uniform, but [m, num] int64 with 64 random bits each."""
    key = _absorb(_absorb(torch.full_like(index, _signed(seed)), epoch), index)
    columns = torch.arange(first, first + num, dtype=torch.int64, device=index.device)
    return _absorb(key[:, None], columns[None, :])


def keyed_row(seed: int, epoch: int, index: int, num: int, first: int = 0) -> list[float]:
    """keyed_uniform for one sample, in Python integers: tensors take ten times as long for a single row."""
    key = _mix_int(seed)
    for value in (epoch, index):
        # Two rounds: the second of `_absorb(key, value)` and the first of the next call.
        key = _mix_int(_mix_int(key + (value + 1) * _GAMMA))
    return [
        (_mix_int(key + (column + 1) * _GAMMA) >> 40) * 2.0**-24
        for column in range(first, first + num)
    ]


def keyed_int(*keys: int) -> int:
    """64 random bits as a Python integer."""
    key = 0
    for value in keys:
        key = _mix_int(_mix_int(key) + (value + 1) * _GAMMA)
    return key


def keyed_permutation(num: int, *keys: int) -> Tensor:
    """A random permutation of 0 .. num - 1, [num] int64; unlike numpy's, it is the same in every version."""
    key = torch.zeros(1, dtype=torch.int64)
    for value in keys:
        key = _absorb(key, torch.tensor([_signed(value)]))
    return torch.argsort(_absorb(key, torch.arange(num)), stable=True)


def _absorb(key: Tensor, value: Tensor) -> Tensor:
    """Mix in one more key; int64 products wrap around, as the algorithm requires."""
    x = _mix(key) + (value + 1) * _GAMMA
    return _mix(x)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _FACTOR_1
    x = (x ^ _shift_right(x, 27)) * _FACTOR_2
    return x ^ _shift_right(x, 31)


def _mix_int(x: int) -> int:
    x &= _MASK
    x = ((x ^ (x >> 30)) * _FACTOR_1) & _MASK
    x = ((x ^ (x >> 27)) * _FACTOR_2) & _MASK
    return x ^ (x >> 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; torch's >> on int64 is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)

"""Counter-based random numbers: a pure function of keys, equal in every process and on every device.

The generator applies the finalizer of splitmix64 to a chain of keys. Integer arithmetic gives the same bits on CPU and
GPU. The generator has no state, so checkpoints need not save any. The data order, the workers (crop, caption) and the
augmentation on the device use it.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

# Each sample has a row of random numbers. The constants below are the first column of each use.
CROP_COLUMN = 0
"""22 columns for the random crop."""
CAPTION_COLUMN = 22
"""One column for the choice of the caption."""
AUGMENT_COLUMN = 32
"""Ten columns per view for rotation, zoom, shift, contrast and brightness."""
COLOR_COLUMN = 128
"""64 columns per view for color jitter and erased boxes."""
NOISE_COLUMN = 1 << 20
"""One column per view and pixel for the noise in erased boxes."""

_MASK = 0xFFFF_FFFF_FFFF_FFFF


def _signed(value: int) -> int:
    """Return the int64 with the same 64 bits, since torch has no arithmetic on uint64."""
    return (value + 2**63) % 2**64 - 2**63


GOLDEN = 0x9E37_79B9_7F4A_7C15
"""2**64 times the fractional part of the golden ratio, rounded to an odd number."""
_GAMMA = _signed(GOLDEN)
_FACTOR_1 = _signed(0xBF58_476D_1CE4_E5B9)
_FACTOR_2 = _signed(0x94D0_49BB_1331_11EB)


def keyed_uniform(seed: int, epoch: Tensor, index: Tensor, num: int, first: int = 0) -> Tensor:
    """Draw a row of uniform random numbers for each sample.

    The value in a column does not depend on `num` or `first`.

    Args:
        seed: Any integer.
        epoch: [m] int64.
        index: [m] int64 sample ids, on the same device.
        num: Number of columns.
        first: The first column.

    Returns:
        [m, num] fp32 in [0, 1), multiples of 2**-24, equal to the bit on CPU and GPU.

    Source: Steele, Lea, Flood 2014, splitmix64.
    """
    bits = keyed_bits(seed, epoch, index, num, first)
    # Keep the upper 24 bits, because fp32 represents 24 bits exactly.
    return _shift_right(bits, 40).to(torch.float32) * 2.0**-24


def keyed_bits(seed: int, epoch: Tensor, index: Tensor, num: int, first: int = 0) -> Tensor:
    """Draw random bits for each sample: as keyed_uniform, but [m, num] int64 with 64 random bits each."""
    key = _absorb(_absorb(torch.full_like(index, _signed(seed)), epoch), index)
    columns = torch.arange(first, first + num, dtype=torch.int64, device=index.device)
    return _absorb(key[:, None], columns[None, :])


def keyed_row(seed: int, epoch: int, index: int, num: int, first: int = 0) -> list[float]:
    """Draw the row of keyed_uniform for one sample, without tensors, which are slower for a single row."""
    key = _absorb_int(_absorb_int(seed, epoch), index)
    columns = range(first, first + num)
    return [(_absorb_int(key, column) >> 40) * 2.0**-24 for column in columns]


def keyed_int(*keys: int) -> int:
    """Draw 64 random bits as a Python integer."""
    return reduce(_absorb_int, keys, 0)


def keyed_permutation(num: int, *keys: int) -> Tensor:
    """Draw a random permutation of 0 .. num - 1, [num] int64.

    Unlike numpy's permutations, it is guaranteed to be the same in every version of the library.
    """
    key = torch.tensor([_signed(keyed_int(*keys))])
    return torch.argsort(_absorb(key, torch.arange(num)), stable=True)


def _absorb(key: Tensor, value: Tensor) -> Tensor:
    """Add a key to the chain. Products of int64 wrap around, as the algorithm requires."""
    return _mix(_mix(key) + (value + 1) * _GAMMA)


def _absorb_int(key: int, value: int) -> int:
    return _mix_int(_mix_int(key) + (value + 1) * _GAMMA)


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
    """Shift right and fill with zeros; torch's >> on int64 copies the sign bit instead."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)

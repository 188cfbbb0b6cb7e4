"""Counter-based random numbers: a pure function of integer keys, with equal results in every process and on any device.

The generator applies the finalizer of splitmix64 to a chain of keys. Integer arithmetic gives the same bits on CPU and
GPU. The generator has no state, so nothing has to be saved in checkpoints. It is used by the data order, by the data
workers (for crops and captions) and by the augmentation on the device.
"""

# Symbols in shapes: m samples.

from functools import reduce

import numpy as np
import torch
from torch import Tensor

# Each sample has a row of random numbers, and each use of random numbers has its own columns of that row. Each constant
# below is the first column of one use.
CROP_COLUMN = 0
"""First of 22 columns for the random crop."""
CAPTION_COLUMN = 22
"""First of two columns: one to choose the caption template, and one to choose an item from a list of captions."""
AUGMENT_COLUMN = 32
"""First of the columns, ten per view, for rotation, zoom, shift, and the scale and offset of the channels."""
COLOR_COLUMN = 128
"""First of the columns, 64 per view, for color jitter."""

_MASK = 0xFFFF_FFFF_FFFF_FFFF


def _signed(value: int) -> int:
    """Reinterpret the 64 bits of an unsigned integer as int64, because torch has no arithmetic on uint64."""
    return (value + 2**63) % 2**64 - 2**63


GOLDEN = 0x9E37_79B9_7F4A_7C15
"""2**64 times the fractional part of the golden ratio, rounded to an odd number."""
_GAMMA = _signed(GOLDEN)
_FACTOR_1 = _signed(0xBF58_476D_1CE4_E5B9)
_FACTOR_2 = _signed(0x94D0_49BB_1331_11EB)


def random_key(seed: int, epoch: int, index: int) -> int:
    """Return the key, an int64, that determines the random numbers of sample `index` in an epoch."""
    return _signed(reduce(_absorb_int, (epoch, index), seed))


def keyed_uniform(key: Tensor, num: int, start: int = 0) -> Tensor:
    """Draw a row of uniform random numbers for each sample.

    A row has infinitely many columns, of which this function returns `num`. The value in each column is fixed: it does
    not depend on `num` or `start`.

    Args:
        key: The result of random_key for each sample, [m] int64.
        num: Number of columns to return.
        start: The first column to return.

    Returns:
        [m, num] fp32 in [0, 1), multiples of 2**-24, bitwise equal on CPU and GPU.

    Source: Steele, Lea, Flood 2014, splitmix64.
    """
    columns = torch.arange(start, start + num, dtype=torch.int64, device=key.device)
    bits = _mix(_mix(key)[:, None] + (columns + 1) * _GAMMA)
    # Keep the upper 24 bits, because fp32 represents 24 bits exactly.
    return _shift_right(bits, 40).to(torch.float32) * 2.0**-24


def keyed_float(key: int, column: int) -> float:
    """Return one number of keyed_uniform for a single sample, but without tensors, which is faster."""
    return (_absorb_int(key, column) >> 40) * 2.0**-24


def keyed_int(*keys: int) -> int:
    """Draw 64 random bits, determined by the keys, as a Python integer."""
    return reduce(_absorb_int, keys, 0)


def keyed_permutation(num: int, *keys: int) -> np.ndarray:
    """Draw a random permutation of 0 .. num - 1, determined by the keys, [num] int64.

    numpy's permutations may differ between versions of numpy; this one is always the same.
    """
    key = torch.tensor(_signed(keyed_int(*keys)))
    # int64 multiplication wraps around, as the algorithm requires.
    bits = _mix(_mix(key) + (torch.arange(num) + 1) * _GAMMA)
    return torch.argsort(bits, stable=True).numpy()


def _absorb_int(key: int, value: int) -> int:
    """Add `value` to the chain of keys."""
    return _mix_int(_mix_int(key) + (value + 1) * GOLDEN)


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

"""Checksums of buckets on the device: taken where a bucket leaves, taken again and compared where it arrives.

A digest is two sums of 8-byte words, modulo 2 ** 64. Any one changed word changes the plain sum. The other sum weighs each
word by odd factors of its row and column in a grid, so words that change places change it.
"""

from __future__ import annotations

import torch

_COLUMNS = 4096  # words in a row of the grid
_ODD = -7046029254386353131  # 0x9e3779b97f4a7c15 as int64: spreads consecutive numbers over all bits


def digest(body: torch.Tensor) -> torch.Tensor:
    """The digest, int64 [2] on the same device, of `body`, uint8 [multiple of 8]. Reads it three times."""
    words = body.view(torch.int64)
    whole = words.numel() // _COLUMNS * _COLUMNS
    grid, rest = words[:whole].view(-1, _COLUMNS), words[whole:]
    weighed = _weigh(grid.sum(0), 0) + _weigh(grid.sum(1), _COLUMNS) + _weigh(rest, 0)
    return torch.stack([words.sum(), weighed])


def _weigh(sums: torch.Tensor, first: int) -> torch.Tensor:
    factors = (2 * torch.arange(first, first + sums.numel(), device=sums.device) + 1) * _ODD
    return (sums * factors).sum()

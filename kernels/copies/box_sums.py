"""Sums that tell sets of bytes apart, however the bytes are cut into boxes.

Every element has a weight: a product of powers of a few fixed bases, whose exponents are its places (in a bucket, in a
tensor, in a parameter). Along each dim of a strided box all places advance by fixed steps, so its weights are a geometric
series:

    sum over i < n of  g^(a + i s) * w^(b + i t)   =   g^a * w^b * (r^n - 1) / (r - 1),   r = g^s * w^t

So a table of copies is summed box by box. Two tables have one sum if they name the same elements equally often, whatever
their boxes. All numbers are modulo the prime 2^61 - 1. Other tables have the same sum with a probability of at most
(largest place) / 2^61, below 1 in a million; after usual damage about 1 in 2^60.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from .copy_table import Ints

PRIME = (1 << 61) - 1
Weights = NDArray[np.uint64]  # numbers below PRIME

_WINDOW = 16  # bits of an exponent that one table of powers serves
_LOW = np.uint64((1 << 31) - 1)
_LOW30 = np.uint64((1 << 30) - 1)
_PRIME = np.uint64(PRIME)


def times(a: Weights, b: Weights) -> Weights:
    """a * b modulo PRIME, element by element."""
    a_high, a_low, b_high, b_low = a >> np.uint64(31), a & _LOW, b >> np.uint64(31), b & _LOW
    middle = a_high * b_low + a_low * b_high
    total = (a_high * b_high << np.uint64(1)) + (middle >> np.uint64(30)) + a_low * b_low
    total = total + ((middle & _LOW30) << np.uint64(31))  # below 2^64
    total = (total & _PRIME) + (total >> np.uint64(61))
    return np.where(total >= _PRIME, total - _PRIME, total)


class Base:
    """A base of the weights, the same in all processes."""

    def __init__(self, name: str) -> None:
        self.value = number_of(name)
        self._tables: list[Weights] = []  # of powers, one for each window of the exponent

    def powers(self, exponents: Ints) -> Weights:
        """The base to the power of each of `exponents`, 64 bits each."""
        left = exponents.astype(np.uint64)
        result = np.ones(len(left), np.uint64)
        for window in range(64 // _WINDOW):
            digits = left & np.uint64((1 << _WINDOW) - 1)
            if digits.any():
                result = times(result, self._table(window)[digits])
            left = left >> np.uint64(_WINDOW)
            if not left.any():
                break
        return result

    def _table(self, window: int) -> Weights:
        while len(self._tables) <= window:
            step = pow(self.value, 1 << _WINDOW * len(self._tables), PRIME)
            table = np.ones(1, np.uint64)
            for bit in range(_WINDOW):
                table = np.concatenate([table, times(table, np.uint64(pow(step, 1 << bit, PRIME)) + 0 * table)])
            self._tables.append(table)
        return self._tables[window]


def box_sum(dims: Iterable[tuple[int, Sequence[tuple[Base, int]]]]) -> int:
    """The sum of a box whose first element has weight 1; `dims` are (extent, the step of each base's exponent)."""
    total = 1
    for extent, steps in dims:
        ratio = 1
        for base, step in steps:
            ratio = ratio * pow(base.value, step, PRIME) % PRIME
        total = total * _series(ratio, extent) % PRIME
    return total


def number_of(text: str) -> int:
    """A number below PRIME, at random but the same in all processes."""
    return int.from_bytes(blake2b(text.encode(), digest_size=16).digest(), "little") % PRIME


def mixed(*columns: NDArray[np.integer]) -> Weights:
    """A weight for each row of `columns`, at random but the same in all processes."""
    state = np.full(len(columns[0]), 0x9E3779B97F4A7C15, np.uint64)
    for column in columns:
        state = _scattered(state ^ _scattered(column.astype(np.int64).view(np.uint64) + np.uint64(0x632BE59BD9B4E019)))
    return state % _PRIME


def totals(owner: Ints, weights: Weights, count: int) -> Weights:
    """The sum of the weights of each of `count` owners, modulo PRIME; `owner` [weights]."""
    halves = np.zeros((2, count), np.uint64)
    np.add.at(halves[0], owner, weights & np.uint64(0xFFFFFFFF))
    np.add.at(halves[1], owner, weights >> np.uint64(32))
    low, high = halves % _PRIME
    total: Weights = (times(high, np.full(count, 1 << 32, np.uint64)) + low) % _PRIME
    return total


def sums_of(owner: Ints, weights: Weights, count: int) -> list[int]:
    """As `totals`, in numbers of Python."""
    sums: list[int] = totals(owner, weights, count).tolist()
    return sums


@cache
def _series(ratio: int, terms: int) -> int:
    """1 + ratio + ... + ratio ** (terms - 1)."""
    if ratio == 1:
        return terms % PRIME
    return (pow(ratio, terms, PRIME) - 1) * pow(ratio - 1, -1, PRIME) % PRIME


def _scattered(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


IN_PARAMETER, IN_TENSOR, IN_MESSAGE = Base("in parameter"), Base("in tensor"), Base("in message")

"""Max-min fair rates: links share their bandwidth evenly, and what one flow cannot use goes to the others."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_MOST_FILLINGS = 16  # of one computation; flows that are left then get their fair share of what is left, and no more


def fair_rates(first: Ints, second: Ints, bandwidth: Floats, tolerance: float = 1e-9) -> Floats:
    """Bytes per second of each flow; `first` and `second` [flows] are the links that it goes through.

    `bandwidth` [links] may be infinite, for flows that need one link alone. In each filling, links freeze whose flows can
    all use an even share: no other link limits them more. Links within `tolerance` of that freeze as well, so that a rate
    may be lower by that part; no link carries more than its bandwidth. (Bertsekas and Gallager, Data Networks, 6.5.2.)
    """
    rates = np.empty(len(first))
    left = bandwidth.copy()
    flows = np.arange(len(first))
    for filling in range(_MOST_FILLINGS if tolerance > 1e-6 else len(bandwidth) + 1):
        count = np.bincount(first, minlength=len(left)) + np.bincount(second, minlength=len(left))
        with np.errstate(divide="ignore", invalid="ignore"):
            share = left / count
        share_of_first, share_of_second = share[first], share[second]
        rate = np.minimum(share_of_first, share_of_second)
        limits = np.bincount(first[rate >= share_of_first * (1 - tolerance)], minlength=len(left))
        limits += np.bincount(second[rate >= share_of_second * (1 - tolerance)], minlength=len(left))
        full = limits == count
        frozen = full[first] | full[second]
        if frozen.all() or (tolerance > 1e-6 and filling == _MOST_FILLINGS - 1):
            rates[flows] = rate
            break
        rates[flows[frozen]] = rate[frozen]
        left -= np.bincount(first[frozen], rate[frozen], len(left)) + np.bincount(
            second[frozen], rate[frozen], len(left)
        )
        np.maximum(left, 0.0, out=left)
        flows, first, second = flows[~frozen], first[~frozen], second[~frozen]
    return rates

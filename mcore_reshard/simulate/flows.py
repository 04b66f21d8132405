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
    rates, flows, left = np.empty(len(first)), np.arange(len(first)), bandwidth.copy()
    count = (np.bincount(first, minlength=len(left)) + np.bincount(second, minlength=len(left))).astype(np.float64)
    for filling in range(_MOST_FILLINGS if tolerance > 1e-6 else len(bandwidth) + 1):
        share_of_first, share_of_second = left[first] / count[first], left[second] / count[second]
        rate = np.minimum(share_of_first, share_of_second)
        full = np.ones(len(left), bool)
        full[first[rate < share_of_first * (1 - tolerance)]] = False
        full[second[rate < share_of_second * (1 - tolerance)]] = False
        frozen = full[first] | full[second]
        if frozen.all() or (tolerance > 1e-6 and filling == _MOST_FILLINGS - 1):
            rates[flows] = rate
            break
        done, going = np.flatnonzero(frozen), np.flatnonzero(~frozen)
        of_first, of_second, of_rate = first[done], second[done], rate[done]
        rates[flows[done]] = of_rate
        left -= np.bincount(of_first, of_rate, len(left)) + np.bincount(of_second, of_rate, len(left))
        np.maximum(left, 0.0, out=left)
        count -= np.bincount(of_first, minlength=len(left)) + np.bincount(of_second, minlength=len(left))
        flows, first, second = flows[going], first[going], second[going]
    return rates

# SPDX-License-Identifier: Apache-2.0
"""How much wider an estimate from few samples must be."""

import bisect
import operator

_STUDENT = (
    *((1, 636.62), (2, 31.60), (3, 12.92), (4, 8.61), (5, 6.87), (6, 5.96), (7, 5.41), (8, 5.04)),
    *((10, 4.59), (12, 4.32), (16, 4.01), (24, 3.75), (40, 3.55), (80, 3.42), (200, 3.29)),
)
"""Quantiles of Student's t, two-sided 99.9 %, by degrees of freedom; the last is the normal's."""


def few_samples(samples: int) -> float:
    """How much wider a tolerance from few samples must be to hold as often as one from many.

    The ratio of Student's t to the normal distribution at 99.9 %, two-sided.
    """
    if samples >= _STUDENT[-1][0]:
        return 1.0
    number = bisect.bisect_right(_STUDENT, max(samples, 1), key=operator.itemgetter(0))
    return _STUDENT[number - 1][1] / _STUDENT[-1][1]

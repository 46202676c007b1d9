"""Whether outputs are right: against float64, row by row, in the grader's process."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from k3rl.envs.kernel.operators import Operator, Tolerance, value_of

BF16_BITS = 8  # of the significand, the hidden one counted
LEAST_ROW = 0.01  # a row counts as at least this share of the whole output's root mean square


def deviation(got: np.ndarray, want: np.ndarray, rounding: float = 0.0) -> tuple[float, float]:
    """(root-mean-square, largest) error of the worst row over that row's root mean square; NaN counts as infinite.

    rounding: see `Tolerance`.
    """
    if want.size == 0:
        return 0.0, 0.0
    width = want.shape[-1]
    got, want = got.reshape(-1, width), want.reshape(-1, width)
    whole = float(np.sqrt(np.mean(want**2)))
    scale = np.maximum(np.sqrt(np.mean(want**2, axis=1)), max(LEAST_ROW * whole, 1e-30))
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(got - want)
        if rounding:
            error = np.maximum(error - rounding * np.ldexp(1.0, np.frexp(want)[1] - BF16_BITS), 0.0)
        rms = np.sqrt(np.mean(error**2, axis=1)) / scale
        largest = error.max(axis=1) / scale
    worst = [float(np.max(np.where(np.isnan(one), np.inf, one))) for one in (rms, largest)]
    return worst[0], worst[1]


def complaint(operator: Operator, got: Mapping[str, np.ndarray], want: Mapping[str, np.ndarray]) -> str | None:
    """Why outputs as stored are not right, None when they are."""
    for tensor in operator.outputs:
        rms, largest = deviation(
            value_of(got[tensor.name], tensor.dtype), want[tensor.name], operator.tolerance.rounding
        )
        if not within(rms, largest, operator.tolerance):
            limit = operator.tolerance
            return (
                f"{tensor.name}: root-mean-square error {rms:.2g} of a row (at most {limit.rms:g}), "
                f"largest {largest:.2g} (at most {limit.largest:g})"
            )
    return None


def within(rms: float, largest: float, tolerance: Tolerance) -> bool:
    """Whether both are small enough; NaN is not."""
    return rms <= tolerance.rms and largest <= tolerance.largest

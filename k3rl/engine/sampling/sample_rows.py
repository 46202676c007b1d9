"""One token for every row that has logits, by the parameters, constraints and biases of the request in it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from k3rl.engine.rows import RowTable
from k3rl.engine.sampling import alternatives, sampler
from k3rl.engine.sampling.grammar import constrain
from k3rl.engine.sampling.sampler import Allowed, Biases, Draws


class Sample(Protocol):
    """`sampler.sample`, or what gives the same draws in another place or order (`device_sampler`, `exact`)."""

    def __call__(
        self,
        logits: Tensor,
        temperature: np.ndarray,
        top_p: np.ndarray,
        top_k: np.ndarray,
        uniform: np.ndarray,
        min_p: np.ndarray,
        biases: Biases | None,
        allowed: Allowed | None,
        /,
    ) -> Draws: ...


class SampledRows(NamedTuple):
    """Rows int64 [R] and their draws; dead: rows whose constraint and forbidden tokens leave nothing to sample."""

    rows: np.ndarray
    draws: Draws
    dead: np.ndarray


def sample_rows(table: RowTable, rows: np.ndarray, logits: Tensor, sample: Sample) -> SampledRows:
    """Draws for rows [R] from logits [R, V]; alternatives are recorded, draws are not yet appended."""
    free = constrain(table, rows, logits)
    rows, biases = free.rows, table.biases(free.rows)
    draws = sample(
        free.logits,
        table.temperature[rows],
        table.top_p[rows],
        table.top_k[rows],
        sampler.uniforms(table.seed[rows], table.count[rows]),
        table.min_p[rows],
        biases,
        free.allowed,
    )
    alternatives.record(table, free, biases, draws)
    return SampledRows(rows, draws, free.dead)

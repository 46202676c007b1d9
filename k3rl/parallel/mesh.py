"""How the ranks of a learner are laid out: data x expert x context.

    rank = (data * E + expert) * C + context

`context` ranks share the tokens of one sequence, so they sit next to each other. `expert` ranks share the routed
experts; each has sequences of its own, so for everything but the experts they are data ranks too. `data` counts the
copies of that whole.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from k3rl.config import ConfigError
from k3rl.parallel.world import Axis, World


def data_degree(world: int, expert: int, context: int) -> int:
    """The data degree that is left of `world` ranks. Raises ConfigError when the degrees do not divide it."""
    if expert < 1 or context < 1 or world % (expert * context):
        raise ConfigError(
            f"{world} learner ranks cannot be data x expert_parallel {expert} x context_parallel {context}; "
            f"the number of ranks must be a multiple of {max(1, expert) * max(1, context)}",
            key="expert_parallel",
            got=world,
            wanted=f"a multiple of {max(1, expert) * max(1, context)} ranks",
        )
    return world // (expert * context)


class Mesh:
    """The axes `data`, `expert` and `context` of a `world`, and `replicas`: data x context, who hold equal experts.

    batch_rank of batch_size: which share of the sequences this rank has; ranks of one context axis have the same.
    Making one is a collective. Raises ConfigError when the degrees do not divide the number of ranks.
    """

    def __init__(self, world: World, *, expert: int = 1, context: int = 1) -> None:
        data = data_degree(world.size, expert, context)
        self.world = world
        self.shape = (data, expert, context)
        self._layout = torch.arange(world.size).view(self.shape)
        here = [int(i) for i in (self._layout == world.rank).nonzero()[0]]
        d, e, c = here
        grid = self._layout
        self.data = self._axis(grid[:, i, j] for i in range(expert) for j in range(context))
        self.expert = self._axis(grid[i, :, j] for i in range(data) for j in range(context))
        self.context = self._axis(grid[i, j, :] for i in range(data) for j in range(expert))
        self.replicas = self._axis(grid[:, i, :].reshape(-1) for i in range(expert))
        self.batch_rank, self.batch_size = d * expert + e, data * expert
        self.first_of_context = c == 0
        self._runs: dict[int, Axis] = {}

    @classmethod
    def alone(cls, device: torch.device | str = "cpu") -> Mesh:
        """One process."""
        return cls(World.alone(device))

    def _axis(self, lines: Iterable[torch.Tensor]) -> Axis:
        own: Axis | None = None
        for line in lines:  # every rank makes every group, in this order
            own = self.world.axis(tuple(line.tolist())) or own
        assert own is not None
        return own

    def neighbours(self, size: int) -> Axis:
        """This rank's run of `size` ranks next to each other, whatever else they share; they must divide the world.

        A collective when a size is asked for the first time.
        """
        if size not in self._runs:
            self._runs[size] = self._axis(self._layout.view(-1, size))
        return self._runs[size]

    def experts(self, count: int) -> range:
        """The run of `count` experts that this rank holds. Raises ConfigError when there are fewer than ranks."""
        return expert_run(count, self.expert.rank, self.expert.size)


def expert_run(count: int, rank: int, size: int) -> range:
    """Rank `rank`'s run of `count` experts cut into `size` runs whose lengths differ by one at most."""
    if size > count:
        raise ConfigError(
            f"expert_parallel is {size}, and the model has {count} experts; use at most {count}",
            key="expert_parallel",
            got=size,
            wanted=f"at most {count}",
        )
    return range(rank * count // size, (rank + 1) * count // size)


def batch_rank_of(rank: int, context: int) -> int:
    """The share of the sequences that world rank `rank` has."""
    return rank // context

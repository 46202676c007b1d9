"""What an episode has spent, on two clocks, and how the policy is told what is left."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from k3rl.types import Budgets


@dataclass(frozen=True, slots=True)
class Spending:
    """So far. virtual_s: time of tools plus sampled tokens at a nominal rate, so that a slow engine costs nothing.

    wall_s is the time that tools took; time of the engine is known to the rollout, which ends the episode by it.
    """

    turns: int = 0
    tokens: int = 0
    tool_calls: int = 0
    wall_s: float = 0.0
    virtual_s: float = 0.0

    def turn(self, tokens: int, token_s: float) -> Spending:
        """After one more turn of so many sampled tokens."""
        return dataclasses.replace(
            self, turns=self.turns + 1, tokens=self.tokens + tokens, virtual_s=self.virtual_s + tokens * token_s
        )

    def call(self, wall_s: float) -> Spending:
        """After one more tool call that took so long."""
        return dataclasses.replace(
            self, tool_calls=self.tool_calls + 1, wall_s=self.wall_s + wall_s, virtual_s=self.virtual_s + wall_s
        )

    def time_is_over(self, budgets: Budgets) -> bool:
        """Whether the task's own time is used up."""
        return budgets.virtual_s is not None and self.virtual_s >= budgets.virtual_s

    def left(self, budgets: Budgets, *, sub_agents: int = 0, real_s: float = 0.0) -> str:
        """What is left, in words for the policy; empty where nothing is limited.

        sub_agents: those that were begun; real_s: seconds since the episode began.
        """
        parts = [
            f"{max(0, limit - used)} {name}"
            for name, limit, used in (
                ("turns", budgets.turns, self.turns),
                ("tokens", budgets.tokens, self.tokens),
                ("tool calls", budgets.tool_calls, self.tool_calls),
                ("sub-agents", budgets.sub_agents, sub_agents),
            )
            if limit is not None
        ]
        if budgets.virtual_s is not None:
            parts.append(f"{span(budgets.virtual_s - self.virtual_s)} of task time")
        if budgets.wall_s is not None:
            parts.append(f"{span(budgets.wall_s - real_s)} of real time")
        return f"[left: {', '.join(parts)}]" if parts else ""


def span(seconds: float) -> str:
    """A time in two units at most: "23 h 59 min", "12 min", "42 s"; what is over is "0 s"."""
    minutes = int(max(0.0, seconds) // 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min" if minutes >= 10 else f"{max(0.0, seconds):.0f} s"

"""Gymnasium for the bridge: observations as text, text as actions.

The user's own functions come first: `observe(observation[, env]) -> str` and `act(text[, env]) -> action`, which
raises ValueError for a text that is no action. Without them an observation is shown as it is, numbers as JSON, and an
action is what the reply ends with: a whole number for Discrete, the text itself for Text, JSON for the rest.
"""

from __future__ import annotations

import inspect
import json
import re
from typing import Any

from bridge_server import InvalidAction, function, number, package, seeded, version

_INTEGER = re.compile(r"-?\d+")


class Serve:
    """One episode of one environment."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._gymnasium = package("gymnasium", "gymnasium")
        self._options = options
        self._observe = function(options["observe"])
        self._act = function(options["act"])
        self._env: Any = None

    def about(self) -> dict[str, str]:
        return {"package": "gymnasium", "version": version("gymnasium")}

    def open(self, row: dict[str, Any], seed: int) -> dict[str, Any]:
        seeded(seed)
        self._env = self._gymnasium.make(self._options["id"], **self._options["kwargs"])
        self._env.action_space.seed(seed)
        observation, _ = self._env.reset(seed=seed, options=self._options["reset_options"])
        words = self._options["instructions"] or f"{self._options['id']}. {asked(self._env.action_space)}"
        return {"messages": [{"role": "user", "content": f"{words}\n{self._shown(observation)}"}]}

    def act(self, text: str) -> dict[str, Any]:
        observation, reward, terminated, truncated, _ = self._env.step(self._action(text))
        return {
            "messages": [{"role": "user", "content": self._shown(observation)}],
            "reward": number(reward),
            "done": bool(terminated or truncated),
            "metrics": {"truncated": float(bool(truncated))},
        }

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None

    def _shown(self, observation: Any) -> str:
        if self._observe is not None:
            return str(with_env(self._observe, observation, self._env))
        if hasattr(observation, "tolist"):
            observation = observation.tolist()
        return observation if isinstance(observation, str) else json.dumps(observation, default=repr)

    def _action(self, text: str) -> Any:
        space = self._env.action_space
        try:
            action = action_of(text, space) if self._act is None else with_env(self._act, text, self._env)
        except ValueError as error:
            raise InvalidAction(f"{error}. {asked(space)}") from None
        if not space.contains(action):
            raise InvalidAction(f"{action} is not in {space}. {asked(space)}")
        return action


def with_env(call: Any, value: Any, env: Any) -> Any:
    """Call a user's function with the environment too where it takes two arguments."""
    return call(value, env) if len(inspect.signature(call).parameters) > 1 else call(value)


def kind(space: Any) -> str:
    """The name of a space's class."""
    return type(space).__name__


def asked(space: Any) -> str:
    """What an action looks like, in words."""
    if kind(space) == "Discrete":
        first = int(space.start)
        return f"Answer with one whole number from {first} to {first + int(space.n) - 1}."
    if kind(space) == "Text":
        return f"Answer with {space.min_length} to {space.max_length} characters."
    return f"Answer with one JSON value of {space}."


def action_of(text: str, space: Any) -> Any:
    """The action that a reply ends with. Raises ValueError when there is none."""
    if kind(space) == "Text":
        return text.strip()
    if kind(space) == "Discrete":
        found = _INTEGER.findall(text)
        if not found:
            raise ValueError("there is no number in the answer")
        return type(space.sample())(int(found[-1])) if abs(int(found[-1])) < 2**31 else int(found[-1])
    try:
        value = json.loads(text.strip())
    except ValueError:
        raise ValueError("the answer is not JSON") from None
    if hasattr(space, "dtype") and space.dtype is not None:
        numpy = package("numpy", "numpy")
        try:
            return numpy.asarray(value, dtype=space.dtype)
        except (TypeError, OverflowError) as error:
            raise ValueError(str(error)) from None
    return value

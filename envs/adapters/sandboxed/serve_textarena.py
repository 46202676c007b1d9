"""TextArena for the bridge: the policy is one player, the others are played by the user's function.

`opponent(observation, player) -> str` says what another player does. A game of one player needs none.
"""

from __future__ import annotations

from typing import Any

from bridge_server import InvalidAction, function, number, package, seeded, version


class Serve:
    """One game."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._arena = package("textarena", "textarena")
        self._options = options
        self._opponent = function(options["opponent"])
        if options["players"] > 1 and self._opponent is None:
            raise ValueError("a game of several players needs opponent = pkg.module:function, which plays the others")
        self._env: Any = None
        self._seen = ""

    def about(self) -> dict[str, str]:
        return {"package": "textarena", "version": version("textarena")}

    def open(self, row: dict[str, Any], seed: int) -> dict[str, Any]:
        seeded(seed)
        self._env = self._arena.make(env_id=self._options["id"], **self._options["kwargs"])
        self._env.reset(num_players=self._options["players"], seed=seed)
        text, done = self._until_own_turn(False)
        if done:
            raise ValueError("the game was over before the policy's first turn")
        return {"messages": [{"role": "user", "content": text}]}

    def act(self, text: str) -> dict[str, Any]:
        if not text.strip():
            raise InvalidAction("the answer is empty")
        seen, done = self._until_own_turn(bool(self._env.step(action=text)[0]))
        if not done:
            return {"messages": [{"role": "user", "content": seen}], "reward": None, "done": False, "metrics": {}}
        rewards, info = self._env.close()
        self._env = None
        player = self._options["player"]
        reward = (rewards or {}).get(player)
        told = (info or {}).get(player, {})
        metrics = {"turns": float(told.get("turn_count", 0)), "invalid_move": float(bool(told.get("invalid_move")))}
        return {"messages": [], "reward": number(reward), "done": True, "metrics": metrics}

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None

    def _until_own_turn(self, done: bool) -> tuple[str, bool]:
        """What the policy's player sees when it is to act, and whether the game is over."""
        while not done:
            player, observation = self._env.get_observation()
            if player == self._options["player"]:
                return self._fresh(shown(observation)), False
            if self._opponent is None:
                raise ValueError(f"player {player} is to act, and only player {self._options['player']} is the policy")
            done = bool(self._env.step(action=str(self._opponent(shown(observation), player)))[0])
        return "", True

    def _fresh(self, text: str) -> str:
        """What is new: wrapped games tell their whole story each time, and the policy has read the beginning."""
        seen, self._seen = self._seen, text
        return text[len(seen) :] if seen and text.startswith(seen) else text


def shown(observation: Any) -> str:
    """An observation as text: wrapped games give text, raw ones a list of (sender, text, kind)."""
    if isinstance(observation, str):
        return observation
    return "\n".join(str(part[1]) for part in observation)

"""SkyRL-gym for the bridge: `init` on the row's prompt, then `step` with what the policy says."""

from __future__ import annotations

from typing import Any

from bridge_server import function, number, package, seeded, version


class Serve:
    """One episode of one row."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._gym = package("skyrl_gym", "skyrl-gym")
        self._options = options
        self._env: Any = None

    def about(self) -> dict[str, str]:
        return {"package": "skyrl-gym", "version": version("skyrl-gym")}

    def open(self, row: dict[str, Any], seed: int) -> dict[str, Any]:
        seeded(seed)
        entry, name = self._options["entry_point"], self._options["id"]
        if entry:
            make = function(entry)
            self._env = None if make is None else make(env_config=self._config(), extras=extras(row))
        else:
            self._env = self._gym.make(name, env_config=self._config(), extras=extras(row))
        prompt = row["prompt"]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        begun, _ = self._env.init(messages)
        return {"messages": begun}

    def act(self, text: str) -> dict[str, Any]:
        result = self._env.step(text)
        metrics = self._env.get_metrics() if result["done"] and hasattr(self._env, "get_metrics") else {}
        return {
            "messages": result["observations"],
            "reward": number(result["reward"]),
            "done": bool(result["done"]),
            "metrics": {name: float(value) for name, value in metrics.items() if isinstance(value, (int, float))},
        }

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None

    def _config(self) -> Any:
        """As SkyRL gives it: a configuration whose keys are attributes too."""
        return package("omegaconf", "omegaconf").OmegaConf.create(self._options["env_config"])


def extras(row: dict[str, Any]) -> dict[str, Any]:
    """All of a row but its prompt."""
    return {name: value for name, value in row.items() if name != "prompt"}

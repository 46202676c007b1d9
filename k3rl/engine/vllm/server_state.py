"""Whether a vLLM server may be given requests now: pauses, sleep, and its loss."""

from __future__ import annotations

from typing import NoReturn

from k3rl.engine.protocol import EngineError, PauseMode
from k3rl.engine.vllm.client import EngineLost


class ServerState:
    """What an engine knows of the state of the server at `url`."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.reset()

    def reset(self) -> None:
        """The server was started afresh."""
        self.pause: PauseMode | None = None
        self.asleep = False
        self.lacks_weights = False  # a deep sleep dropped them
        self._lost: str | None = None

    @property
    def holds_requests(self) -> bool:
        """Whether requests wait on this side."""
        return self.pause is not None or self.asleep or self.lacks_weights

    def lose(self, reason: str) -> NoReturn:
        """Raises EngineLost, and so does `refuse_if_lost` from now on."""
        self._lost = reason
        raise self._error(reason)

    def refuse_if_lost(self) -> None:
        """Raises EngineLost after `lose`."""
        if self._lost is not None:
            raise self._error(self._lost)

    def _error(self, reason: str) -> EngineLost:
        return EngineLost(f"the vLLM server at {self.url} is lost: {reason}; restart it, then reconnect")

    def refuse_if_stalled(self, running: int) -> None:
        """Raises EngineError where requests, `running` of them at the server, would be waited for without end."""
        if self.lacks_weights:
            raise EngineError("the weights were dropped by sleep(2) and requests wait; update the weights first")
        if self.asleep:
            raise EngineError("the engine sleeps and requests wait; call wake first")
        if self.pause is not None and not (self.pause == "wait" and running):
            raise EngineError(f"the engine is paused ({self.pause}) and requests wait; call resume first")

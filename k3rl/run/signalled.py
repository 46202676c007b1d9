"""What a signal that asks a command to end raises, so that its exit status says which one it was."""

from __future__ import annotations

import signal


class Signalled(KeyboardInterrupt):
    """The process got SIGINT or SIGTERM. `number` is the signal's; the status of the command is 128 and that."""

    def __init__(self, number: int = signal.SIGINT, message: str = "") -> None:
        super().__init__(*([message] if message else []))
        self.number = number

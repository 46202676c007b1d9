"""Sandbox providers by name."""

from __future__ import annotations

from collections.abc import Callable

from k3rl.envs.sandbox.base import SandboxProvider
from k3rl.envs.sandbox.bwrap import BwrapProvider
from k3rl.envs.sandbox.unsafe import SubprocessProvider

_PROVIDERS: dict[str, Callable[[], SandboxProvider]] = {"bwrap": BwrapProvider, "subprocess": SubprocessProvider}


def provider_named(name: str) -> SandboxProvider:
    """The provider: "bwrap" (the default everywhere) or "subprocess" (unsafe). Raises ValueError for another name."""
    if name not in _PROVIDERS:
        raise ValueError(f"no sandbox provider is named {name!r}; choose from {', '.join(_PROVIDERS)}")
    return _PROVIDERS[name]()

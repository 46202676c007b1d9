"""Environments by name, by `pkg.module:Object`, or by entry point of the group `k3rl.envs`.

What is found is a factory: called with the caller's keyword arguments it gives an `Environment`.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from k3rl.config import ConfigError
from k3rl.envs.base import Environment

GROUP = "k3rl.envs"
Factory = Callable[..., Environment]

_BUILTIN = {"coding-lists": "k3rl.envs.coding:coding_lists"}
_registered: dict[str, Factory] = {}


class UnknownEnvironment(ConfigError, LookupError):
    """No environment has this name; the message says which there are."""


def register(name: str, factory: Factory) -> None:
    """Make `factory` known under `name` in this process. Raises ValueError for a name that is taken."""
    if name in _BUILTIN or _registered.get(name, factory) is not factory:
        raise ValueError(f"an environment named {name!r} exists already; choose another name")
    _registered[name] = factory


def names() -> list[str]:
    """All names that `make` knows: shipped, registered, and installed by other packages."""
    return sorted({*_BUILTIN, *_registered, *_installed()})


def make(name: str, **options: Any) -> Environment:
    """The environment of a name or of `pkg.module:Object`, made with `options`.

    A shipped name wins over a registered one, that over an installed one. Raises UnknownEnvironment, and
    TypeError when the object found does not give an `Environment`.
    """
    environment = _find(name)(**options)
    if not isinstance(environment, Environment):
        raise TypeError(
            f"{name!r} gave a {type(environment).__name__}; an environment factory must return k3rl.envs.Environment"
        )
    return environment


def _find(name: str) -> Factory:
    if name in _BUILTIN:
        return _imported(_BUILTIN[name])
    if name in _registered:
        return _registered[name]
    installed = _installed()
    if name in installed:
        return _checked(installed[name].load(), name)
    if ":" in name:
        return _imported(name)
    known = names()
    near = difflib.get_close_matches(name, known, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise UnknownEnvironment(
        f"no environment is named {name!r}{hint} Known: {', '.join(known)}. "
        f"Others: `pkg.module:Object`, or a package with an entry point in the group {GROUP!r}"
    )


def _installed() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def _imported(path: str) -> Factory:
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise UnknownEnvironment(
                f"{path!r}: no module is named {error.name!r}; install it or set PYTHONPATH"
            ) from error
        raise
    if not hasattr(module, attribute):
        raise UnknownEnvironment(f"{path!r}: module {module_name} has no {attribute!r}")
    return _checked(getattr(module, attribute), path)


def _checked(found: Any, name: str) -> Factory:
    if isinstance(found, Environment):
        environment = found

        def give() -> Environment:
            return environment

        return give
    if not callable(found):
        raise TypeError(f"{name!r} is a {type(found).__name__}; it must be an Environment or give one when called")
    factory: Factory = found
    return factory

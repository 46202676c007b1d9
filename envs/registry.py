"""Environments by name, by `pkg.module:Object`, by a `.py` file, by a folder, or by entry point of `k3rl.envs`;
collections of tasks of a known form by `LOADER:PATH`, such as `humaneval:tasks.jsonl`; and environments of other
systems by `SYSTEM:NAME`, such as `gymnasium:FrozenLake-v1`.

What is found is a factory: called with the caller's keyword arguments it gives an `Environment`.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import os
import sys
import tomllib
import traceback
from collections.abc import Callable
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from k3rl.config import ConfigError, K3Error
from k3rl.envs.base import Environment
from k3rl.envs.config import EnvConfig

GROUP = "k3rl.envs"
OBJECT = "environment"  # what a file or a package without entry points is asked for
Factory = Callable[..., Environment]

_BUILTIN = {
    "chip": "k3rl.envs.shipped:chip",
    "coding-lists": "k3rl.envs.shipped:coding_lists",
    "coding-repair": "k3rl.envs.shipped:coding_repair",
    "compiler": "k3rl.envs.shipped:compiler",
    "kernel": "k3rl.envs.shipped:kernel",
}
_LOADERS = {
    "harbor": "k3rl.envs.shipped:harbor",
    "humaneval": "k3rl.envs.shipped:humaneval",
    "swe": "k3rl.envs.shipped:swe",
}
_ADAPTERS = {
    "gymnasium": "k3rl.envs.adapters:gymnasium",
    "openenv": "k3rl.envs.adapters:openenv",
    "reasoning-gym": "k3rl.envs.adapters:reasoning_gym",
    "skyrl-gym": "k3rl.envs.adapters:skyrl_gym",
    "textarena": "k3rl.envs.adapters:textarena",
    "verifiers": "k3rl.envs.adapters:verifiers",
}
_registered: dict[str, Factory] = {}


class UnknownEnvironment(ConfigError, LookupError):
    """No environment has this name; the message says which there are."""


class BrokenEnvironment(ConfigError):
    """What was found does not give an environment: its code raised, takes other options, or gives something else."""


def register(name: str, factory: Factory) -> None:
    """Make `factory` known under `name` in this process. Raises ValueError for a name that is taken."""
    if name in _BUILTIN or _registered.get(name, factory) is not factory:
        raise ValueError(f"an environment named {name!r} exists already; choose another name")
    _registered[name] = factory


def names() -> list[str]:
    """All names that `make` knows: shipped, registered, and installed by other packages."""
    return sorted({*_BUILTIN, *_registered, *_installed()})


def builtin_names() -> list[str]:
    """The names of the environments of this package."""
    return sorted(_BUILTIN)


def adapters() -> list[str]:
    """The systems whose environments `make` takes as `SYSTEM:NAME`."""
    return sorted(_ADAPTERS)


def make(name: str, **options: Any) -> Environment:
    """The environment of a name, `pkg.module:Object`, `file.py[:Object]`, folder, `LOADER:PATH` or `SYSTEM:NAME`.

    A shipped name wins over a registered one, that over an installed one, and all of them over a folder of that
    name. A folder is a project with an entry point in its pyproject.toml, or a package; a file or package without
    an entry point is asked for `environment`. Raises UnknownEnvironment; BrokenEnvironment when its code raises, with
    the place, or gives no `Environment`; and typed errors of the environment as they are.
    """
    try:
        environment = _find(name)(**options)
    except K3Error:
        raise
    except Exception as error:
        raise BrokenEnvironment(
            f"{name!r} cannot be made: {type(error).__name__}: {error} ({_place(error)})", key="env", got=name
        ) from error
    if not isinstance(environment, Environment):
        raise BrokenEnvironment(
            f"{name!r} gave {_kind(environment)}; an environment factory must return k3rl.envs.Environment"
        )
    return environment


def made(config: EnvConfig) -> Environment:
    """The environment of a run's configuration, with the judge that this names, if any. Raises as `make`."""
    environment = make(config.name, **config.args)
    if config.judge is None:
        return environment
    from k3rl.envs.judge import with_judge

    return with_judge(environment, config.judge)


def object_at(place: str) -> Any:
    """What is at `pkg.module:Object` or `file.py:Object`. Raises ConfigError, also where its code raises."""
    path, _, attribute = place.rpartition(":")
    if not path:
        raise ConfigError(f"{place!r} names no object; write pkg.module:Object or file.py:Object", got=place)
    try:
        if path.endswith(".py"):
            if not Path(path).is_file():
                raise UnknownEnvironment(f"{path!r}: there is no such file")
            module = _loaded(_key(Path(path)), Path(path))
        else:
            module = importlib.import_module(path)
        return getattr(module, attribute)
    except K3Error:
        raise
    except Exception as error:
        raise BrokenEnvironment(f"{place!r}: {type(error).__name__}: {error} ({_place(error)})", got=place) from error


def _key(path: Path) -> str:
    """The name under which a file is a module."""
    return f"k3rl_env_{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"


def _place(error: Exception) -> str:
    """File and line where code of an environment went wrong."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}"


def _kind(value: object) -> str:
    name = type(value).__name__
    return f"an {name}" if name[0].lower() in "aeiou" else f"a {name}"


def _find(name: str) -> Factory:
    if name in _BUILTIN:
        return _imported(_BUILTIN[name])
    if name in _registered:
        return _registered[name]
    installed = _installed()
    if name in installed:
        return _checked(installed[name].load(), name)
    place, _, attribute = name.partition(":")
    if place in _LOADERS and attribute:
        return partial(_imported(_LOADERS[place]), attribute)
    if place in _ADAPTERS:
        return partial(_imported(_ADAPTERS[place]), attribute)
    if place.endswith(".py") or os.sep in place or Path(place).is_dir():
        return _from_path(Path(place), attribute)
    if ":" in name:
        return _imported(name)
    known = names()
    near = difflib.get_close_matches(name, known, 1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    raise UnknownEnvironment(
        f"no environment is named {name!r}{hint} Known: {', '.join(known)}. Others: `pkg.module:Object`, a .py file, "
        f"a folder, a package with an entry point in the group {GROUP!r}, a collection of tasks by "
        f"{', '.join(f'`{loader}:PATH`' for loader in _LOADERS)}, or an environment of another system by "
        f"{', '.join(f'`{system}:NAME`' for system in adapters())}"
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
    return _attribute(module, attribute, path)


def _from_path(path: Path, attribute: str) -> Factory:
    """What a `.py` file, a project folder or a package folder offers."""
    if path.is_file():
        return _attribute(_loaded(_key(path), path), attribute or OBJECT, str(path))
    if not path.is_dir():
        raise UnknownEnvironment(f"{str(path)!r}: there is no such file or folder")
    project = path / "pyproject.toml"
    if project.is_file():
        target = _entry_point_of(project, attribute)
        roots = [str((path / folder).resolve()) for folder in ("src", ".") if (path / folder).is_dir()]
        sys.path[:0] = [root for root in roots if root not in sys.path]
        importlib.invalidate_caches()
        return _imported(target)
    if (path / "__init__.py").is_file():
        name = path.resolve().name
        return _attribute(_loaded(name, path / "__init__.py"), attribute or OBJECT, str(path))
    raise UnknownEnvironment(f"{str(path)!r} has neither a pyproject.toml nor an __init__.py, so it is no environment")


def _entry_point_of(project: Path, name: str) -> str:
    """The `pkg.module:Object` that a pyproject.toml declares in our group; `name` picks one of several."""
    try:
        table = tomllib.loads(project.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{project} is not TOML: {error}", key=str(project)) from None
    points = table
    for key in ("project", "entry-points", GROUP):
        points = points.get(key, {})
        if not isinstance(points, dict):
            raise ConfigError(f"{project}: `{key}` is {_kind(points)}; wants a table", key=str(project))
    if name in points or (not name and len(points) == 1):
        return points[name or next(iter(points))]
    wanted = f"one of {', '.join(points)} after a colon" if points else f'a table [project.entry-points."{GROUP}"]'
    what = f"there is no environment {name!r}" if name else f"it has {len(points)} environments"
    raise UnknownEnvironment(f"{project}: {what}; wants {wanted}")


def _loaded(name: str, file: Path) -> ModuleType:
    """The module of a file, executed once a process. Raises ConfigError for a name that another file has."""
    file = file.resolve()
    known = sys.modules.get(name)
    if known is not None:
        if getattr(known, "__file__", None) == str(file):
            return known
        raise ConfigError(f"{file}: a module named {name!r} is loaded already, from elsewhere; rename the folder")
    folders = [str(file.parent)] if file.name == "__init__.py" else None
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=folders)
    if spec is None or spec.loader is None:
        raise UnknownEnvironment(f"{file} cannot be imported; it must be a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _attribute(module: ModuleType, attribute: str, path: str) -> Factory:
    if not hasattr(module, attribute):
        raise UnknownEnvironment(f"{path!r}: module {module.__name__} has no {attribute!r}")
    return _checked(getattr(module, attribute), path)


def _checked(found: Any, name: str) -> Factory:
    if isinstance(found, Environment):
        environment = found

        def give() -> Environment:
            return environment

        return give
    if not callable(found):
        raise BrokenEnvironment(f"{name!r} is {_kind(found)}; it must be an Environment or give one when called")
    factory: Factory = found
    return factory

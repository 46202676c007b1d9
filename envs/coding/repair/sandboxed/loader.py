"""Imports a repository from texts, without a file and without a trace in `sys.modules`; `f` makes one call in it.

FILES: text by path, filled in by whoever runs this.
"""

from __future__ import annotations

import builtins
import types
from collections.abc import Mapping, Sequence
from typing import Any

FILES: dict[str, str] = {}
_modules: dict[str, types.ModuleType] = {}


def f(name: str, arguments: Sequence[Any]) -> Any:
    """The result of "package.module.function" with these arguments."""
    module, _, function = name.rpartition(".")
    return getattr(load(module), function)(*arguments)


def load(name: str) -> types.ModuleType:
    """The module of a dotted name, executed once."""
    if name in _modules:
        return _modules[name]
    parent, _, child = name.rpartition(".")
    above = load(parent) if parent else None
    path = name.replace(".", "/")
    folder = f"{path}/__init__.py" in FILES
    path += "/__init__.py" if folder else ".py"
    if path not in FILES:
        raise ModuleNotFoundError(f"No module named {name!r}")
    module = types.ModuleType(name)
    module.__file__, module.__package__ = path, name if folder else parent
    if folder:
        module.__path__ = []
    module.__dict__["__builtins__"] = {**vars(builtins), "__import__": _import}
    _modules[name] = module
    exec(compile(FILES[path], path, "exec"), module.__dict__)
    if above is not None:
        setattr(above, child, module)
    return module


def _import(
    name: str,
    globals: Mapping[str, Any] | None = None,
    locals: Mapping[str, Any] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> types.ModuleType:
    if level and globals is not None:
        base = globals["__package__"].split(".")
        name = ".".join([*base[: len(base) - level + 1], *([name] if name else [])])
    root = name.split(".")[0]
    if not any(path.startswith(f"{root}/") or path == f"{root}.py" for path in FILES):
        return builtins.__import__(name, globals, locals, fromlist or (), 0)
    module = load(name)
    for item in fromlist or ():
        if not hasattr(module, item) and hasattr(module, "__path__"):
            load(f"{name}.{item}")
    return module if fromlist else load(root)

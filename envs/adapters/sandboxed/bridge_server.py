"""The foreign side of the bridge: runs under the Python that has the package, and imports nothing of k3rl.

    python bridge_server.py KIND

One JSON object a line on standard input, one on standard output: {"id", "method", "params"} is answered by {"id",
"result"} or {"id", "error": {"kind", "type", "message"}}. What foreign code prints goes to standard error, and the
process ends when its input does, also in the middle of a call. KIND names the module serve_KIND beside this file,
whose `Serve` answers the methods.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import random
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TextIO

PROTOCOL = 1


class Missing(Exception):
    """A package that is not installed here; the message says which."""


class InvalidAction(Exception):
    """The policy's text is no action; the policy is told why and may try again."""


def package(name: str, distribution: str) -> Any:
    """The module `name`. Raises Missing when it is not there; an import that fails inside it passes through."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (error.name == name or name.startswith(error.name + ".")):
            raise Missing(distribution) from None
        raise


def version(distribution: str) -> str:
    """The installed version, or "" where the package has none."""
    metadata = importlib.import_module("importlib.metadata")
    try:
        return str(metadata.version(distribution))
    except metadata.PackageNotFoundError:
        return ""


def function(path: str) -> Callable[..., Any] | None:
    """What `pkg.module:name` or `file.py:name` names; None for "". Raises ValueError when there is no such thing."""
    if not path:
        return None
    place, _, name = path.rpartition(":")
    if place.endswith(".py"):
        spec = importlib.import_module("importlib.util").spec_from_file_location(f"user_{abs(hash(place))}", place)
        module = importlib.import_module("importlib.util").module_from_spec(spec)
        spec.loader.exec_module(module)
    elif place:
        module = importlib.import_module(place)
    else:
        raise ValueError(f"{path!r} names no function; write pkg.module:name or file.py:name")
    found: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(found):
        raise ValueError(f"{path!r}: {place} has no function {name!r}")
    return found


def number(value: Any) -> float | None:
    """A reward as a float, NaN and infinity included: the other side refuses those. None stays None."""
    return None if value is None else float(value)


def seeded(seed: int) -> None:
    """Fix the generators that packages draw from when nobody gives them one of their own."""
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def plain(value: Any) -> Any:
    """What JSON has no form for: arrays and numbers of NumPy, models of pydantic; text for the rest."""
    for name in ("tolist", "model_dump"):
        if hasattr(value, name):
            return getattr(value, name)()
    return sorted(value, key=repr) if isinstance(value, (set, frozenset)) else str(value)


def requests(stream: TextIO) -> Iterator[dict[str, Any]]:
    """Requests as they come. A thread reads ahead, so that the end of the input ends the process at once."""
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in stream:
            lines.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield json.loads(lines.get())


def failure(error: BaseException) -> dict[str, str]:
    """An exception as the other side reads it."""
    kinds = ((Missing, "missing"), (InvalidAction, "invalid"))
    kind = next((name for one, name in kinds if isinstance(error, one)), "raised")
    if kind == "raised":
        traceback.print_exception(type(error), error, error.__traceback__)
    return {"kind": kind, "type": type(error).__name__, "message": str(error)[:2000]}


def main() -> None:
    """Answer until the input ends."""
    source = os.fdopen(os.dup(0), encoding="utf-8")
    target = os.fdopen(os.dup(1), "w", encoding="utf-8")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    served: Any = None
    for request in requests(source):
        answer: dict[str, Any] = {"id": request["id"]}
        try:
            params = request["params"]
            if request["method"] == "hello":
                served = importlib.import_module(f"serve_{sys.argv[1]}").Serve(params["options"])
                answer["result"] = {"protocol": PROTOCOL, "python": sys.version.split()[0], **served.about()}
            else:
                answer["result"] = getattr(served, request["method"])(**params)
        except (Exception, SystemExit) as error:
            answer["error"] = failure(error)
        target.write(json.dumps(answer, default=plain) + "\n")
        target.flush()


if __name__ == "__main__":
    sys.modules["bridge_server"] = sys.modules["__main__"]
    main()

"""The commands. Each reads one JSON request and writes one JSON answer; see the specification."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from .emit_c import emit
from .emit_ptx import emit_ptx
from .interpret import interpret
from .lexer import SourceError, lex
from .lower import lower
from .parser import parse
from .passes import optimize

Request = dict[str, Any]


def _kernel(request: Request, name: str, consts: dict[str, int]) -> tuple[dict[str, Any], list[list[str]]]:
    for kernel in parse(request["source"]):
        if kernel[1] == name:
            return lower(kernel, consts)
    raise SourceError("undefined", 1, 1)


def _lowered(request: Request) -> dict[str, Any]:
    return _kernel(request, request["kernel"], request["consts"])[0]


def run_lex(request: Request) -> dict[str, Any]:
    """Tokens as [kind, text, line, col]."""
    return {"tokens": [[one.kind, one.text, one.line, one.col] for one in lex(request["source"])]}


def run_parse(request: Request) -> dict[str, Any]:
    """The syntax tree."""
    return {"program": parse(request["source"])}


def run_types(request: Request) -> dict[str, Any]:
    """The type of every `let`."""
    return {"lets": _kernel(request, request["kernel"], request["consts"])[1]}


def run_ir(request: Request) -> dict[str, Any]:
    """The IR as lowered."""
    return {"ir": _lowered(request)}


def run_optimize(request: Request) -> dict[str, Any]:
    """Cheaper IR."""
    return {"ir": optimize(_lowered(request))}


def run_interpret(request: Request) -> dict[str, Any]:
    """The buffers after all program instances ran."""
    arguments = dict(request["args"])
    interpret(optimize(_lowered(request)), request["grid"], arguments)
    return {"buffers": {name: value for name, value in arguments.items() if isinstance(value, list)}}


def _instances(request: Request) -> list[tuple[str, dict[str, Any]]]:
    return [(one["name"], optimize(_kernel(request, one["kernel"], one["consts"])[0])) for one in request["instances"]]


def run_emit(request: Request) -> dict[str, Any]:
    """C for the requested instances."""
    return {"c": emit(_instances(request))}


def run_ptx(request: Request) -> dict[str, Any]:
    """PTX for the requested instances."""
    return {"ptx": emit_ptx(_instances(request))}


COMMANDS: dict[str, Callable[[Request], dict[str, Any]]] = {
    "lex": run_lex,
    "parse": run_parse,
    "types": run_types,
    "ir": run_ir,
    "optimize": run_optimize,
    "interpret": run_interpret,
    "emit": run_emit,
    "ptx": run_ptx,
}


def main() -> None:
    """Run the command named by the first argument. A wrong program is answered, not raised."""
    request = json.load(sys.stdin)
    try:
        answer = COMMANDS[sys.argv[1]](request)
    except SourceError as error:
        answer = {"error": {"code": error.code, "line": error.line}}
        if error.col:
            answer["error"]["col"] = error.col
    json.dump(answer, sys.stdout)

"""What a submission is asked for a case, and the answers that are known without running anything."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from k3rl.envs.compiler.evaluate import initial
from k3rl.envs.compiler.ladder import Milestone
from k3rl.envs.compiler.reference.cli import COMMANDS
from k3rl.envs.compiler.reference.lexer import SourceError
from k3rl.envs.compiler.reference.parser import parse

TEXT_COMMANDS = ("lex", "parse", "types")
CODE_COMMANDS = ("emit", "ptx")


def parameters(case: Mapping[str, Any], kernel: str) -> list[list[str]]:
    """[name, type] of a kernel's parameters, constants left out."""
    return [list(one) for tree in parse(case["source"]) if tree[1] == kernel for one in tree[2] if one[1] != "const"]


def arguments(case: Mapping[str, Any], salt: int) -> dict[str, Any]:
    """Parameter name -> list or number, for the one launch of a case."""
    launch = case["launches"][0]
    names = [name for name, _ in parameters(case, case["instances"][0]["kernel"])]
    return {
        name: initial(case["buffers"][value], salt).tolist() if kind == "buffer" else value
        for name, (kind, value) in zip(names, launch["args"], strict=True)
    }


def request_of(milestone: Milestone, case: Mapping[str, Any], salt: int) -> dict[str, Any]:
    """The JSON on a command's standard input."""
    if milestone.command in ("lex", "parse"):
        return {"source": case["source"]}
    if milestone.command in CODE_COMMANDS:
        return {"source": case["source"], "instances": case["instances"]}
    instance = case["instances"][0]
    request = {"source": case["source"], "kernel": instance["kernel"], "consts": instance["consts"]}
    if milestone.command == "interpret":
        request |= {"grid": case["launches"][0]["grid"], "args": arguments(case, salt)}
    return request


def reference_answer(command: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """What the reference compiler answers."""
    try:
        answer: dict[str, Any] = json.loads(json.dumps(COMMANDS[command](dict(request))))
        return answer
    except SourceError as error:
        found: dict[str, Any] = {"code": error.code, "line": error.line}
        return {"error": {**found, "col": error.col} if error.col else found}

"""The machine that runs a submission's IR: strict about form, bounded in work, and exact about cost."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from k3rl.envs.compiler import ir_machine
from k3rl.envs.compiler.ir_machine import BadIR, IRMachine

PARAMS = [["x", "*f32"], ["n", "i32"]]


def op(name, ins, out=None, kind=None, **attributes):
    outs, kinds = ([out], [kind]) if out else ([], [])
    return {"op": name, "in": ins, "out": outs, "type": kinds, **attributes}


def doubled() -> dict:
    """x[0..4) = 2 x in a loop of n rounds; every round costs 1 + 4 + 4 + 4 + 4."""
    body = [
        op("load", ["x", "at"], "a", "f32[4]"),
        op("add", ["a", "a"], "b", "f32[4]"),
        op("store", ["x", "at", "b"]),
        op("mul", ["at", "at"], "unused", "i32[4]"),
    ]
    ops = [
        op("const", [], "zero", "i32", value=0),
        op("const", [], "one", "i32", value=1),
        op("arange", [], "at", "i32[4]", lo=0, hi=4),
        {**op("for", ["zero", "n", "one"]), "blocks": [{"args": ["i"], "ops": body, "yield": []}]},
    ]
    return {"kernel": "k", "params": copy.deepcopy(PARAMS), "body": ops}


def run(kernel, rounds=3):
    machine = IRMachine(kernel, PARAMS)
    x = np.arange(6, dtype=np.float64)
    machine.run([1, 1], {"x": x, "n": rounds})
    return x, machine.cost


def test_it_runs_and_counts():
    x, cost = run(doubled())
    assert x.tolist() == [0, 8, 16, 24, 4, 5]
    assert cost == 1 + 1 + 4 + 1 + 3 * (1 + 4 * 4)


BROKEN = {
    "reads what is not defined": lambda k: k["body"].append(op("neg", ["%nope"], "%v", "f32")),
    "defines twice": lambda k: k["body"].append(op("const", [], "one", "i32", value=1)),
    "reads from inside a block": lambda k: k["body"].append(op("neg", ["b"], "%v", "f32[4]")),
    "broadcasts by itself": lambda k: k["body"].append(op("add", ["at", "one"], "%v", "i32[4]")),
    "lies about a type": lambda k: k["body"].append(op("neg", ["at"], "%v", "f32[4]")),
    "has no such operation": lambda k: k["body"].append(op("__import__", ["at"], "%v", "i32[4]")),
    "is infinite": lambda k: k["body"].append(op("const", [], "%v", "f32", value=float("inf"))),
    "is a bool for an int": lambda k: k["body"].append(op("const", [], "%v", "i32", value=True)),
    "has a huge tile": lambda k: k["body"].append(op("splat", ["one"], "%v", "i32[70000]")),
    "has a strange type": lambda k: k["body"].append(op("splat", ["one"], "%v", "i32[0]")),
    "has three dimensions": lambda k: k["body"].append(op("splat", ["one"], "%v", "i32[2,2,2]")),
    "stores outside": lambda k: k["body"].append(op("store", ["x", "n6", "f"])),
    "changes params": lambda k: k["params"].append(["y", "*f32"]),
    "takes a pointer for a value": lambda k: k["body"].append(op("neg", ["x"], "%v", "f32")),
    "yields another type": lambda k: k["body"][3]["blocks"][0]["yield"].append("i"),
    "is no list": lambda k: k.update(body={"op": "const"}),
    "has no block": lambda k: k["body"][3].pop("blocks"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_ir_that_breaks_a_rule_is_refused(name):
    kernel = doubled()
    kernel["body"] += [op("const", [], "n6", "i32", value=6), op("const", [], "f", "f32", value=1.0)]
    run(copy.deepcopy(kernel))  # as it stands it is good
    BROKEN[name](kernel)
    with pytest.raises(BadIR):
        run(kernel)


@pytest.mark.parametrize(("limit", "rounds"), [("MAX_COST", 3), ("MAX_STEPS", 3)])
def test_work_is_bounded(monkeypatch, limit, rounds):
    run(doubled(), rounds)
    monkeypatch.setattr(ir_machine, limit, 10)
    with pytest.raises(BadIR, match="more than 10"):
        run(doubled(), rounds)

"""The ladder: software models against arithmetic done another way, references that simulate right, splits apart."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys

import numpy as np
import pytest

from k3rl.envs.chip import LADDER, ChipLadder, flow, oracle
from k3rl.envs.chip.problems import BY_FAMILY, inference, kda
from k3rl.envs.chip.stream import Problem, Segment
from k3rl.envs.chip.tasks import SPLITS, prompt
from k3rl.envs.chip.testbench import judge
from k3rl.envs.sandbox import provider_named

SOURCE = ChipLadder()
FAMILIES = [problem.family for problem in LADDER]


def _segments(family: str, index: int = 0) -> tuple[dict[str, int], list[Segment]]:
    problem = BY_FAMILY[family]
    return dict(problem.train[index]), problem.segments(problem.train[index], random.Random(5))


def _bytes(packed: int, count: int) -> np.ndarray:
    return np.frombuffer(packed.to_bytes(count, "little"), np.int8).astype(np.int64)


def test_dot_products_are_those_of_numpy() -> None:
    p, segments = _segments("mac", 2)
    for segment in segments:
        wanted, total = [], 0
        for _, (last, a, b) in segment.inputs:
            total += int(_bytes(a, p["lanes"]) @ _bytes(b, p["lanes"]))
            if last:
                wanted.append(total % (1 << p["bits"]))
                total = 0
        assert [ranges[0][0] for ranges in segment.outputs] == wanted


def test_matrix_products_are_those_of_numpy() -> None:
    p, segments = _segments("gemm", 2)
    size, bits = p["size"], p["bits"]
    for segment in segments:
        rows, columns, wanted = [], [], []
        for _, (last, a, b) in segment.inputs:
            columns.append(_bytes(a, size))
            rows.append(_bytes(b, size))
            if last:
                product = np.stack(columns, 1) @ np.stack(rows)
                wanted += [int("".join(f"{int(v) % (1 << bits):0{bits}b}" for v in row[::-1]), 2) for row in product]
                rows, columns = [], []
        assert [ranges[0][0] for ranges in segment.outputs] == wanted


def test_exponentials_make_a_softmax() -> None:
    p, segments = _segments("softmax", 1)
    scale, start = (1 << p["bits"]) - 1, 0
    segment = segments[1]
    scores = [(last, value / 16) for _, (last, value) in segment.inputs]
    for end in [place + 1 for place, (last, _) in enumerate(scores) if last]:
        vector = np.array([value for _, value in scores[start:end]])
        middles = np.array([(ranges[0][0] + ranges[0][1]) / 2 for ranges in segment.outputs[start:end]])
        exact = np.exp(vector - vector.max())
        # The middle of an allowed range is the rounded value, half a step from the exact one at most.
        assert np.abs(middles - scale * exact).max() <= 0.5 + 1e-9
        low, high = segment.outputs[end - 1][1]
        assert low <= middles.sum() <= high
        start = end


def test_the_state_update_is_the_kda_recurrence_up_to_rounding() -> None:
    rng = np.random.default_rng(3)
    state, real = [[0] * 3 for _ in range(2)], np.zeros((2, 3))
    for _ in range(40):
        q, k = rng.integers(-90, 91, (2, 2))
        v, d, beta = rng.integers(-20, 21, 3), rng.integers(0, 256, 2), int(rng.integers(0, 256))
        state, o = kda.update(state, q.tolist(), k.tolist(), v.tolist(), d.tolist(), beta)
        decayed = (d / 256)[:, None] * real
        real = decayed + np.outer(k / 128, beta / 256 * (16.0 * v - (k / 128) @ decayed))
        # Five roundings down of less than one unit each, in a recurrence that forgets.
        assert np.abs(np.array(state) - real).max() < 8
        assert np.abs(np.array(o) - (q / 128) @ real).max() < 16


def test_layers_are_those_of_numpy() -> None:
    rng = random.Random(11)
    for _ in range(20):
        commands = inference.program(4, rng)
        memory: dict[int, int] = {}
        given = inference.execute(commands, memory)
        words = {address: data for operation, address, data in commands if operation == inference.WRITE}
        base = {}
        for operation, address, data in commands:
            if operation in (inference.SET_X, inference.SET_W, inference.SET_Y):
                base[operation] = address
            if operation != inference.RUN:
                continue
            n, m, shift, relu = data & 255, data >> 8 & 255, data >> 16 & 15, data >> 20 & 1
            x = np.concatenate([_bytes(words[base[inference.SET_X] + i], 4) for i in range(n)])
            rows = [base[inference.SET_W] + row * (n + 1) for row in range(m)]
            weights = np.stack([np.concatenate([_bytes(words[row + 1 + i], 4) for i in range(n)]) for row in rows])
            bias = np.array([words[row] for row in rows], np.uint32).astype(np.int32)
            y = np.clip(np.floor((weights @ x + bias) / 2**shift + (0.5 if shift else 0)), -128, 127)
            y = np.maximum(y, 0) if relu else y
            for place, word in enumerate(y.astype(np.int8).tobytes()[i : i + 4] for i in range(0, m, 4)):
                words[base[inference.SET_Y] + place] = int.from_bytes(word, "little")
        read = [words[address] for operation, address, _ in commands if operation == inference.READ]
        assert given == read


@pytest.mark.parametrize("family", FAMILIES)
def test_training_and_held_out_parameters_have_nothing_in_common(family: str) -> None:
    problem = BY_FAMILY[family]
    assert not [p for p in problem.heldout if p in problem.train]


@pytest.mark.parametrize("family", FAMILIES)
def test_references_simulate_right_in_both_splits(family: str) -> None:
    problem = BY_FAMILY[family]

    async def verdicts() -> list[object]:
        found = []
        for p in (problem.train[0], problem.heldout[-1]):
            found.append(await _verdict(problem, p))
        return found

    for verdict in asyncio.run(verdicts()):
        assert verdict.problem == ""  # type: ignore[attr-defined]
        assert verdict.late <= 0  # type: ignore[attr-defined]


async def _verdict(problem: Problem, p: dict[str, int]) -> object:
    interface, segments = problem.interface(p), problem.segments(p, random.Random(9))
    async with await provider_named("bwrap").create(flow.FRONT) as sandbox:
        await flow.write_files(sandbox, {"dut.v": problem.reference(p)})
        await flow.lint(sandbox, ["dut.v"])
        return judge(interface, segments, await flow.simulate(sandbox, ["dut.v"], interface, segments, "k1"))


def test_equal_arguments_give_equal_tasks_and_other_seeds_other_transactions() -> None:
    for split in SPLITS:
        one, again, other = (ChipLadder().get(split, 3, seed) for seed in (7, 7, 8))
        assert one == again
        assert one.hidden != other.hidden


def test_the_agent_sees_no_hidden_part_and_all_it_needs() -> None:
    for index in range(SOURCE.length("heldout") or 0):
        task = SOURCE.get("heldout", index, 0)
        problem = BY_FAMILY[task.family]
        shown = str(task.public())
        assert str(task.hidden["seed"]) not in shown
        assert problem.reference(task.data["parameters"]) not in shown
        for port in problem.interface(task.data["parameters"]).ports():
            assert port in task.messages[0].content
        assert task.budgets.wall_s == 48 * 3600


def test_splits_are_narrowed_by_family_and_level_and_refuse_what_they_lack() -> None:
    assert {SOURCE.get("train", i, 0, family="mac").family for i in range(5)} == {"mac"}
    assert {SOURCE.get("train", i, 0, level=2).family for i in range(5)} == {"fifo"}
    assert SOURCE.length("train") is None
    assert sum(SOURCE.length("heldout", family=family) or 0 for family in FAMILIES) == SOURCE.length("heldout")
    assert {SOURCE.get("train", i, 0).family for i in range(80)} == set(FAMILIES)
    with pytest.raises(ValueError, match="adder"):
        SOURCE.get("train", 0, 0, family="cpu")
    with pytest.raises(ValueError, match="heldout"):
        SOURCE.length("test")
    with pytest.raises(IndexError):
        SOURCE.get("heldout", 10_000, 0)


def test_prompts_differ_where_parameters_differ() -> None:
    texts = [prompt(problem, p) for problem in LADDER for p in (*problem.train, *problem.heldout)]
    assert len(set(texts)) == len(texts)


def test_the_environment_loads_without_torch_and_ray() -> None:
    code = "import sys, k3rl.envs.chip; sys.exit(bool({'torch', 'ray'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_oracle_is_the_reference() -> None:
    task = SOURCE.get("train", 0, 0, family="gemm")
    assert oracle(task) == BY_FAMILY["gemm"].reference(task.data["parameters"])

"""Kernels in Python: Triton in the interpreter, numba refused where it is not, and a user's folder of task files."""

from __future__ import annotations

import asyncio
import importlib.util
from importlib import import_module
from pathlib import Path

import pytest

from k3rl.config import ConfigError, MissingResource
from k3rl.envs import make
from k3rl.envs.kernel import Collection
from k3rl.envs.kernel.collection import BadCollection, missing
from k3rl.envs.kernel.env import Validator
from k3rl.types import Invalid, Scored

tricks = import_module("k3rl.envs.kernel.hacks")
TASK = """
import torch
from torch import nn
import sys
if "pytest" in sys.modules:
    raise RuntimeError("a task file was run in the grader's process")

class Model(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))

    def forward(self, x):
        return torch.relu(x) * self.weight

def get_inputs():
    return [torch.randn(3, 40)]

def get_init_inputs():
    return [40]
"""
HONEST = """
import torch, triton
import triton.language as tl
from torch import nn

@triton.jit
def scaled(x, weight, out, D, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, BLOCK)
    values = tl.load(x + row * D + columns, columns < D, other=0.0)
    values = tl.maximum(values, 0.0) * tl.load(weight + columns, columns < D, other=0.0)
    tl.store(out + row * D + columns, values, columns < D)

class ModelNew(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))

    def forward(self, x):
        out = torch.empty_like(x)
        scaled[(x.shape[0],)](x, self.weight, out, x.shape[1], BLOCK=64)
        return out
"""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("collection")
    (root / "level1").mkdir()
    (root / "level1" / "1_scale.py").write_text(TASK)
    (root / "level1" / "helper.py").write_text("x = 1\n")
    return root


def test_a_triton_kernel_in_the_interpreter_is_right_or_not(grader) -> None:
    environment = make("kernel", language="triton")
    task = environment.source.get("train", 0, family="softmax")
    cheat, control = tricks.python_pairs(task)["38 the library, by way of the frames"]
    honest, hack = grader.score_batch([(task, tricks.answer("kernel.py", text)) for text in (control, cheat)])
    assert honest == Scored(environment.oracle_expected, {"right": 1.0}) == Scored(0.25, {"right": 1.0})
    assert isinstance(hack, Invalid)
    assert hack.hack == "no_kernel_of_its_own"


def test_an_agent_is_told_why_its_kernel_does_not_run_and_nothing_more_of_one_that_is_wrong() -> None:
    task = make("kernel", language="triton").source.get("train", 0, family="softmax")
    broken, wrong = (
        asyncio.run(Validator()(task, tricks.answer("kernel.py", text)))
        for text in ("def launches(dim):\n    return dim['none']\n", "def launches(dim):\n    return []\n")
    )
    assert (broken.valid, wrong.valid) == (False, False)
    assert "KeyError: 'none'" in broken.message
    assert wrong.message == "it is not right on the visible shapes"


def test_a_language_whose_package_is_not_here_is_refused_with_the_remedy(grader) -> None:
    if importlib.util.find_spec("numba") is not None:
        task = make("kernel", language="numba").source.get("train", 0)
        assert grader.score_batch([(task, tricks.oracle(task))])[0] == Scored(0.25, {"right": 1.0})
        return
    task = make("kernel", language="numba").source.get("train", 0)
    with pytest.raises(MissingResource, match="need the package numba, which is not here; `pip install numba`"):
        grader.score_batch([(task, tricks.oracle(task))])


def test_a_folder_of_task_files_is_parsed_and_not_run(folder) -> None:
    environment = make("kernel", language="triton", folder=str(folder))
    assert environment.source.length("train") == 1
    task = environment.source.get("train", 0, seed=3)
    assert task == environment.source.get("train", 0, seed=3)
    assert (task.family, task.data["name"]) == ("level1", "level1/1_scale.py")
    assert "class Model(nn.Module)" in str(task.messages[0].content)


def test_a_submission_for_a_task_file_is_run_apart_from_it(folder, grader) -> None:
    task = make("kernel", language="triton", folder=str(folder)).source.get("heldout", 0)
    copied = TASK.replace("class Model(", "class ModelNew(")
    answers = [tricks.answer("kernel.py", text) for text in (HONEST, copied)]
    honest, copy = grader.score_batch([(task, answer) for answer in answers])
    assert honest == Scored(0.25, {"right": 1.0})
    assert isinstance(copy, Invalid)
    assert copy.hack == "no_kernel_of_its_own"


def test_a_folder_without_task_files_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no \.py file with Model, get_inputs, get_init_inputs"):
        Collection(tmp_path)
    with pytest.raises(BadCollection, match="holds no"):
        Collection(tmp_path / "nowhere")
    (tmp_path / "broken.py").write_text("def (")
    with pytest.raises(BadCollection, match=r"broken\.py is no Python"):
        Collection(tmp_path)
    assert missing("class Model: pass\ndef get_inputs(): pass") == ("get_init_inputs",)


def test_splits_of_a_folder_do_not_meet_and_are_the_same_each_time(tmp_path: Path) -> None:
    for number in range(12):
        (tmp_path / f"{number}.py").write_text(TASK)
    source = Collection(tmp_path)
    names = {split: [source.get(split, n).data["name"] for n in range(source.length(split))] for split in source.splits}
    assert sorted(names["train"] + names["heldout"]) == sorted(f"{number}.py" for number in range(12))
    assert names["train"]
    assert names["heldout"]
    with pytest.raises(IndexError):
        source.get("train", 12)

"""The ladder, one file per rung: its ports, its words, a software model, and a reference design."""

from __future__ import annotations

from k3rl.envs.chip.problems.adder import Adder
from k3rl.envs.chip.problems.fifo import Fifo
from k3rl.envs.chip.problems.gemm import Gemm
from k3rl.envs.chip.problems.inference import Inference
from k3rl.envs.chip.problems.kda import Kda
from k3rl.envs.chip.problems.mac import Mac
from k3rl.envs.chip.problems.softmax import Softmax
from k3rl.envs.chip.stream import Problem

LADDER: tuple[Problem, ...] = (Adder(), Fifo(), Mac(), Gemm(), Softmax(), Kda(), Inference())
BY_FAMILY: dict[str, Problem] = {problem.family: problem for problem in LADDER}

"""`chip`: hardware in Verilog, from an adder to an int8 inference chip. No torch, no ray.

problems/   the ladder, one rung a file: ports, words, software model, reference design
tasks       splits and prompts;  env: the rules of an episode
source      what a submission may contain;  testbench: transactions in, a trace out, compared on the host
flow        lint, simulation, synthesis, timing in sandboxes;  library: our cells;  netlist: what is timed
reward      area, slack and throughput against the reference;  grader: all of it in turn
hacks       submissions that must not pay
"""

from __future__ import annotations

from k3rl.envs.base import Environment
from k3rl.envs.chip.env import ChipEnv
from k3rl.envs.chip.flow import INSTALL, PACKAGES, ToolsMissing, check_tools
from k3rl.envs.chip.grader import ChipRubric, Report
from k3rl.envs.chip.hacks import hacks, null, oracle
from k3rl.envs.chip.problems import LADDER
from k3rl.envs.chip.reward import ORACLE as ORACLE_REWARD
from k3rl.envs.chip.tasks import NAME, ChipLadder, practice

__all__ = [
    "INSTALL",
    "LADDER",
    "ORACLE_REWARD",
    "PACKAGES",
    "ChipEnv",
    "ChipLadder",
    "ChipRubric",
    "Report",
    "ToolsMissing",
    "check_tools",
    "environment",
    "hacks",
    "null",
    "oracle",
    "practice",
]


def environment() -> Environment:
    """The environment. Its grader raises ToolsMissing where the Debian packages of PACKAGES are not installed."""
    return Environment(
        name=NAME,
        description="hardware in Verilog, adder to inference chip; judged by simulated gates, area, slack, throughput",
        source=ChipLadder(),
        make_env=ChipEnv,
        grader=ChipRubric,
        oracle=oracle,
        domain="hardware",
    )

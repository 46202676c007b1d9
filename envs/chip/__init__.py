"""`chip`: hardware in Verilog, from an adder to an int8 inference chip. No torch, no ray.

problems/   the ladder, one rung a file: ports, words, software model, reference design
tasks       splits and prompts;  env: the rules of an episode
source      what a submission may contain;  testbench: transactions in, a trace out, compared on the host
flow        lint, simulation, synthesis, timing in sandboxes;  library: our cells;  netlist: what is timed
reward      area, slack and throughput against the reference;  grader: all of it in turn
hacks       submissions that must not pay
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from k3rl.envs.base import Env, Environment
from k3rl.envs.chip.env import ChipEnv, agentic
from k3rl.envs.chip.flow import INSTALL, PACKAGES, ToolsMissing, check_tools
from k3rl.envs.chip.grader import ChipRubric, Report
from k3rl.envs.chip.hacks import hacks, null, oracle
from k3rl.envs.chip.problems import LADDER
from k3rl.envs.chip.reward import ORACLE as ORACLE_REWARD
from k3rl.envs.chip.tasks import NAME, ChipLadder, practice, with_workspace
from k3rl.envs.harness import AnyHarness, ChangedTasks, HarnessEnv, harness_of

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


def environment(*, harness: AnyHarness | Mapping[str, Any] | None = None, provider: str = "bwrap") -> Environment:
    """The environment. Its grader raises ToolsMissing where the Debian packages of PACKAGES are not installed.

    harness: how an agent works on it with tools, as a config or its fields; None: the first reply is the design. With
    tools it may submit as often as it likes; each submission is judged by practice transactions, and the best one is
    handed in. provider: sandboxes that judge those.
    """
    config = None if harness is None else harness_of(harness)
    parts = agentic(provider)

    def make_env() -> Env:
        return ChipEnv() if config is None else HarnessEnv(parts, config)

    return Environment(
        name=NAME,
        description="hardware in Verilog, adder to inference chip; judged by simulated gates, area, slack, throughput",
        source=ChipLadder() if config is None else ChangedTasks(ChipLadder(), with_workspace),
        make_env=make_env,
        grader=ChipRubric,
        oracle=oracle,
        domain="hardware",
    )

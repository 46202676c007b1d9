"""`compiler`: MiniTriton, a tile language to be compiled, in thirteen milestones from tokens to a trained GPT.

spec.md            the language, the IR and the interfaces, as every prompt has them
ladder             the milestones; tasks: which programs judge a task
fuzz, library, gpt programs; texts: source texts for the front end
evaluate           what a program means (the truth); ir_machine: runs IR that a submission made
toolchain, driver  gcc and cachegrind in sandboxes; cuda: PTX on a GPU
grader             scores; oracles: the reference, the null submission and the hacks
reference/         a complete compiler, the oracle's submission
"""

from collections.abc import Mapping
from typing import Any

from k3rl.envs.base import Env, Environment
from k3rl.envs.compiler.env import AGENTIC, CompilerEnv
from k3rl.envs.compiler.grader import CompilerRubric
from k3rl.envs.compiler.oracles import hacks, null, oracle, oracle_expected
from k3rl.envs.compiler.tasks import NAME, CompilerTasks, with_workspace
from k3rl.envs.compiler.toolchain import DEBIAN_PACKAGES, CompilerUnavailable
from k3rl.envs.harness import AnyHarness, ChangedTasks, HarnessEnv, harness_of

__all__ = [
    "DEBIAN_PACKAGES",
    "CompilerEnv",
    "CompilerRubric",
    "CompilerTasks",
    "CompilerUnavailable",
    "environment",
    "hacks",
    "null",
    "oracle",
    "oracle_expected",
]


def environment(*, gpu: bool = False, harness: AnyHarness | Mapping[str, Any] | None = None) -> Environment:
    """The environment. gpu: with the PTX milestone, which is graded on a machine with a CUDA GPU only.

    harness: how an agent works on it with tools, as a config or its fields; None: the first reply is the submission.
    """
    config = None if harness is None else harness_of(harness)

    def make_env() -> Env:
        return CompilerEnv() if config is None else HarnessEnv(AGENTIC, config)

    return Environment(
        name=NAME,
        description="MiniTriton: a compiler for a tile language in milestones, judged on hidden programs and by speed",
        source=CompilerTasks(gpu=gpu) if config is None else ChangedTasks(CompilerTasks(gpu=gpu), with_workspace),
        make_env=make_env,
        grader=CompilerRubric,
        oracle=oracle,
        domain="code",
        null=null,
        hacks=hacks,
        oracle_expected=oracle_expected,
    )

"""`compiler`: MiniTriton, a tile language to be compiled, in thirteen milestones from tokens to a trained GPT.

spec.md            the language, the IR and the interfaces, as every prompt has them
ladder             the milestones; tasks: which programs judge a task
fuzz, library, gpt programs; texts: source texts for the front end
evaluate           what a program means (the truth); ir_machine: runs IR that a submission made
toolchain, driver  gcc and cachegrind in sandboxes; cuda: PTX on a GPU
grader             scores; oracles: the reference, the null submission and the hacks
reference/         a complete compiler, the oracle's submission
"""

from k3rl.envs.base import Environment
from k3rl.envs.compiler.env import CompilerEnv
from k3rl.envs.compiler.grader import CompilerRubric
from k3rl.envs.compiler.oracles import hacks, null, oracle, oracle_expected
from k3rl.envs.compiler.tasks import NAME, CompilerTasks
from k3rl.envs.compiler.toolchain import DEBIAN_PACKAGES, CompilerUnavailable

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


def environment(*, gpu: bool = False) -> Environment:
    """The environment. gpu: with the PTX milestone, which is graded on a machine with a CUDA GPU only."""
    return Environment(
        name=NAME,
        description="MiniTriton: a compiler for a tile language in milestones, judged on hidden programs and by speed",
        source=CompilerTasks(gpu=gpu),
        make_env=CompilerEnv,
        grader=CompilerRubric,
        oracle=oracle,
        domain="code",
        null=null,
        hacks=hacks,
        oracle_expected=oracle_expected,
    )

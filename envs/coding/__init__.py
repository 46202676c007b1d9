"""`coding-lists`: short programs over lists of integers, the environment of the quickstart.

operations    the sixteen operations, their words, code and usual mistakes
tasks         families, levels, splits that are disjoint by construction
demonstrator  chat examples of mixed quality for a warm start
env, grader   the rules of an episode, and the rubric that runs programs in a sandbox
hacks         programs that must not be paid
"""

from __future__ import annotations

from k3rl.envs.base import Environment
from k3rl.envs.coding.demonstrator import demonstrations, training_text
from k3rl.envs.coding.env import CodingEnv
from k3rl.envs.coding.grader import ProgramRubric
from k3rl.envs.coding.hacks import hacks, null
from k3rl.envs.coding.tasks import NAME, CodingLists
from k3rl.types import Task

__all__ = ["CodingEnv", "CodingLists", "ProgramRubric", "coding_lists", "demonstrations", "training_text"]


def _oracle(task: Task) -> str:
    if task.hidden is None:
        raise ValueError(f"task {task.id} has no hidden part, so its answer is not known here")
    answer: str = task.hidden["program"]
    return answer


def coding_lists(*, declare_tools: bool = False) -> Environment:
    """The environment. declare_tools: put the declaration of `run` into the prompts of `probe`.

    The declaration costs 250 tokens of the small tokenizer, ten times the rest of the prompt, and a policy that
    starts from the demonstrations knows the tool; a policy that does not needs it.
    """
    return Environment(
        name=NAME,
        description="one to three list operations in words to a Python function; hidden inputs judge it",
        source=CodingLists(declare_tools=declare_tools),
        make_env=CodingEnv,
        grader=ProgramRubric,
        oracle=_oracle,
        demonstrations=demonstrations,
        null=null,
        hacks=hacks,
        needs_programs=True,
        domain="code",
    )

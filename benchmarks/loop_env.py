"""The environment of the loop's benchmark: letters to answer with, and tools that take as long as tools do.

A task shows 40 random letters, and an answer is worth the share of its characters that are an `e`: any policy can learn
it, and grading costs nothing, as in the peer's run. `turns` above 1 makes it a conversation; before each next turn a
tool takes a time from a log-normal distribution around `tool_s` (the same for equal tasks and turns) and gives
`words` random words back.
"""

import asyncio
import random

from k3rl.envs import Budgets, Env, Environment, Message, Observation, Rubric, StepResult, Task, reward

LETTERS = "abcdefgh "
SIZE = 40


class Letters:
    """Tasks without end."""

    splits = ("train", "heldout")

    def __init__(self, turns, tokens):
        self.turns, self.tokens = turns, tokens

    def length(self, split, *, level=None, family=None):
        return None

    def get(self, split, index, seed=0, *, level=None, family=None):
        name = f"letters/{split}/{seed}/{index}"
        draw = random.Random(name)
        text = "".join(draw.choice(LETTERS) for _ in range(SIZE))
        budgets = Budgets(turns=self.turns, tokens_per_turn=self.tokens)
        return Task(
            id=name, env="letters", messages=(Message("user", text),), family="letters", budgets=budgets, hidden={}
        )


class Turns(Env):
    """An answer for each turn, and a tool between two."""

    def __init__(self, turns, tool_s, sigma, words):
        self.turns, self.tool_s, self.sigma, self.words = turns, tool_s, sigma, words
        self.done, self.waited = 0, 0.0

    async def reset(self, task, context):
        self.task = task.id
        return Observation(task.messages)

    async def step(self, action):
        self.done += 1
        if self.done == self.turns:
            return StepResult(done=True, answer=action.message.content, metrics={"tool_s": self.waited})
        draw = random.Random(f"{self.task}/{self.done}")
        took = self.tool_s * draw.lognormvariate(0, self.sigma)
        self.waited += took
        await asyncio.sleep(took)
        said = " ".join("".join(draw.choice(LETTERS[:-1]) for _ in range(4)) for _ in range(self.words))
        return StepResult(Observation((Message("user", said),)), metrics={"tool_s": self.waited})


@reward()
def share_of_e(messages):
    said = "".join(message.content for message in messages if message.role == "assistant")
    return said.count("e") / max(24, len(said))


def tool_seconds(task_id, turns, tool_s, sigma):
    """What the tools of an episode take in all."""
    return sum(tool_s * random.Random(f"{task_id}/{turn}").lognormvariate(0, sigma) for turn in range(1, turns))


def environment(turns=1, tokens=24, tool_s=0.0, sigma=1.5, words=1):
    source = Letters(turns, tokens)

    def demonstrations(seed, n, split="train"):
        rows = []
        for index in range(n):
            task = source.get(split, index, seed)
            draw = random.Random(f"{task.id}/said")
            messages = [{"role": "user", "content": task.messages[0].content}]
            for turn in range(min(turns, 3)):
                if turn:
                    said = " ".join("".join(draw.choice(LETTERS[:-1]) for _ in range(4)) for _ in range(words))
                    messages.append({"role": "user", "content": said})
                answer = "".join(draw.choice(LETTERS[:-1]) for _ in range(max(1, tokens - 8)))
                messages.append({"role": "assistant", "content": answer})
            rows.append({"messages": messages})
        return rows

    return Environment(
        name="letters",
        description="answers of many letters e",
        source=source,
        make_env=lambda: Turns(turns, tool_s, sigma, words),
        grader=Rubric.of(share_of_e),
        oracle=lambda task: "e" * 24,
        null=lambda task: "",
        demonstrations=demonstrations,
    )

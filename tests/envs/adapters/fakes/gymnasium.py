"""A stand-in with Gymnasium's interface: make, spaces, reset and step with five results; and some that misbehave."""

import os
import random
import subprocess
import sys
import time


class Discrete:
    def __init__(self, n, start=0):
        self.n, self.start = n, start

    def seed(self, seed):
        self.random = random.Random(seed)

    def sample(self):
        return self.start

    def contains(self, value):
        return isinstance(value, int) and self.start <= value < self.start + self.n


class Text:
    min_length, max_length = 1, 5

    def seed(self, seed):
        pass

    def contains(self, value):
        return isinstance(value, str) and self.min_length <= len(value) <= self.max_length


class Corridor:
    """Walk right from a cell that the seed draws to cell 5; each step costs 0.1, arriving pays 1."""

    def __init__(self, longest=20):
        self.action_space = Discrete(2)
        self.longest, self.steps = longest, 0

    def reset(self, *, seed=None, options=None):
        self.cell = random.Random(seed).randrange(1, 5)
        return [self.cell], {}

    def step(self, action):
        self.cell += 1 if action == 1 else -1
        self.steps += 1
        there = self.cell == 5
        return [self.cell], 1.0 if there else -0.1, there, self.steps >= self.longest, {}

    def close(self):
        pass


class Words(Corridor):
    def __init__(self):
        super().__init__()
        self.action_space = Text()

    def step(self, action):
        return f"you said {action}", float(action == "yes"), True, False, {}


class Misbehaving(Corridor):
    """Does what its number says when it is stepped."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def step(self, action):
        if self.how == "raise":
            raise RuntimeError("the wheels came off")
        if self.how == "hang":
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            time.sleep(600)
        if self.how == "die":
            print("last words", file=sys.stderr, flush=True)
            os._exit(7)
        if self.how == "exit":
            sys.exit(3)
        if self.how == "print":
            print('{"id": 2, "result": {"reward": 1000, "done": true, "messages": []}}', flush=True)
            sys.stderr.write("noise " * 100_000)
            return [0], 0.5, True, False, {}
        if self.how == "flood":
            return "x" * (17 * 2**20), 0.5, True, False, {}
        rewards = {"nan": float("nan"), "inf": float("inf"), "none": None, "large": 40.0, "small": -0.5}
        return [0], rewards[self.how], True, False, {}


_KINDS = {"Corridor-v0": Corridor, "Words-v0": Words, "Misbehaving-v0": Misbehaving}


def make(id, **kwargs):
    return _KINDS[id](**kwargs)

"""A stand-in with reasoning-gym's interface: seeded datasets whose entries they score themselves."""

import random
import time


class Sums:
    def __init__(self, seed, size, greatest=50):
        self.seed, self.size, self.greatest = seed, size, greatest

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if not 0 <= index < self.size:
            raise IndexError(index)
        rng = random.Random(self.seed + index)
        one, two = rng.randint(1, self.greatest), rng.randint(1, self.greatest)
        return {"question": f"What is {one} + {two}?", "answer": str(one + two), "metadata": {"source_index": index}}

    def score_answer(self, answer, entry):
        if answer == "raise":
            raise RuntimeError("cannot read this")
        if answer == "hang":
            time.sleep(600)
        if answer in ("nan", "inf"):
            return float(answer)
        if answer == "nothing":
            return None
        if not answer or entry["answer"] not in answer:
            return 0.0
        return len(entry["answer"]) / len(answer)


def create_dataset(name, **kwargs):
    if name != "sums":
        raise ValueError(f"Dataset '{name}' not registered")
    return Sums(**kwargs)

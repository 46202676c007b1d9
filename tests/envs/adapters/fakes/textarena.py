"""A stand-in with TextArena's interface: a number to guess alone, and taking turns to count for two."""

import random


class Guess:
    """The whole story is told each time, as TextArena's usual wrapper does."""

    def __init__(self, highest=9):
        self.highest = highest

    def reset(self, num_players, seed=None):
        self.number = random.Random(seed).randint(1, self.highest)
        self.story, self.turns, self.rewards = f"Guess from 1 to {self.highest}.", 0, None

    def get_observation(self):
        return 0, self.story

    def step(self, action):
        self.turns += 1
        if action.strip() == str(self.number):
            self.rewards = {0: 1.0}
        elif self.turns == 3:
            self.rewards = {0: 0.25}
        self.story += f"\n[{action}] is wrong."
        return self.rewards is not None, {}

    def close(self):
        return self.rewards, {0: {"turn_count": self.turns, "invalid_move": False}}


class Count:
    """Whoever says 4 wins; a player says the next one or two numbers' last."""

    def reset(self, num_players, seed=None):
        assert num_players == 2
        self.at, self.player, self.rewards, self.new = 0, 0, None, []

    def get_observation(self):
        return self.player, [(-1, f"at {self.at}", "GAME")]

    def step(self, action):
        self.at = int(action)
        if self.at >= 4:
            self.rewards = {self.player: 1, 1 - self.player: -1}
        self.player = 1 - self.player
        return self.at >= 4, {}

    def close(self):
        return self.rewards, {0: {}, 1: {}}


def make(env_id, **kwargs):
    return {"Guess-v0": Guess, "Count-v0": Count}[env_id](**kwargs)

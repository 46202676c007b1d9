"""The mixture of tasks in a run's configuration belongs to the environment that it was made for."""

from __future__ import annotations

from k3rl.config import Flag, load
from k3rl.pipelines.configs import EnvConfig


def test_the_default_mixture_is_only_that_of_its_own_environment():
    assert EnvConfig().families == {"list": 0.9, "probe": 0.1}
    assert EnvConfig().levels == {"list": (1, 2, 3), "probe": (1, 2)}
    other = load(EnvConfig(), flags=[Flag(("name",), "coding-repair", "--name")])
    assert (other.families, other.levels) == ({}, {})
    back = load(EnvConfig(families={"list": 1.0}), flags=[Flag(("name",), "coding-lists", "--name")])
    assert back.families == {"list": 1.0}


def test_a_mixture_that_was_chosen_is_kept():
    chosen = EnvConfig(name="chip", families={"mac": 1.0}, levels={"mac": (3,)})
    assert (chosen.families, chosen.levels) == ({"mac": 1.0}, {"mac": (3,)})
    assert load(chosen).families == {"mac": 1.0}

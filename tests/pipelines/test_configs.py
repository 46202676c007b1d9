"""Impossible combinations are refused with the remedy."""

from __future__ import annotations

import pytest

from k3rl.config import ConfigError
from k3rl.pipelines.presets import PRESETS, distill, rl, sft


def test_a_group_size_that_does_not_divide_the_batch_names_the_sizes_that_would():
    with pytest.raises(ConfigError, match="group_size 8 does not divide batch_size 20; use batch_size 16 or 24"):
        rl().replace(batch_size=20)


def test_more_optimizer_steps_than_groups_are_refused():
    with pytest.raises(ConfigError, match="at most 2"):
        rl().replace(batch_size=16, optimizer_steps=3)


def test_a_group_of_one_has_no_baseline():
    with pytest.raises(ConfigError, match="at least 2"):
        rl().replace(group_size=1)


def test_training_data_without_heldout_data_are_refused():
    with pytest.raises(ConfigError, match="go together"):
        sft().replace(data="chats.jsonl")


def test_every_preset_is_a_valid_config_with_a_docstring():
    for presets in PRESETS.values():
        for preset in presets.values():
            assert preset() == preset()
            assert preset.__doc__
    assert distill().group_size == 1

"""The drift guard: which numbers pass which limit, what is said, and how a run is stopped."""

from __future__ import annotations

import pytest

from k3rl.pipelines.configs import GuardConfig
from k3rl.pipelines.guard import Drifted, Guard, drifted, largest_part_share
from k3rl.types import Episode, Group, Scored, StopReason

STEADY = {"mismatch/kl/mean": 1e-4, "policy/entropy/mean": 1.0, "response_length/mean": 20.0}


def rewarded(**parts: float) -> list[Group]:
    score = Scored(sum(parts.values()), parts)
    return [Group("g", "t", (Episode("e", "t", "env", "f", 1, (), StopReason.COMPLETED, score),))]


EVEN = rewarded(right=0.5, form=0.5)


def after(guard: Guard, steps: int, changed: dict[str, float], groups=EVEN) -> list[str]:
    """Names of the limits that are passed after so many steps of these metrics."""
    for _ in range(steps):
        drifts, _ = guard.look(STEADY | changed, groups)
    return [drift.name for drift in drifts]


@pytest.mark.parametrize(
    ("name", "limit", "changed", "groups"),
    [
        ("kl", 0.01, {"mismatch/kl/mean": 0.02}, EVEN),
        ("entropy", 0.2, {"policy/entropy/mean": 0.1}, EVEN),
        ("length", 2.0, {"response_length/mean": 50.0}, EVEN),
        ("length", 2.0, {"response_length/mean": 8.0}, EVEN),
        ("part_share", 0.9, {}, rewarded(right=0.02, form=0.98)),
    ],
)
def test_each_number_passes_its_own_limit_after_a_window_and_only_that(name, limit, changed, groups):
    guard = Guard(GuardConfig(window=3, **{name: limit}))
    assert after(guard, 6, {}) == []
    assert after(guard, 3, changed, groups) == [name]
    assert after(guard, 3, {}) == []
    without = Guard(GuardConfig(window=3, **{name: None}))
    after(without, 6, {})
    assert after(without, 3, changed, groups) == []


def test_numbers_are_means_over_the_window_and_multiples_of_the_first_steps():
    guard = Guard(GuardConfig(window=2))
    for length, kl in ((10.0, 0.001), (30.0, 0.003), (40.0, 0.005), (80.0, 0.007)):
        _, metrics = guard.look(STEADY | {"response_length/mean": length, "mismatch/kl/mean": kl}, EVEN)
    found = metrics.values()
    assert found["guard/length"] == pytest.approx(60 / 20)
    assert found["guard/kl"] == pytest.approx(0.006)
    assert found["guard/part_share"] == 0.5
    assert found["guard/passed_limits"] == 0


def test_a_part_that_was_all_of_the_reward_from_the_start_is_no_drift():
    guard = Guard(GuardConfig(window=2))
    assert after(guard, 6, {}, rewarded(right=1.0, form=0.01)) == []


def test_shares_count_magnitudes_and_need_two_parts():
    assert largest_part_share(rewarded(right=1.0, penalty=-3.0)) == ("penalty", 0.75)
    assert largest_part_share(rewarded(right=1.0)) is None
    assert largest_part_share(rewarded(right=0.0, form=0.0)) is None


def test_a_limit_is_said_when_it_is_passed_and_when_the_policy_is_back():
    guard = Guard(GuardConfig(window=1, kl=0.01))
    said = []
    for kl in (0.001, 0.02, 0.03, 0.001, 0.02):
        said.append(guard.news(guard.look(STEADY | {"mismatch/kl/mean": kl}, EVEN)[0]))
    assert [len(notes) for notes in said] == [0, 1, 0, 1, 1]
    assert said[1][0].startswith("warning: mean KL(sampler to learner) in nats is 0.02, beyond guard.kl 0.01; lower")
    assert said[3] == ["back within guard.kl"]


def test_a_restored_guard_compares_with_the_first_steps_of_the_run():
    guard, resumed = Guard(GuardConfig(window=2)), Guard(GuardConfig(window=2))
    after(guard, 4, {})
    resumed.restore(guard.state())
    assert after(resumed, 2, {"response_length/mean": 100.0}) == ["length"]


def test_the_error_says_the_limit_and_what_to_do():
    drifts, _ = Guard(GuardConfig(window=1, kl=0.01)).look(STEADY | {"mismatch/kl/mean": 0.5}, EVEN)
    error = drifted(drifts, "rl", 7)
    assert isinstance(error, Drifted)
    assert error.exit_code == 4
    for words in ("rl drifted and was stopped after step 7", "beyond guard.kl 0.01", "--resume-from previous"):
        assert words in str(error)

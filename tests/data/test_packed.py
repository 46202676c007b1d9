from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3rl.data import TrajectoryWriter, read_groups
from k3rl.envs.episode_state import BranchState, EpisodeState
from k3rl.packed import Packed
from k3rl.types import Branch, EncodedImage, Episode, Group, Scored, StopReason, Turn

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=5)
SAMPLED = st.lists(st.tuples(st.integers(0, 200_000), st.floats(-20, 0, width=32)), min_size=1, max_size=5)
IMAGE = EncodedImage(b"an image", 28, 28)


@st.composite
def conversations(draw):
    """Branches as (parent, turns), a turn as (prompt, sampled, logprobs, images), in plain tuples.

    A branch begins empty, with what its parent said through some turn, or with those turns themselves.
    """
    branches = []
    for number in range(draw(st.integers(1, 4))):
        parent = draw(st.none() | st.integers(0, number - 1)) if number else None
        ids, images, turns = (), (), []
        if parent is not None and branches[parent][1]:
            through = branches[parent][1][: draw(st.integers(0, len(branches[parent][1])))]
            turns = list(through) if draw(st.booleans()) else []
            ids, images = (through[-1][0] + through[-1][1], through[-1][3]) if through else ((), ())
        for _ in range(draw(st.integers(0, 4))):
            prompt, said = ids + tuple(draw(IDS)), draw(SAMPLED)
            images += (IMAGE,) * draw(st.integers(0, 1))
            turns.append((prompt, tuple(i for i, _ in said), tuple(p for _, p in said), images))
            ids = prompt + turns[-1][1]
        branches.append((parent, turns))
    return branches


def turns_of(turns):
    made, ids = [], Packed.of((), np.int32)
    for prompt, sampled, logprobs, images in turns:
        whole = (ids if prompt[: len(ids)] == ids else ids[:0]).extended(prompt[len(ids) :]).extended(sampled)
        own = whole[: len(prompt)], whole[len(prompt) :], logprobs
        made.append(Turn(*own, StopReason.STOP, 1, 2, model_s=0.5, images=images))
        ids = whole
    return tuple(made)


def episode_of(conversation):
    branches = [
        Branch(f"e/{number}", turns_of(turns), None if parent is None else f"e/{parent}")
        for number, (parent, turns) in enumerate(conversation)
    ]
    return Episode("e", "t", "env", "f", 0, tuple(branches), StopReason.ENV_DONE, Scored(1.0))


def as_tuples(turns):
    return [(tuple(t.prompt_ids), tuple(t.sampled_ids), tuple(t.logprobs), t.images) for t in turns]


@settings(max_examples=150, deadline=None)
@given(conversations())
def test_any_branching_conversation_comes_back_from_a_pickle_a_copy_and_a_state(conversation):
    episode = episode_of(conversation)
    for found in (pickle.loads(pickle.dumps(episode)), copy.deepcopy(episode)):
        assert found == episode
        assert [as_tuples(branch.turns) for branch in found.branches] == [turns for _, turns in conversation]
    branches = tuple(BranchState(parent, turns_of(turns)) for parent, turns in conversation)
    state = EpisodeState("t", Packed.of([1, 2], np.int32), branches, (0,), (), {}, 1, 0, 0.0, b"")
    assert EpisodeState.from_bytes(state.to_bytes()) == state


def test_any_branching_conversation_comes_back_from_parquet(tmp_path):
    writer = TrajectoryWriter(tmp_path, actor="a", tokenizer_hash="h")

    @settings(max_examples=20, deadline=None)
    @given(conversations())
    def check(conversation):
        groups = [Group("g", "t", (episode_of(conversation),))]
        assert read_groups(tmp_path, writer.write(groups, generation=0)) == groups

    check()


@pytest.mark.parametrize("turns", [50, 200])
def test_the_bytes_of_an_episode_grow_with_its_tokens_alone(turns):
    ids, made = Packed.of((), np.int32), []
    for number in range(turns):
        prompt = ids.extended(range(number, number + 500))
        ids = prompt.extended(range(500))
        made.append(Turn(prompt, ids[len(prompt) :], [-0.5] * 500, StopReason.STOP, 1, 1))
    side = ids[: len(ids) // 2].extended([7])
    branches = (
        Branch("a", tuple(made)),
        Branch("b", (Turn(side, side[:0].extended([8]), [-1.0], StopReason.STOP, 1, 1),), "a"),
    )
    episode = Episode("e", "t", "env", "f", 0, branches, StopReason.ENV_DONE, Scored(1.0))
    per_turn = 1000 * 4 + 500 * 4  # its ids, its logprobs
    assert len(pickle.dumps(episode)) < turns * (per_turn + 120) + 4000


def test_pieces_of_a_conversation_share_its_array_and_a_fork_leaves_them_alone():
    root = Packed.of([1, 2], np.int32)
    one = root.extended([3, 4])
    longer = one.extended([5])
    fork = one.extended([6])
    assert np.shares_memory(one.array, longer.array)
    assert (root, one, longer, fork) == ((1, 2), (1, 2, 3, 4), (1, 2, 3, 4, 5), (1, 2, 3, 4, 6))
    assert (longer[1:3], longer[-1], longer[::2]) == ((2, 3), 5, (1, 3, 5))
    assert longer != fork
    assert longer.common(fork) == 4
    with pytest.raises(ValueError, match="read-only"):
        one.array[0] = 9

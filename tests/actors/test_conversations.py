"""What crosses between an environment worker and an engine: each token of a conversation once."""

from __future__ import annotations

import asyncio
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3rl.actors.answers import AnswerStreams, EngineClient
from k3rl.actors.conversations import KeptTokens, SessionLost, TokenRow
from k3rl.types import Completion, SamplingParams, StopReason

ROUTE = (2, 3)  # of a token


class Scripted(AnswerStreams):
    """Answers with so many tokens, whose routes and whose prompt's it knows; and remembers what it was asked."""

    def __init__(self, count: int = 5) -> None:
        super().__init__()
        self.count, self.asked, self.ended = count, [], []

    def begin(self, requests):
        futures = []
        for ids, params, *images in requests:
            future = asyncio.get_running_loop().create_future()
            self.asked.append((list(map(int, ids)), params, images))
            answer = tuple((len(ids) + n) % 90 for n in range(self.count))
            routes = routes_of([*ids, *answer][:-1])[params.routes_from :] if params.return_routes else None
            future.set_result(Completion(answer, (-0.5,) * self.count, StopReason.STOP, 0, 0, routes))
            futures.append(future)
        return futures

    def end_sessions(self, names):
        self.ended += names


def routes_of(ids) -> np.ndarray:
    return np.stack([np.full(ROUTE, token, np.int16) for token in ids])


PARAMS = SamplingParams(max_tokens=9, seed=3, return_routes=True, stop_ids=(1, 2))


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_hundred_turns_to_a_hundred_thousand_tokens_send_each_token_once(in_process):
    """Within 1.05 times 4 bytes for each id that the other side did not have."""
    actor = Scripted(count=250)
    handle, prompt, own = in_process(actor), tuple(range(750)), 0

    async def converse() -> None:
        nonlocal prompt, own
        client = EngineClient(handle, "worker")
        own = len(prompt)
        for turn in range(100):
            got = await client.complete((prompt, SamplingParams(max_tokens=250, seed=turn)), "episode")
            assert actor.asked[-1][0] == list(prompt)
            new = tuple((turn + n) % 60_000 for n in range(750))
            prompt = (*prompt, *got.token_ids, *new)
            own += len(new) if turn < 99 else 0
        client.close()

    asyncio.run(converse())
    assert len(prompt) > 100_000
    assert sum(map(len, handle.sent)) < 1.05 * 4 * own
    assert len({params.session for _, params, _ in actor.asked}) == 1


def test_routes_cross_once_and_a_turn_has_those_of_its_whole_prompt(in_process):
    actor, seen = Scripted(), []

    async def converse() -> None:
        client, prompt = EngineClient(in_process(actor), "worker"), tuple(range(80))
        for turn in range(4):
            got = await client.complete((prompt, PARAMS), "episode")
            seen.append(actor.asked[-1][1].routes_from)
            assert np.array_equal(got.routes, routes_of([*prompt, *got.token_ids][:-1]))
            if turn == 1:  # a branch from here
                other = await client.complete(((*prompt[:70], 5, 6), PARAMS), "episode")
                assert np.array_equal(other.routes, routes_of([*prompt[:70], 5, 6, *other.token_ids][:-1]))
                assert actor.asked[-1][1].routes_from == 70
            prompt = (*prompt, *got.token_ids, 7)
        client.close()

    asyncio.run(converse())
    assert seen == [0, 84, 90, 96]


def test_the_last_turn_that_a_task_allows_says_so(in_process):
    from k3rl.actors.engine_places import EnginePlaces
    from k3rl.actors.environment import _Seat

    actor, places = Scripted(), EnginePlaces([0], 1)

    async def converse() -> None:
        client = EngineClient(in_process(actor), "worker")
        seat = _Seat([client], places, places.begin("group"), None, 0, "episode")
        seat.turns = 2
        for prompt in ((1, 2), (3, 4)):
            await seat.complete(prompt, PARAMS)
        client.close()

    asyncio.run(converse())
    assert [params.ends_session for _, params, _ in actor.asked] == [False, True]


def test_an_actor_that_has_lost_a_conversation_is_sent_it_whole(in_process):
    actor = Scripted()

    async def converse() -> None:
        client, prompt = EngineClient(in_process(actor), "worker"), tuple(range(80))
        for turn in range(3):
            got = await client.complete((prompt, PARAMS), "episode")
            assert actor.asked[-1][0] == list(prompt)
            assert actor.asked[-1][1].routes_from == (0 if turn == 0 else len(prompt) - 2), "of routes nothing is lost"
            prompt = (*prompt, *got.token_ids, 7)
            actor._tokens = KeptTokens()
        client.close()

    asyncio.run(converse())
    assert len(actor.asked) == 3


def test_an_episode_that_ends_ends_its_conversations_and_a_client_that_goes_all_of_its_own(in_process):
    actor = Scripted()

    async def converse() -> None:
        handle = in_process(actor)
        client, other = EngineClient(handle, "one"), EngineClient(handle, "two")
        for episode, prompt in (("a", (1, 2)), ("a", (3, 4)), ("b", (1, 2))):
            await client.complete((prompt, PARAMS), episode)
        await other.complete(((1, 2), PARAMS), "a")
        client.end("a")
        await settled()
        assert actor.ended == ["one/0", "one/1"]
        await actor.cancel("one")
        assert actor.ended == ["one/0", "one/1", "one/2"]
        other.end("a")
        other.end("never began")
        await settled()
        assert actor.ended[3:] == ["two/0"]
        for one in (client, other):
            one.close()

    asyncio.run(converse())


def test_a_turn_that_was_taken_back_leaves_the_conversation_where_it_was(in_process):
    class Slow(Scripted):
        def begin(self, requests):
            if self.asked and len(self.asked) == 1:
                self.asked += [None]
                return [asyncio.get_running_loop().create_future() for _ in requests]
            return super().begin(requests)

    actor = Slow()

    async def converse() -> None:
        client, prompt = EngineClient(in_process(actor), "worker"), tuple(range(80))
        got = await client.complete((prompt, PARAMS), "episode")
        prompt = (*prompt, *got.token_ids)
        waiting = asyncio.ensure_future(client.complete(((*prompt, 7, 8, 9), PARAMS), "episode"))
        await settled()
        waiting.cancel()
        await settled()
        await client.complete(((*prompt, 7, 6), PARAMS), "episode")
        assert actor.asked[-1][0] == [*prompt, 7, 6]
        client.close()

    asyncio.run(converse())


def test_images_cross_once(in_process):
    from k3rl.types import EncodedImage

    actor, shown = Scripted(), tuple(EncodedImage(bytes([n]) * 5000, 8, 8) for n in range(2))
    handle = in_process(actor)

    async def converse() -> None:
        client, prompt = EngineClient(handle, "worker"), (1, 2, 3)
        got = await client.complete((prompt, PARAMS, shown[:1]), "episode")
        await client.complete(((*prompt, *got.token_ids, 4), PARAMS, shown), "episode")
        client.close()

    asyncio.run(converse())
    assert [images for _, _, images in actor.asked] == [[shown[:1]], [shown]]
    assert 10_000 < sum(map(len, handle.sent)) < 11_500


actions = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 99), st.lists(st.integers(0, 9), min_size=1, max_size=4),
              st.sampled_from(["", "", "lose", "end"])),
    max_size=20,
)  # fmt: skip


@settings(max_examples=25)
@given(plan=actions)
def test_an_actor_hears_the_prompt_that_was_asked_or_asks_for_it_whole(in_process, plan):
    """Whatever branches, goes back, ends or is lost."""
    actor = Scripted(count=2)

    async def converse() -> None:
        client = EngineClient(in_process(actor), "worker")
        histories = {n: [list(range(n, n + 70))] for n in range(3)}
        for episode, which, new, then in plan:
            past = histories[episode]
            prompt = (*past[which % len(past)], *new)
            got = await client.complete((prompt, PARAMS), str(episode))
            assert actor.asked[-1][0] == list(prompt)
            assert np.array_equal(got.routes, routes_of([*prompt, *got.token_ids][:-1]))
            past += [[*prompt, *got.token_ids]]
            if then == "lose":
                actor._tokens = KeptTokens()
            elif then == "end":
                client.end(str(episode))
        client.close()

    asyncio.run(converse())


def test_tokens_that_are_not_those_of_the_hash_are_refused():
    kept, row = KeptTokens(), TokenRow()
    row.append(np.arange(100))

    from k3rl.actors.conversations import Conversation, turn_of

    mine = Conversation(0)
    ids = np.arange(100, dtype=np.int32)
    kept.begin("c", turn_of(mine, mine, ids, (), PARAMS))
    mine.answered(ids, (), PARAMS, Completion((5,), (0.0,), StopReason.STOP, 0, 0))
    more = np.append(ids, [5, 6]).astype(np.int32)
    with pytest.raises(SessionLost, match="the first 101 tokens"):  # the answer never came here
        kept.begin("c", turn_of(mine, mine, more, (), PARAMS))
    kept.answered("c", 0, 1, Completion((4,), (0.0,), StopReason.STOP, 0, 0))
    with pytest.raises(SessionLost):  # another answer did
        kept.begin("c", turn_of(mine, mine, more, (), PARAMS))
    assert pickle.loads(pickle.dumps(SessionLost("x"))).args == ("x",)


@given(st.lists(st.tuples(st.integers(0, 30), st.lists(st.integers(0, 3), max_size=90)), max_size=8))
def test_a_row_has_the_hash_of_its_ids_however_it_grew(plan):
    row, ids = TokenRow(), []
    for cut, new in plan:
        length = max(len(ids) - cut, 0)
        row.cut(length)
        row.append(np.array(new, np.int32))
        ids = [*ids[:length], *new]
        fresh = TokenRow()
        fresh.append(np.array(ids, np.int32))
        assert row.ids.tolist() == ids
        for asked in (len(ids), len(ids) // 2):
            assert row.digest(asked) == fresh.digest(asked)

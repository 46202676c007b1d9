"""Where episodes of a worker are: beside their conversations, and elsewhere when rows stand idle there."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3rl.actors.engine_places import EnginePlaces, home_engines


@given(engines=st.integers(1, 40), workers=st.integers(1, 40))
def test_every_engine_is_of_somebody_and_every_worker_has_one(engines, workers):
    shares = [home_engines(engines, worker, workers) for worker in range(workers)]
    assert {number for share in shares for number in share} == set(range(engines))
    assert all(shares)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_group_begins_on_one_engine_and_groups_spread():
    places = EnginePlaces([1, 3], 4)
    assert [places.begin(group).engine for group in "aabbc"] == [1, 1, 3, 3, 1]


def test_a_full_engine_gives_a_conversation_to_one_that_is_idle_and_to_no_other():
    places = EnginePlaces([0], 3, rows=4)
    episodes = [places.begin(f"g{number}") for number in range(6)]
    for place in episodes[:4]:
        assert not places.ask(place)
    places.told(1, 3, 0)  # of another worker: more than half of the rows
    places.told(2, 1, 0)
    assert places.ask(episodes[4])
    assert episodes[4].engine == 2
    assert not places.ask(episodes[5])  # 2 of 4 rows there and 3 here: the next one would take more than half
    assert (places.moved, episodes[5].engine) == (1, 0)


def test_episodes_in_lockstep_and_without_known_rows_stay():
    for places, stay in ((EnginePlaces([0], 2, rows=1), True), (EnginePlaces([0], 2), False)):
        episodes = [places.begin("g") for _ in range(9)]
        assert not any(places.ask(place, stay=stay) for place in episodes)


@given(st.data(), st.integers(1, 5), st.integers(1, 8))
def test_whatever_comes_no_request_is_lost_and_only_full_engines_give_to_idle_ones(data, engines, rows):
    home = data.draw(st.lists(st.integers(0, engines - 1), min_size=1, max_size=engines, unique=True))
    places, live, asked = EnginePlaces(home, engines, rows), [], []
    for _ in range(data.draw(st.integers(1, 60))):
        what = data.draw(st.sampled_from(("begin", "ask", "answer", "told", "leave")))
        quiet = [place for place in live if all(place is not other for other, _ in asked)]
        if what == "begin":
            live.append(places.begin(data.draw(st.sampled_from("abc"))))
            assert live[-1].engine in home
        elif what == "ask" and quiet:
            place = data.draw(st.sampled_from(quiet))
            before, loads = place.engine, [places.load(number) for number in range(engines)]
            if places.ask(place):
                assert loads[before] >= rows
                assert 2 * (loads[place.engine] + 1) <= rows
            else:
                assert place.engine == before
            asked.append((place, place.engine))
        elif what == "answer" and asked:
            _, engine = asked.pop()
            places.answered(engine)
        elif what == "told":
            number = data.draw(st.integers(0, engines - 1))
            places.told(number, data.draw(st.integers(0, 2 * rows)), places.asking(number))
        elif what == "leave" and quiet:
            live = [place for place in live if place is not quiet[0]]
            places.leave(quiet[0])
        for number in range(engines):
            assert places.asking(number) == sum(engine == number for _, engine in asked)
            assert places.load(number) >= places.asking(number)
    for place in live:
        places.leave(place)
    assert sum(places._episodes.values()) == 0
    assert places._group == {}


async def until(condition) -> None:
    """Returns when something holds."""
    async with asyncio.timeout(100):  # of a busy machine; three seconds on a quiet one
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("lockstep", [False, True])
def test_a_worker_whose_engine_is_full_has_another_one_continue(tmp_path, in_process, lockstep):
    """Two real engines of two rows each, and a worker all of whose episodes begin on the first one."""
    from k3rl.actors import ClusterConfig, EnvironmentWorker, EpisodeJob, TaskRef
    from k3rl.checkpoint import save_checkpoint
    from k3rl.model import K3Config, K3ForCausalLM
    from k3rl.pipelines import EnvConfig
    from k3rl.tokens import Tokenizer
    from k3rl.types import SamplingParams, Scored
    from tests.actors.test_episode_sessions import MODULE, TURNS, Speaking

    model = K3ForCausalLM(K3Config.named("k3-nano").replace(num_experts=4))
    model.init_weights(0)
    save_checkpoint(model, tmp_path / "model", tokenizer=Tokenizer.builtin())
    (tmp_path / "talk.py").write_text(MODULE)

    async def run():
        actors = [Speaking(ClusterConfig(), number, max_running=2) for number in range(2)]
        for actor in actors:
            await actor.load(str(tmp_path / "model"))
        engines = [in_process(actor) for actor in actors]
        worker = EnvironmentWorker(EnvConfig(name=f"{tmp_path}/talk.py"), *engines, home=[0], rows=2)
        await worker.open("test")
        jobs = [EpisodeJob(f"e{n}", f"g{n}", TaskRef("train", n, 0), n) for n in range(5)]
        sampling = SamplingParams(max_tokens=30, return_routes=True)
        await worker.start([(job, 0) for job in jobs], sampling, lockstep)
        await until(lambda: len(worker._ended) == len(jobs))
        episodes = [episode for _, episode, _ in worker._ended]
        # What conversations had is let go where they were before, too.
        await until(lambda: not any(actor.engine.batch.prefix.num_sessions for actor in actors))
        await worker.stop()
        return episodes, [await actor.take_counts() for actor in actors]

    episodes, counts = asyncio.run(run())
    assert [len(episode.branches) for episode in episodes] == [1] * 5, [episode.score for episode in episodes]
    assert all(len(episode.branches[0].turns) == TURNS for episode in episodes)
    assert not any(isinstance(episode.score, Scored) for episode in episodes)
    for episode in episodes:
        turns = episode.branches[0].turns
        routed = len(turns[-1].prompt_ids) + len(turns[-1].sampled_ids) - 1
        assert sum(len(turn.routes) for turn in turns) == routed, "those of each token once, whoever computed it"
    moved = [one["moved_conversations"] for one in counts]
    if lockstep:
        assert moved == [0, 0]
        assert counts[1]["sampled_tokens"] == 0
    else:
        assert moved[1] > 0
        assert counts[1]["sampled_tokens"] > 0

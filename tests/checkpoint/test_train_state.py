"""A state is read back as it was written, by any number of ranks, or refused by the name of the file that is wrong."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import k3rl.checkpoint.state_writer as state_writer
import k3rl.checkpoint.train_state as train_state
from k3rl.checkpoint.state_writer import StateWriter
from k3rl.checkpoint.train_state import (
    Rows,
    TrainState,
    TrainStateError,
    chosen_train_state,
    clear_unfinished,
    commit,
    go_back_to,
    latest_train_state,
    prune_train_states,
    write_shard,
)

KINDS = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool)


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """One tensor of each kind, a scalar and an empty one."""
    made = torch.Generator().manual_seed(seed)
    found = {
        f"layer.{kind}": torch.randint(0, 2, (5, 3), generator=made).to(kind) for kind in KINDS if kind != torch.float32
    }
    found["layer.weight"] = torch.randn(7, 4, generator=made)
    return found | {"steps": torch.tensor(seed), "nothing": torch.empty(0, 3)}


def save(directory: Path, owned: dict, *, ranks: int = 1, extra=None) -> None:
    """All of `owned` by rank 0, the others with nothing."""
    for rank in range(ranks):
        write_shard(directory, rank, owned if rank == 0 else {}, extra or {"rank": rank}, save_id="a")
    commit(directory, ranks, save_id="a", timeout_s=5)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


@given(st.data())
@settings(max_examples=15)
def test_any_split_over_ranks_is_read_back_whole_and_by_rows(tmp_path_factory, data):
    whole, ranks = tensors(), data.draw(st.integers(1, 4))
    owned: list[dict] = [{} for _ in range(ranks)]
    for name, value in whole.items():
        if value.dim() and len(value) > 1 and data.draw(st.booleans()):
            cut = data.draw(st.integers(1, len(value) - 1))
            for start, part in ((0, value[:cut]), (cut, value[cut:])):
                owned[data.draw(st.integers(0, ranks - 1))][name, start] = Rows(part, start, len(value))
        else:
            for rank in data.draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
                owned[rank][name, 0] = value
    folder = tmp_path_factory.mktemp("split") / "step_1"
    for rank, part in enumerate(owned):
        names: dict = {}
        for (name, start), value in part.items():
            # a rank that owns both parts of a tensor owns it whole
            names[name] = whole[name] if (name, 0) in part and (name, start) in part and start else value
        write_shard(folder, rank, names, {"rank": rank}, save_id="x")
    commit(folder, ranks, save_id="x", timeout_s=5)
    state = TrainState(folder)
    assert same(state.tensors(), whole)
    assert [extra["rank"] for extra in state.rank_extras] == list(range(ranks))
    start = data.draw(st.integers(0, 6))
    stop = data.draw(st.integers(start + 1, 7))
    assert torch.equal(state.rows("layer.weight", start, stop), whole["layer.weight"][start:stop])


@given(st.data())
@settings(max_examples=40)
def test_damage_is_refused_by_name_and_never_loaded(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("damage") / "step_1"
    whole = tensors()
    save(folder, whole, ranks=2)
    digest = (folder / "manifest.sha256").read_bytes()
    file = folder / data.draw(st.sampled_from(sorted(path.name for path in folder.iterdir())))
    content = bytearray(file.read_bytes())
    how = data.draw(st.sampled_from(["flip", "truncate", "extend", "remove"]))
    if how == "flip":
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    elif how == "truncate":
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    elif how == "extend":
        content += b" "
    file.unlink()
    if how != "remove":
        file.write_bytes(content)
    if file.name == "manifest.sha256" and file.exists() and file.read_bytes().split() == digest.split():
        assert same(TrainState(folder).tensors(), whole)  # blanks around a hash say nothing
        return
    with pytest.raises(TrainStateError, match=re.escape(file.stem)) as caught:
        TrainState(folder).tensors()
    assert "--resume-from previous" in str(caught.value)


def test_only_the_shards_with_the_wanted_names_are_read(tmp_path):
    folder = tmp_path / "step_1"
    write_shard(folder, 0, {"mine": torch.ones(3)}, {}, save_id="a")
    write_shard(folder, 1, {"theirs": torch.zeros(3)}, {}, save_id="a")
    commit(folder, 2, save_id="a", timeout_s=5)
    state = TrainState(folder)
    shard = folder / "rank_00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\1")  # after the look at sizes and headers
    assert torch.equal(state.tensor("mine"), torch.ones(3))
    with pytest.raises(TrainStateError, match=r"rank_00001\.safetensors.*theirs"):
        state.tensor("theirs")


def test_latest_moves_only_when_every_rank_has_written(tmp_path):
    save(tmp_path / "step_1", tensors())
    write_shard(tmp_path / "step_2", 0, tensors(), {}, save_id="b")
    with pytest.raises(TrainStateError, match="rank_00001 wrote no shard within"):
        commit(tmp_path / "step_2", 2, save_id="b", timeout_s=0.1)
    assert latest_train_state(tmp_path) == tmp_path / "step_1"
    assert not (tmp_path / "step_2").exists()
    clear_unfinished(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_1"]


def test_a_rank_that_cannot_write_is_named_before_the_time_is_up(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    first, second = (StateWriter(rank, 2, timeout_s=60) for rank in range(2))
    first.save(tmp_path / "step_1", {"w": torch.ones(1)}, {}, save_id="a")
    began = time.monotonic()
    while not list(tmp_path.glob(".step_1.*/rank_00000.json")):
        assert time.monotonic() - began < 30
        time.sleep(0.01)
    with monkeypatch.context() as patch:
        patch.setattr(train_state, "save_file", full)
        second.save(tmp_path / "step_1", {}, {}, save_id="a")
        for writer, who in ((second, ""), (first, "rank_00001 could not write its shard .*")):
            with pytest.raises(TrainStateError, match=rf"{who}No space left on device"):
                writer.wait()
    assert time.monotonic() - began < 30
    assert latest_train_state(tmp_path) is None


def test_ranks_that_drifted_apart_or_leave_a_gap_are_refused(tmp_path):
    for rank in range(2):
        write_shard(tmp_path / "step_1", rank, {"w": torch.full((2,), float(rank))}, {}, save_id="a")
    with pytest.raises(TrainStateError, match="ranks 0 and 1 hold different values of w"):
        commit(tmp_path / "step_1", 2, save_id="a", timeout_s=5)
    write_shard(tmp_path / "step_2", 0, {"w": Rows(torch.ones(2), 0, 5)}, {}, save_id="a")
    with pytest.raises(TrainStateError, match="no rank owns w from row 2 on"):
        commit(tmp_path / "step_2", 1, save_id="a", timeout_s=5)
    assert latest_train_state(tmp_path) is None


def test_the_previous_state_is_used_only_when_asked_for(tmp_path):
    for step in (1, 2, 10):
        save(tmp_path / f"step_{step}", tensors(step), extra={"step": step})
    assert chosen_train_state(tmp_path, "latest") == tmp_path / "step_10"
    assert chosen_train_state(tmp_path, "previous") == tmp_path / "step_2"
    assert chosen_train_state(tmp_path, "step_1") == tmp_path / "step_1"
    with pytest.raises(TrainStateError, match="there is step_1, step_2, step_10"):
        chosen_train_state(tmp_path, "step_7")
    shutil.rmtree(tmp_path / "step_10")
    with pytest.raises(TrainStateError, match="names step_10, which is not there"):
        latest_train_state(tmp_path)
    assert chosen_train_state(tmp_path, "previous") == tmp_path / "step_2"


@pytest.mark.parametrize("text", [b"", b"step_x", b"../step_1", b"/etc", b"\xff\xfe", None])
def test_a_pointer_that_names_no_state_is_not_taken_for_a_fresh_run(tmp_path, text):
    for step in (1, 2):
        save(tmp_path / f"step_{step}", tensors(step))
    (tmp_path / "latest").write_bytes(text or b"") if text is not None else (tmp_path / "latest").unlink()
    for wanted in ("latest", "previous"):
        with pytest.raises(TrainStateError, match=r"latest .*step_1, step_2: go on from one by its name"):
            chosen_train_state(tmp_path, wanted)
    with pytest.raises(TrainStateError, match="latest"):
        prune_train_states(tmp_path, 1)
    assert chosen_train_state(tmp_path, "step_2") == tmp_path / "step_2"


def test_a_first_state_that_nothing_points_at_yet_is_the_latest(tmp_path):
    assert chosen_train_state(tmp_path, "latest") is None
    save(tmp_path / "step_1", tensors())
    (tmp_path / "latest").unlink()  # a kill between the two
    assert chosen_train_state(tmp_path, "latest") == tmp_path / "step_1"
    TrainState(tmp_path / "step_1").verify()


def test_pruning_keeps_the_newest_states_up_to_the_latest(tmp_path):
    for step in (1, 2, 10, 3):  # a run that went back to step 2 and saved again at 3
        save(tmp_path / f"step_{step}", tensors(step))
    prune_train_states(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_10", "step_2", "step_3"]


def test_states_of_a_line_that_was_left_are_no_states_of_the_new_one(tmp_path):
    for step in (2, 4, 6):
        save(tmp_path / f"step_{step}", tensors(step))
        (tmp_path / f"in_flight-step_{step}-ab").mkdir()
    assert go_back_to(tmp_path / "step_2") == ["step_4", "step_6"]
    for step in (3, 5):
        save(tmp_path / f"step_{step}", tensors(step))
        prune_train_states(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_3", "step_5"]
    assert chosen_train_state(tmp_path, "previous") == tmp_path / "step_3"
    with pytest.raises(TrainStateError, match="no state 'step_4'"):
        chosen_train_state(tmp_path, "step_4")
    aside = tmp_path / "abandoned"
    wanted = ["in_flight-step_4-ab", "in_flight-step_6-ab", "step_4", "step_6"]
    assert sorted(path.name for path in aside.iterdir()) == wanted
    TrainState(aside / "step_6").verify()
    save(tmp_path / "step_7", tensors(7))  # further than the line that was left
    prune_train_states(tmp_path, 2)
    assert not aside.exists()


def test_another_schema_is_refused(tmp_path):
    save(tmp_path / "step_1", tensors())
    text = json.dumps(json.loads((tmp_path / "step_1" / "manifest.json").read_text()) | {"schema_version": 3})
    (tmp_path / "step_1" / "manifest.json").write_text(text)
    (tmp_path / "step_1" / "manifest.sha256").write_text(hashlib.sha256(text.encode()).hexdigest())
    with pytest.raises(TrainStateError, match="schema 3"):
        TrainState(tmp_path / "step_1")


# ---------------------------------------------------------------------------------------------------- in the background


def test_training_goes_on_while_a_copy_is_written_and_one_is_written_at_a_time(tmp_path, monkeypatch):
    gate, inside = threading.Event(), []
    real = state_writer.write_shard

    def slow(*args, **words):
        inside.append(args[0].name)
        gate.wait(30)
        real(*args, **words)

    monkeypatch.setattr(state_writer, "write_shard", slow)
    writer, live = StateWriter(timeout_s=30), torch.zeros(4)
    writer.save(tmp_path / "step_1", {"w": live}, {}, save_id="a")
    live += 1  # the next step changes what was handed over
    writer.check()
    threading.Timer(0.2, gate.set).start()
    writer.save(tmp_path / "step_2", {"w": live}, {}, save_id="b")
    assert latest_train_state(tmp_path) == tmp_path / "step_1"  # the second save waited for the first
    writer.wait()
    assert inside == ["step_1", "step_2"]
    assert torch.equal(TrainState(tmp_path / "step_1").tensor("w"), torch.zeros(4))
    assert torch.equal(TrainState(tmp_path / "step_2").tensor("w"), torch.ones(4))


def test_an_error_of_the_writer_comes_up_once_at_the_next_step(tmp_path):
    (tmp_path / "file").write_text("in the way")
    writer = StateWriter()
    writer.save(tmp_path / "file" / "step_1", {"w": torch.ones(1)}, {}, save_id="a")
    with pytest.raises(TrainStateError, match="could not be saved"):
        writer.wait()
    writer.save(tmp_path / "step_2", {"w": torch.ones(1)}, {}, save_id="b")
    writer.wait()
    assert latest_train_state(tmp_path) == tmp_path / "step_2"


def test_the_random_generator_is_part_of_a_state(tmp_path):
    class Nothing:
        def wanted_state(self):
            return ()

        def load_state_tensors(self, state):
            assert state == {}

    writer = StateWriter()
    with torch.random.fork_rng():
        torch.manual_seed(5)
        writer.save(tmp_path / "step_1", {}, {"step": 1}, save_id="a")
        wanted = torch.rand(3)
        writer.wait()
        assert state_writer.restore(Nothing(), TrainState(tmp_path / "step_1")) == {"step": 1}
        assert torch.equal(torch.rand(3), wanted)


def test_a_disk_without_room_is_said_before_anything_is_written(tmp_path, monkeypatch):
    usage = SimpleNamespace(total=100, used=90, free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage)
    writer = StateWriter(timeout_s=30)
    with pytest.raises(TrainStateError, match=r"needs 0.0 MiB and the disk of .* has 0.0 MiB free.*--resume"):
        writer.save(tmp_path / "step_1", {"a": torch.zeros(4)}, {}, save_id="x")
    assert not (tmp_path / "step_1").exists()

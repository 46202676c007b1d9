"""Directories replaced at once, also where the file system cannot exchange names."""

from __future__ import annotations

from pathlib import Path

import pytest

from k3rl.checkpoint import replace


def written(path: Path, text: str) -> Path:
    scratch = replace.scratch_beside(path)
    (scratch / "file").write_text(text)
    return scratch


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two-renames"])
def test_the_new_directory_takes_the_place_of_the_old(tmp_path, monkeypatch, exchange) -> None:
    if not exchange:
        monkeypatch.setattr(replace, "exchange", lambda first, second: False)
    path = tmp_path / "deep" / "target"
    for text in ("one", "two"):
        replace.put_in_place(written(path, text), path)
        assert (path / "file").read_text() == text
        assert [p.name for p in path.parent.iterdir()] == ["target"]


def test_a_kill_between_the_two_renames_is_recovered(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(replace, "exchange", lambda first, second: False)
    path = tmp_path / "target"
    replace.put_in_place(written(path, "old"), path)
    scratch = written(path, "new")
    renames = []

    def rename(source: Path, target: Path) -> None:
        if renames:
            raise KeyboardInterrupt
        renames.append(source)
        Path(source).replace(target)

    with monkeypatch.context() as patch:
        patch.setattr(replace.os, "rename", rename)
        with pytest.raises(KeyboardInterrupt):
            replace.put_in_place(scratch, path)
    assert not path.exists()
    replace.recover(path)
    assert (path / "file").read_text() == "old"


def test_what_a_killed_writer_left_is_cleared(tmp_path) -> None:
    path = tmp_path / "target"
    written(path, "half")
    scratch = replace.scratch_beside(path)
    assert not list(scratch.iterdir())


def test_a_waiting_directory_beside_a_whole_one_is_removed(tmp_path) -> None:
    path = tmp_path / "target"
    replace.put_in_place(written(path, "new"), path)
    (tmp_path / ".target.previous").mkdir()
    replace.recover(path)
    assert [p.name for p in tmp_path.iterdir()] == ["target"]


def test_a_directory_is_written_by_one_at_a_time(tmp_path) -> None:
    path = tmp_path / "deep" / "target"
    with replace.locked(path), pytest.raises(replace.BusyDirectory, match="another process writes"):
        replace.locked(path).__enter__()
    (path.parent / ".target.lock").touch()  # of a process that was killed
    with replace.locked(path):
        replace.put_in_place(written(path, "one"), path)
    assert [p.name for p in path.parent.iterdir()] == ["target"]


def test_who_reads_leaves_a_directory_alone_that_is_about_to_be_replaced(tmp_path) -> None:
    path = tmp_path / "target"
    with replace.locked(path):
        written(path, "old").rename(tmp_path / ".target.previous")
        replace.recover(path)
        assert not path.exists()
    replace.recover(path)
    assert (path / "file").read_text() == "old"

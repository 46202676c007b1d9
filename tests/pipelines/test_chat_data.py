"""What SFT has nothing to train on is said before anything is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from k3rl.config import ConfigError, MissingResource
from k3rl.data.sft import DatasetError, load_chat_dataset
from k3rl.pipelines import run
from k3rl.pipelines.chat_data import ChatBatches
from k3rl.pipelines.configs import EnvConfig, SFTConfig
from k3rl.run import RunOptions
from k3rl.tokens import Tokenizer

OWN = """
from k3rl.envs import Env, Environment, Rubric, reward


class Tasks:
    splits = ("train",)

    def length(self, split, *, level=None, family=None):
        return None


@reward()
def right(answer):
    return answer == "1"


def environment():
    return Environment(name="own", description="", source=Tasks(), make_env=Env, grader=Rubric.of(right))
"""


@pytest.mark.parametrize(
    ("chosen", "error", "said"),
    [
        ({"env": EnvConfig(name="own.py")}, ConfigError, "own.py has no demonstrations; .*--data and --heldout-data"),
        ({"data": "none.jsonl", "heldout_data": "own.py"}, MissingResource, "there is no file none.jsonl"),
    ],
)
def test_nothing_to_train_on_is_said_before_a_run_begins(tmp_path: Path, monkeypatch, chosen, error, said):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    with pytest.raises(error, match=said):
        run("sft", SFTConfig(**chosen), RunOptions(out=tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_bad_row_is_a_fault_of_the_users_file():
    assert DatasetError("chats.jsonl", 3, "no messages").exit_code == 2


def test_a_run_does_not_go_on_with_another_text_in_as_many_rows(tmp_path: Path):
    def batches(word: str) -> ChatBatches:
        row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": word}]}
        (tmp_path / "chats.jsonl").write_text((json.dumps(row) + "\n") * 4)
        rows = load_chat_dataset(tmp_path / "chats.jsonl", cache_dir=tmp_path / "cache")
        return ChatBatches(rows, Tokenizer.builtin(), 2, 0)

    cursor = batches("one").cursor(3)
    batches("one").check(cursor, 3)
    with pytest.raises(ConfigError, match=r"content was .* and is"):
        batches("two").check(cursor, 3)
    batches("two").check({key: value for key, value in cursor.items() if key != "content"}, 3)  # of an older k3rl

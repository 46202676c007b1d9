"""What SFT has nothing to train on is said before anything is started."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
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
        return ChatBatches(rows, Tokenizer.builtin(), 2, SFTConfig())

    cursor = batches("one").cursor(3)
    batches("one").check(cursor, 3)
    with pytest.raises(ConfigError, match=r"content was .* and is"):
        batches("two").check(cursor, 3)
    batches("two").check({key: value for key, value in cursor.items() if key != "content"}, 3)  # of an older k3rl


def thoughtful(folder: Path, name: str, **columns) -> ChatBatches:
    said = {"role": "assistant", "reasoning_content": "hmm", "content": "b"}
    plain = {"role": "assistant", "content": "b"}
    rows = [{"messages": [{"role": "user", "content": "a"}, message], **columns} for message in (said, plain)]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_chat_dataset(folder / f"{name}.jsonl", cache_dir=folder / "cache")


def test_reasoning_is_trained_and_conversations_without_any_have_no_think_channel(tmp_path: Path):
    rows, tokenizer = thoughtful(tmp_path, "chats"), Tokenizer.builtin()

    def trained(**config) -> list[str]:
        packed = ChatBatches(rows, tokenizer, 2, SFTConfig(**config)).pack(np.arange(2))
        ids = np.split(np.where(packed.loss_mask, packed.input_ids, -1), packed.cu_seqlens[1:-1])
        return [tokenizer.decode([int(i) for i in own if i >= 0]) for own in ids]

    thought, plain = trained()
    assert "hmm" in thought
    assert "think" in thought
    assert "think" not in plain
    assert all("think" in text for text in trained(thinking="on"))
    assert not any("think" in text or "hmm" in text for text in trained(thinking="off"))


def test_a_row_says_its_own_effort_before_the_configuration_does(tmp_path: Path):
    tokenizer = Tokenizer.builtin()

    def prompts(rows) -> list[str]:
        packed = ChatBatches(rows, tokenizer, 2, SFTConfig(thinking_effort="high")).pack(np.arange(2))
        return [tokenizer.decode(own.tolist()) for own in np.split(packed.input_ids, packed.cu_seqlens[1:-1])]

    thought, plain = prompts(thoughtful(tmp_path, "silent"))
    assert "thinking_effort=high" in thought
    assert "thinking_effort" not in plain  # which does not think
    assert "thinking_effort=low" in prompts(thoughtful(tmp_path, "own", thinking_effort="low"))[0]

"""What SFT has nothing to train on is said before anything is started."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from k3rl.config import ConfigError, MissingResource
from k3rl.data.sft import DatasetError, load_chat_dataset
from k3rl.pipelines import run
from k3rl.pipelines.chat_data import ChatBatches, mended_rows
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


CASES = Path(__file__).parents[1] / "cases" / "chat"


@pytest.mark.parametrize(
    ("name", "config", "said"),
    [
        ("late_bad_row.jsonl", {}, "row 33: the conversation has no assistant turn"),
        ("text_key.jsonl", {}, "(?s)row 0: message 0 has the key 'text'.*'content'.*row 3"),
        ("surrogate.jsonl", {}, "row 0: message 0, content: character 10 is the lone surrogate"),
        ("good.ndjson", {"trainer": {"micro_batch_tokens": 40}}, "row 0: has 41 tokens, and 40 fit: trainer.micro"),
        ("good.ndjson", {"thinking": "on", "trainer": {"micro_batch_tokens": 41}}, "row 0: has 47 tokens, and 41 fit"),
    ],
)
def test_every_row_is_looked_at_before_a_run_begins(tmp_path: Path, name, config, said):
    good = str(CASES / "good.jsonl.gz")
    for files in ({"data": str(CASES / name), "heldout_data": good}, {"data": good, "heldout_data": str(CASES / name)}):
        chosen = SFTConfig.model_validate({**config, **files})
        with pytest.raises(DatasetError, match=said):
            run("sft", chosen, RunOptions(out=tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_mended_row_goes_on_and_another_file_does_not(tmp_path: Path):
    def dataset(rows):
        texts = [
            {"messages": [{"role": "user", "content": row}, {"role": "assistant", "content": "x"}]} for row in rows
        ]
        (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
        return load_chat_dataset(tmp_path / "d.jsonl", cache_dir=tmp_path / "cache")

    kept, names = tmp_path / "d.digests.npy", [str(n) for n in range(20)]
    assert mended_rows(kept, dataset(names)) == 0
    assert mended_rows(kept, dataset(names)) == 0
    assert mended_rows(kept, dataset(["other"])) is None
    cursor = ChatBatches(dataset(names), Tokenizer.builtin(), 4, SFTConfig()).cursor(7)
    shorter = dataset(names[:-1])
    assert mended_rows(kept, shorter) == 1
    ChatBatches(shorter, Tokenizer.builtin(), 4, SFTConfig(), mended=True).check(cursor, 7)
    with pytest.raises(ConfigError, match="seed was 0 and is 1"):
        ChatBatches(shorter, Tokenizer.builtin(), 4, SFTConfig(seed=1), mended=True).check(cursor, 7)
    with pytest.raises(ConfigError, match="content was"):
        ChatBatches(shorter, Tokenizer.builtin(), 4, SFTConfig()).check(cursor, 7)


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

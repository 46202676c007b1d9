"""A checkpoint's tokenizer: it comes along with an export, and one that is not the model's is refused with its file."""

from __future__ import annotations

import json
import shutil

import pytest

from k3rl.checkpoint import CheckpointError, copy_checkpoint, load_checkpoint, load_tokenizer, save_checkpoint
from k3rl.cli import main
from k3rl.config import ConfigError
from k3rl.data import encode_example
from k3rl.model import K3Config
from k3rl.pipelines.chat_data import ChatBatches
from k3rl.pipelines.configs import DistillConfig, ModelConfig
from k3rl.pipelines.presets import sft
from k3rl.pipelines.start import check_teachers, kept_tokenizer, tokenizer_of
from k3rl.tokens import Tokenizer, chat_format
from k3rl.types import Message
from tests.model import kimi_hub


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    return kimi_hub.write_checkpoint(tmp_path_factory.mktemp("hub") / "kimi")


@pytest.fixture
def copied(hub, tmp_path):
    return shutil.copytree(hub, tmp_path / "kimi")


def edit(file, **fields):
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_an_export_has_template_tokenizer_and_remote_code_and_the_same_configuration(hub, tmp_path):
    save_checkpoint(load_checkpoint(hub), tmp_path / "out", tokenizer=load_tokenizer(hub))
    copy_checkpoint(hub, tmp_path / "copy")
    for folder in (tmp_path / "out", tmp_path / "copy"):
        for name in (*kimi_hub.files(), "config.json"):
            assert (folder / name).read_bytes() == (hub / name).read_bytes(), name


def test_transformers_opens_an_export_and_renders_the_same_ids(hub, tmp_path):
    transformers = pytest.importorskip("transformers")
    save_checkpoint(load_checkpoint(hub), tmp_path / "out", tokenizer=load_tokenizer(hub))
    assert type(transformers.AutoConfig.from_pretrained(tmp_path / "out")).__name__ == "KimiLinearConfig"
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    said = [{"role": "user", "content": "add 2 and 3"}, {"role": "assistant", "content": "5"}]
    mine = load_tokenizer(tmp_path / "out")
    ids = theirs.apply_chat_template([*said, said[0]], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert ids == mine.encode_segments(chat_format(mine).render([*said, said[0]]))


@pytest.mark.parametrize("name", ["kimi-linear-nano", "kimi-linear-small", "k3-nano"])
def test_fresh_weights_speak_the_form_of_their_model(name):
    tokenizer = tokenizer_of(name)
    config = K3Config.named(name)
    assert tokenizer.form == ("k2" if config.flat else "xtml")
    assert tokenizer.vocab_size == config.vocab_size
    ids = (config.bos_token_id, config.eos_token_id, config.pad_token_id)
    assert ids == (tokenizer.special("bos"), chat_format(tokenizer).stop_id, tokenizer.special("pad"))


def _smaller(folder):
    edit(folder / "config.json", vocab_size=700)


def _other_end(folder):
    edit(folder / "config.json", eos_token_id=503)


def _k3s(folder):
    for name in ("tiktoken.model", "tokenizer_config.json"):
        (folder / name).unlink()
    Tokenizer.builtin().save(folder)


def _renamed(folder):
    said = json.loads((folder / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    said["700"] = {"content": "<|im_end|>"}
    edit(folder / "tokenizer_config.json", added_tokens_decoder=said)


def _torn(folder):
    (folder / "tiktoken.model").write_bytes((folder / "tiktoken.model").read_bytes()[:-9])


def _foreign_template(folder):
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")


BAD = {
    "too many ids": (_smaller, "config.json", r"has a tokenizer of 755 ids, and .* says vocab_size 700"),
    "another end of turn": (_other_end, "config.json", r"eos_token_id 503, which is '<\|im_assistant\|>' to the"),
    "a tokenizer of K3": (_k3s, "config.json", r"bos_token_id 499, which is .* wanted '\[BOS\]', id 500"),
    "two tokenizers": (_renamed, "tokenizer_config.json", r"gives <\|im_end\|> the id 700, .* give 501"),
    "torn ranks": (_torn, "tiktoken.model", "wanted base64 token bytes and a rank"),
    "no ranks": (lambda folder: (folder / "tiktoken.model").unlink(), "", "holds no tokenizer; wanted exactly one of"),
    "another template": (_foreign_template, "chat_template.jinja", "does not render K2's chat form"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_tokenizer_that_is_not_the_models_is_one_message_and_exit_3(name, copied, capsys):
    change, file, why = BAD[name]
    change(copied)
    with pytest.raises(CheckpointError, match=why) as caught:
        load_tokenizer(copied)
    assert str(copied / file) in str(caught.value)
    assert main(["serve", str(copied)]) == 3
    said = capsys.readouterr().err
    assert str(caught.value) in said
    assert "Traceback" not in said


@pytest.mark.parametrize("command", ["sft", "eval"])
def test_a_run_with_the_wrong_tokenizer_ends_before_anything_is_started(command, copied, tmp_path, capsys):
    _smaller(copied)
    words = {
        "sft": ["sft", "--model.start", str(copied), "--out", str(tmp_path / "run")],
        "eval": ["eval", str(copied), "coding-lists"],
    }
    assert main(words[command]) == 3
    assert "says vocab_size 700" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["rl", "eval"])
def test_thinking_is_refused_where_the_form_has_no_channel_for_it(command, hub, tmp_path, capsys):
    words = {
        "rl": ["rl", "--model.start", str(hub), "--sampling.thinking", "--out", str(tmp_path / "run")],
        "eval": ["eval", str(hub), "coding-lists", "--thinking"],
    }
    assert main(words[command]) == 2
    assert "thinking is true, and the chat form of this model has no think channel" in capsys.readouterr().err


def test_a_run_goes_on_with_the_tokenizer_that_it_began_with(copied, tmp_path):
    kept = kept_tokenizer(tmp_path / "tokenizer", str(copied))
    again = kept_tokenizer(tmp_path / "tokenizer", str(copied))
    assert again.hash == kept.hash == Tokenizer.load(tmp_path / "tokenizer").hash
    with pytest.raises(ConfigError, match="the run began with another tokenizer than that of kimi-linear-nano"):
        kept_tokenizer(tmp_path / "tokenizer", "kimi-linear-nano")


def test_a_teacher_with_another_tokenizer_is_refused(hub, copied):
    lines = (copied / "tiktoken.model").read_bytes().splitlines()
    one, other = lines[-1].split(b" "), lines[-2].split(b" ")
    lines[-2:] = [one[0] + b" " + other[1], other[0] + b" " + one[1]]
    (copied / "tiktoken.model").write_bytes(b"\n".join(lines))
    config = DistillConfig(model=ModelConfig(start=str(hub)), teachers={"*": str(hub)})
    check_teachers(config)
    with pytest.raises(ConfigError, match=r"has another tokenizer \(hash \w{12}\) than the student"):
        check_teachers(config.replace(teachers={"*": str(copied)}))


def test_chat_data_are_those_of_the_checkpoints_form(hub):
    tokenizer = load_tokenizer(hub)
    ids, mask = encode_example([Message("user", "2"), Message("assistant", "4")], None, tokenizer, False)
    assert tokenizer.decode(ids[mask]) == "4<|im_end|>"
    assert (
        tokenizer.decode(ids)
        == "<|im_user|>user<|im_middle|>2<|im_end|><|im_assistant|>assistant<|im_middle|>4<|im_end|>"
    )


def test_a_row_that_the_form_cannot_say_is_named(hub, tmp_path):
    from k3rl.data import load_chat_dataset

    file = tmp_path / "rows.jsonl"
    said = [{"role": "user", "content": "2"}, {"role": "assistant", "content": "4", "reasoning_content": "2 + 2"}]
    file.write_text(json.dumps({"messages": said}) + "\n")
    rows = load_chat_dataset(file, cache_dir=tmp_path / "cache")
    with pytest.raises(ConfigError, match=r"rows.jsonl, row 0: message 1 has reasoning, and the K2 chat form"):
        ChatBatches(rows, load_tokenizer(hub), 1, sft()).batch(0)
    with pytest.raises(ConfigError, match=r"row 0: thinking was asked for, and the K2 chat form has no think channel"):
        ChatBatches(rows, load_tokenizer(hub), 1, sft().replace(thinking="on")).batch(0)

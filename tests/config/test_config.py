"""The configuration loader: what wins over what, and what a user's mistake is answered with."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import Field, ValidationError, model_validator

from k3rl.config import (
    ABSENT,
    NOT_HASHED,
    Config,
    ConfigError,
    as_config_error,
    config_hash,
    diff,
    dotted_names,
    flatten,
    from_tree,
    load,
    read_toml,
    split_words,
    to_tree,
)


class Adam(Config):
    type: Literal["adam"] = "adam"
    lr: float = 1e-3
    """Learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)


class Muon(Config):
    type: Literal["muon"] = "muon"
    lr: float = 0.02
    mu: float = 0.95


Optim = Annotated[Adam | Muon, Field(discriminator="type")]


class Env(Config):
    name: str
    ratio: int = 1
    args: dict[str, Any] = {}


class Trainer(Config):
    learning_rate: float = 0.1
    optim: Optim = Adam()
    compile: bool = True
    limit_s: float = math.inf


class RunConfig(Config):
    trainer: Trainer = Trainer()
    envs: tuple[Env, ...] = (Env(name="list"), Env(name="probe"))
    others: list[Optim] = []
    teacher: Path | None = None
    mode: Literal["sync", "async"] = "sync"
    group_size: int = Field(8, ge=1)
    batch_size: int = 32
    extra: Env | None = None
    name: str = Field("run", json_schema_extra=NOT_HASHED)

    @model_validator(mode="after")
    def _groups_fill_the_batch(self):
        if self.batch_size % self.group_size:
            raise ValueError(f"group_size {self.group_size} does not divide batch_size {self.batch_size}; use 16")
        return self


def loaded(line: str, base: RunConfig | None = None) -> RunConfig:
    files, flags = split_words(line.split())
    return load(base or RunConfig(), files=files, flags=flags)


def from_file(folder: Path, text: str, line: str = "", base: RunConfig | None = None) -> RunConfig:
    """The config of a file with this text, and of the words after it."""
    return load(base or RunConfig(), files=[toml(folder, text)], flags=split_words(line.split())[1])


def error_of(line: str, base: RunConfig | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        loaded(line, base)
    return caught.value


def toml(folder: Path, text: str, name: str = "a.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


# --- what wins over what ------------------------------------------------------------------------------------


def test_without_words_a_preset_comes_back_equal():
    preset = RunConfig(
        trainer=Trainer(optim=Muon(mu=0.5)), teacher=Path("a/b"), extra=Env(name="x", args={"k": [1, None]})
    )
    assert loaded("", preset) == preset


def test_files_win_over_the_preset_later_files_over_earlier_and_flags_over_all(tmp_path):
    first = toml(tmp_path, "group_size = 2\nbatch_size = 64\n[trainer]\nlearning_rate = 1\n", "first.toml")
    second = toml(tmp_path, "batch_size = 128\n", "second.toml")
    config = loaded(f"@ {first} --trainer.learning-rate 3e-6 @ {second}", RunConfig(group_size=4, mode="async"))
    assert (config.mode, config.group_size, config.batch_size) == ("async", 2, 128)
    assert config.trainer.learning_rate == 3e-6


def test_an_integer_in_a_file_serves_for_a_float_field(tmp_path):
    rate = from_file(tmp_path, "[trainer]\nlearning_rate = 1\n").trainer.learning_rate
    assert rate == 1.0
    assert isinstance(rate, float)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--trainer.compile", True),
        ("--trainer.compile true", True),
        ("--trainer.compile false", False),
        ("--no-trainer.compile", False),
        ("--trainer.compile=false", False),
    ],
)
def test_booleans_are_written_bare_negated_or_with_a_value(line, expected):
    assert loaded(line).trainer.compile is expected


@pytest.mark.parametrize("name", ["--group-size", "--group_size"])
def test_dashes_and_underscores_are_the_same(name):
    assert loaded(f"{name} 16").group_size == 16


def test_a_negative_number_is_a_value():
    assert loaded("--trainer.learning-rate -1e-3").trainer.learning_rate == -1e-3


def test_none_clears_an_optional_value():
    assert loaded("--teacher none", RunConfig(teacher=Path("x"))).teacher is None


def test_a_list_entry_is_changed_by_its_index():
    config = loaded("--envs.1.ratio 5")
    assert [env.ratio for env in config.envs] == [1, 5]
    assert [env.name for env in config.envs] == ["list", "probe"]


def test_the_index_behind_the_last_entry_adds_one():
    assert [env.name for env in loaded("--envs.2.name new --envs.2.ratio 3").envs] == ["list", "probe", "new"]


def test_a_list_in_a_file_replaces_the_whole_list(tmp_path):
    config = from_file(tmp_path, "[[envs]]\nname = 'only'\n", "--envs.0.ratio 7")
    assert config.envs == (Env(name="only", ratio=7),)


def test_a_list_can_be_written_as_json():
    assert loaded('--others [{"type":"muon","mu":0.5}]').others == [Muon(mu=0.5)]


def test_naming_another_variant_drops_the_fields_of_the_old_one():
    config = loaded("--trainer.optim.type adam", RunConfig(trainer=Trainer(optim=Muon(lr=7.0, mu=0.1))))
    assert config.trainer.optim == Adam()


@pytest.mark.parametrize(
    "line",
    ["--trainer.optim.type muon --trainer.optim.mu 0.5", "--trainer.optim.mu 0.5 --trainer.optim.type muon"],
)
def test_the_order_of_a_variant_and_its_fields_does_not_matter(line):
    assert loaded(line).trainer.optim == Muon(mu=0.5)


def test_naming_the_same_variant_keeps_its_fields():
    assert loaded("--trainer.optim.type adam", RunConfig(trainer=Trainer(optim=Adam(lr=7.0)))).trainer.optim.lr == 7.0


def test_a_variant_is_switched_by_a_file_too(tmp_path):
    base = RunConfig(trainer=Trainer(optim=Adam(lr=7.0)))
    assert from_file(tmp_path, "[trainer.optim]\ntype = 'muon'\n", base=base).trainer.optim == Muon()


def test_fields_below_an_absent_optional_config_create_it():
    assert loaded("--extra.name z --extra.ratio 2").extra == Env(name="z", ratio=2)


def test_free_mappings_keep_their_keys_and_take_json_values():
    config = loaded("--envs.0.args.max-length 5 --envs.0.args.word hello --envs.0.args.on true")
    assert config.envs[0].args == {"max-length": 5, "word": "hello", "on": True}


# --- what a mistake is answered with ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "key", "nearest"),
    [
        ("--trainer.learning-rat 1", "trainer.learning_rat", "trainer.learning_rate"),
        ("--lr 1", "lr", "trainer.optim.lr"),
        ("--envs.0.rato 3", "envs.0.rato", "envs.0.ratio"),
        ("--trainr.compile", "trainr", "trainer"),
        ("--mode asink", "mode", "async"),
        ("--trainer.optim.type mun", "trainer.optim.type", "muon"),
        ("--trainer.optim.mu 0.5", "trainer.optim.mu", "trainer.optim.type"),
        ("--group-size.x 3", "group_size.x", "group_size"),
    ],
)
def test_a_mistake_on_the_command_line_names_the_key_and_the_nearest_name(line, key, nearest):
    error = error_of(line)
    assert (error.key, error.nearest, error.exit_code) == (key, nearest, 2)
    assert key in str(error)
    assert nearest in str(error)


@pytest.mark.parametrize(
    ("text", "key", "nearest"),
    [
        ("[trainer]\nlearning_rat = 1\n", "trainer.learning_rat", "trainer.learning_rate"),
        ("[[envs]]\nname = 'a'\nrato = 3\n", "envs.0.rato", "envs.0.ratio"),
        ("[[others]]\ntype = 'muon'\nmuu = 3\n", "others.0.muu", "others.0.mu"),
        ("[trainer.optim]\nbeta = 3\n", "trainer.optim.beta", "trainer.optim.betas"),
    ],
)
def test_a_mistake_in_a_file_is_answered_alike_and_names_the_file(tmp_path, text, key, nearest):
    error = error_of(f"@ {toml(tmp_path, text)}")
    assert (error.key, error.nearest) == (key, nearest)
    assert "a.toml" in str(error)


@pytest.mark.parametrize(
    ("line", "got", "wanted"),
    [
        ("--trainer.learning-rate abc", "abc", "a valid number"),
        ("--group-size 2.5", "2.5", "a valid integer"),
        ("--group-size", True, "a valid integer"),
        ("--group-size true", "true", "a valid integer"),
        ("--trainer.compile maybe", "maybe", "a valid boolean"),
        ("--group-size 0", 0, "greater than or equal to 1"),
        ("--envs.5.name x", {"name": "x"}, "an entry from 0 to 2 (2 would add one)"),
        ("--envs.first.name x", "x", "the number of an entry of the list envs, from 0"),
    ],
)
def test_a_wrong_value_is_answered_with_what_was_got_and_what_is_wanted(line, got, wanted):
    error = error_of(line)
    assert (error.got, error.wanted) == (got, wanted)
    assert line.split()[0] in str(error) or error.key in str(error)


@pytest.mark.parametrize("text", ["group_size = '8'", "group_size = true", "group_size = 8.0", "mode = 1"])
def test_a_file_is_not_read_leniently(tmp_path, text):
    with pytest.raises(ConfigError):
        from_file(tmp_path, text)


def test_every_mistake_is_named_at_once(tmp_path):
    with pytest.raises(ConfigError) as caught:
        from_file(tmp_path, "group_size = true\nmode = 'asink'\n[trainer]\ncompil = true\n")
    error = caught.value
    assert all(key in str(error) for key in ("group_size", "mode", "trainer.compil"))


def test_an_impossible_combination_says_the_rule_and_the_fix():
    error = error_of("--batch-size 20")
    assert str(error) == "group_size 8 does not divide batch_size 20; use 16"


def test_a_union_without_its_tag_asks_for_it():
    error = error_of("--others.0.mu 0.5")
    assert "others.0.type set to one of 'adam', 'muon'" in error.wanted


def test_a_missing_value_is_asked_for():
    error = error_of("--extra.ratio 3")
    assert (error.key, error.got) == ("extra.name", None)


@pytest.mark.parametrize("line", ["stray", "@file.toml", "@", "@ --x", "-x 3"])
def test_words_outside_the_grammar_are_refused(line):
    with pytest.raises(ConfigError):
        split_words(line.split())


@pytest.mark.parametrize("text", ["group_size = ", "when = 2026-01-01"])
def test_a_file_that_is_not_toml_or_holds_a_date_is_refused(tmp_path, text):
    with pytest.raises(ConfigError, match=r"a\.toml"):
        read_toml(toml(tmp_path, text))


def test_a_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match="nowhere"):
        read_toml(tmp_path / "nowhere.toml")


def test_a_validation_error_raised_in_python_becomes_a_config_error():
    with pytest.raises(ValidationError) as caught:
        RunConfig(group_siz=3)
    error = as_config_error(caught.value, RunConfig)
    assert (error.key, error.nearest) == ("group_siz", "group_size")


def test_a_union_of_configs_without_a_discriminator_is_refused_when_it_is_written():
    with pytest.raises(TypeError, match="discriminator"):

        class Loose(Config):
            optim: Adam | Muon = Adam()


def test_configs_are_frozen_and_replace_validates():
    config = RunConfig()
    with pytest.raises(ValidationError):
        config.group_size = 4
    assert config.replace(group_size=4).group_size == 4
    with pytest.raises(ConfigError, match="does not divide"):
        config.replace(group_size=5)


# --- round trip, hash, difference ---------------------------------------------------------------------------

configs = st.builds(
    RunConfig,
    trainer=st.builds(
        Trainer,
        learning_rate=st.floats(allow_nan=False),
        optim=st.one_of(
            st.builds(Adam, lr=st.floats(allow_nan=False)), st.builds(Muon, mu=st.floats(0, 1, allow_nan=False))
        ),
        compile=st.booleans(),
    ),
    envs=st.lists(st.builds(Env, name=st.text(max_size=5), ratio=st.integers(-(2**63), 2**63 - 1)), max_size=3).map(
        tuple
    ),
    teacher=st.none() | st.just(Path("a/b")),
    mode=st.sampled_from(["sync", "async"]),
    name=st.text(max_size=5),
)


@given(configs)
def test_a_config_survives_json(config):
    assert from_tree(RunConfig, json.loads(json.dumps(to_tree(config)))) == config
    assert load(config) == config


@given(configs, configs)
@example(RunConfig(trainer=Trainer(learning_rate=0.0)), RunConfig(trainer=Trainer(learning_rate=-0.0)))
def test_equal_hash_means_equal_but_for_the_unhashed_fields(a, b):
    same = a.replace(name="") == b.replace(name="")
    assert (config_hash(a) == config_hash(b)) == same
    assert (not diff(a.replace(name=""), b.replace(name=""))) == same


def test_the_hash_is_stable_across_processes_and_ignores_marked_fields():
    import hashlib

    class Two(Config):
        b: float = 1.0
        a: tuple[int, ...] = (1, 2)
        out: str = Field("x", json_schema_extra=NOT_HASHED)

    assert config_hash(Two()) == hashlib.sha256(b'{"a":[1,2],"b":1.0}').hexdigest()
    assert config_hash(Two(out="y")) == config_hash(Two())
    assert config_hash(Two(b=2)) != config_hash(Two())


def test_diff_names_changed_and_missing_keys():
    assert diff(RunConfig(), RunConfig(group_size=4, trainer=Trainer(optim=Muon()))) == {
        "group_size": (8, 4),
        "trainer.optim.betas.0": (0.9, ABSENT),
        "trainer.optim.betas.1": (0.95, ABSENT),
        "trainer.optim.lr": (1e-3, 0.02),
        "trainer.optim.mu": (ABSENT, 0.95),
        "trainer.optim.type": ("adam", "muon"),
    }


def test_diff_tells_true_from_one():
    assert diff({"a": True}, {"a": 1}) == {"a": (True, 1)}


def test_flatten_keeps_empty_tables_and_lists():
    assert flatten({"a": {}, "b": [], "c": {"d": [1, {"e": None}]}}) == {"a": {}, "b": [], "c.d.0": 1, "c.d.1.e": None}


def test_the_schema_walk_reaches_lists_unions_and_optionals():
    names = set(dotted_names(RunConfig))
    assert {"envs.N.ratio", "others.N.mu", "trainer.optim.mu", "trainer.optim.betas", "extra.args"} <= names


def test_attribute_docstrings_are_the_help_of_the_json_schema():
    schema = RunConfig.model_json_schema()
    assert schema["$defs"]["Adam"]["properties"]["lr"]["description"] == "Learning rate."
    assert schema["additionalProperties"] is False


words = st.lists(st.text(st.characters(codec="ascii", categories=("L", "N", "P")), max_size=12), max_size=6)


def outcome(line: list[str]) -> RunConfig | ConfigError:
    """What a line gives; any other exception than ConfigError fails the test."""
    try:
        return load(RunConfig(), flags=split_words(line)[1])
    except ConfigError as error:
        return error


@given(words)
def test_whatever_is_typed_gives_a_config_or_a_config_error(line):
    result = outcome([word for word in line if word != "@"])
    assert isinstance(result, RunConfig) or str(result)


dotted = st.sampled_from(
    [*dotted_names(RunConfig), "envs.0.ratio", "envs.1.args.x", "trainer.optim.x", "others.0.type", "x"]
)
texts = st.sampled_from(["", "1", "-1", "true", "none", "abc", "[]", "{}", "[1]", '{"type":"muon"}', "muon", "1e400"])


@given(st.lists(st.tuples(dotted, texts), max_size=4))
def test_any_text_for_any_key_gives_a_config_or_a_config_error(pairs):
    result = outcome([f"--{name}={text}" for name, text in pairs])
    assert isinstance(result, RunConfig) or str(result)

"""What counts as a secret."""

import pytest

from k3rl.run.redact import is_secret_name, redact, redact_words


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "RAY_AUTH_TOKEN", "--hub.api-key", "--db.password", "AWS_SECRET_ACCESS_KEY"]
)
def test_names_of_secrets_are_known(name):
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name", ["--sampling.max-tokens", "--tokenizer", "TOKENIZERS_PARALLELISM", "--env.keys", "HOME"]
)
def test_names_that_only_look_like_secrets_are_not(name):
    assert not is_secret_name(name)


def test_values_of_secret_variables_are_hidden_longest_first():
    environ = {"A_TOKEN": "abcdefgh", "B_TOKEN": "abcdefgh-long", "C_TOKEN": "short"}
    assert redact("abcdefgh-long abcdefgh short", environ) == "*** *** short"


def test_a_secret_flag_without_a_value_does_not_hide_the_next_flag():
    assert redact_words(["--api-key", "--lr", "1"], {}) == ["--api-key", "--lr", "1"]

"""What SFT has nothing to train on is said before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from k3rl.config import ConfigError, MissingResource
from k3rl.data.sft import DatasetError
from k3rl.pipelines import run
from k3rl.pipelines.configs import EnvConfig, SFTConfig
from k3rl.run import RunOptions

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

"""Errors that one process raises arrive in another as what they were."""

from __future__ import annotations

import pickle

import pytest

from k3rl.config import ConfigError, K3Error, MissingResource
from k3rl.data.packing import SequenceTooLong
from k3rl.parallel import NonFiniteLoss, RankFailed, RanksDisagree


@pytest.mark.parametrize(
    "error",
    [
        K3Error("plain"),
        MissingResource("no GPU"),
        ConfigError("wrong", key="trainer.lr", got=3, wanted="a number", nearest="trainer.muon_lr"),
        RankFailed(1, "rank 1 died"),
        RanksDisagree(2, "batch", "rank 2 has another batch"),
        NonFiniteLoss("step 3"),
        SequenceTooLong(0, 9, 8, "a"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_keeps_its_type_message_and_attributes_between_processes(error) -> None:
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert back.__dict__ == error.__dict__

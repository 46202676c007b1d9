"""Chat data of SFT: the user's files or the environment's demonstrations, as packed batches."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from k3rl.config import ConfigError, MissingResource
from k3rl.data import (
    ChatDataset,
    ChatExample,
    DatasetError,
    TrainBatch,
    TrainSequence,
    chat_sequence,
    load_chat_dataset,
)
from k3rl.envs import make
from k3rl.pipelines.configs import SFTConfig
from k3rl.pipelines.session import Session
from k3rl.pipelines.start import tokenizer_of
from k3rl.run import write_atomic
from k3rl.tokens import ChatError, Tokenizer, TokenizerError, chat_format


class ChatBatches:
    """Batches of encoded examples, a new order each epoch. Batch `step` depends on the seed and the step only."""

    def __init__(self, rows: ChatDataset, tokenizer: Tokenizer, batch_size: int, config: SFTConfig) -> None:
        """config: for the seed, and for what is thought."""
        self._rows = rows
        self._thinking, self._effort = config.thinking, config.thinking_effort
        self._tokenizer = tokenizer
        self._size = min(batch_size, len(rows))
        self._seed = config.seed
        self._encoded: dict[int, TrainSequence] = {}

    @property
    def tokens_per_batch(self) -> float:
        """Mean tokens of a batch, over the examples encoded so far."""
        lengths = [sequence.ids.size for sequence in self._encoded.values()]
        return self._size * sum(lengths) / len(lengths)

    def batch(self, step: int) -> TrainBatch:
        """The global batch of one optimizer step: each trained token weighs the same."""
        per_epoch = len(self._rows) // self._size
        epoch, place = divmod(step, per_epoch)
        order = np.random.default_rng([self._seed, epoch]).permutation(len(self._rows))
        return self.pack(order[place * self._size : (place + 1) * self._size])

    def cursor(self, step: int) -> dict[str, int | str]:
        """Where the batch of `step` stands in the data, for a training state."""
        epoch, place = divmod(step, len(self._rows) // self._size)
        here = {"rows": len(self._rows), "batch_size": self._size, "seed": self._seed, "epoch": epoch, "place": place}
        return here | {"content": self._rows.fingerprint}

    def check(self, cursor: Mapping[str, int | str], step: int) -> None:
        """Raises ConfigError unless `cursor` was taken at `step` of this order of these data."""
        here = self.cursor(step)
        if changed := [
            f"{key} was {cursor.get(key)} and is {value}"
            for key, value in here.items()
            if cursor.get(key) != value and not (key == "content" and key not in cursor)  # of an older k3rl
        ]:
            raise ConfigError(
                f"the data are not those that the run has read so far: {', '.join(changed)}; resume with the same "
                "data, seed and batch size, or start a new run from its export",
                key="data",
            )

    def pack(self, indices: np.ndarray) -> TrainBatch:
        """These rows as one batch."""
        return TrainBatch.pack([self._encode(int(i)) for i in indices])

    def _encode(self, index: int) -> TrainSequence:
        if index not in self._encoded:
            row = self._rows[index]
            auto = self._thinking == "auto" and chat_format(self._tokenizer).thinks
            thinking = self._thinking == "on" or (auto and thinks(row))
            try:
                self._encoded[index] = chat_sequence(
                    f"row-{index}",
                    row.messages,
                    row.tools,
                    self._tokenizer,
                    thinking,
                    thinking_effort=(row.meta.get("thinking_effort") or self._effort) if thinking else None,
                    folder=self._rows.path.parent,
                )
            except (ChatError, TokenizerError) as error:
                raise DatasetError(self._rows.path, index, str(error)) from error
        return self._encoded[index]


def thinks(row: ChatExample) -> bool:
    """Whether an assistant turn of the conversation has reasoning."""
    said = [message for message in row.messages if isinstance(message, Mapping)]
    return any(message.get("reasoning_content") or message.get("reasoning") for message in said)


def chat_data(session: Session, config: SFTConfig, name: str) -> tuple[ChatBatches, TrainBatch]:
    """(training batches, the held-out batch). Demonstrations are written into the run and read like any file."""
    import datasets  # a second to import, which only SFT needs

    datasets.disable_progress_bars()
    folder = session.run.root / "data"
    cache = folder / "cache"
    if config.data is not None and config.heldout_data is not None:
        train_file, heldout_file = Path(config.data), Path(config.heldout_data)
    else:
        if {key.rpartition(".")[2] for key in session.run.changed} & {"demonstrations", "heldout_examples"}:
            session.progress.note(f"{name}: demonstrations stay those of the first attempt; a new run may have others")
        train_file = _demonstrations(folder / f"{name}.jsonl", config, config.demonstrations, "train")
        heldout_file = _demonstrations(folder / "heldout.jsonl", config, config.heldout_examples, "heldout")
    tokenizer = tokenizer_of(config.model.start)
    train = load_chat_dataset(train_file, cache_dir=cache)
    heldout = load_chat_dataset(heldout_file, cache_dir=cache)
    kept = ChatBatches(heldout, tokenizer, len(heldout), config)
    return ChatBatches(train, tokenizer, config.batch_size, config), kept.pack(np.arange(len(heldout)))


def check_data(config: SFTConfig) -> None:
    """Refuses, before anything is started, what has nothing to train on. Raises ConfigError or MissingResource."""
    if config.data is None or config.heldout_data is None:
        if make(config.env.name, **config.env.args).demonstrations is None:
            raise ConfigError(
                f"{config.env.name} has no demonstrations; give it some, or name --data and --heldout-data",
                key="data",
            )
        return
    for path in (config.data, config.heldout_data):
        if not Path(path).is_file():
            raise MissingResource(f"there is no file {path} with chat data")


def _demonstrations(path: Path, config: SFTConfig, n: int, split: str) -> Path:
    if not path.is_file():
        demonstrations = make(config.env.name, **config.env.args).demonstrations
        assert demonstrations is not None, "check_data comes first"
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = demonstrations(config.seed, n, split=split)
        write_atomic(path, "".join(json.dumps(row) + "\n" for row in rows))
    return path

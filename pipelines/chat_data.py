"""Chat data of SFT: the user's files or the environment's demonstrations, as packed batches."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from k3rl.checkpoint import weights_of
from k3rl.config import ConfigError, MissingResource
from k3rl.data import (
    ChatDataset,
    DatasetError,
    Fit,
    Problem,
    TrainBatch,
    TrainSequence,
    chat_sequence,
    check_chat_file,
    load_chat_dataset,
    thinks,
)
from k3rl.envs import make
from k3rl.model import K3Config
from k3rl.pipelines.configs import SFTConfig
from k3rl.pipelines.session import Session
from k3rl.pipelines.start import model_config, resolve_start, tokenizer_of
from k3rl.run import write_atomic
from k3rl.tokens import Tokenizer

_SHOWN_PROBLEMS = 9  # beside the first


class ChatBatches:
    """Batches of encoded examples, a new order each epoch. Batch `step` depends on the seed and the step only."""

    def __init__(
        self, rows: ChatDataset, tokenizer: Tokenizer, batch_size: int, config: SFTConfig, mended: bool = False
    ) -> None:
        """config: for the seed, and for what is thought; mended: a few rows are others than when a state was saved."""
        self._mended = mended
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
        """Raises ConfigError unless `cursor` was taken at `step` of this order of these data.

        A few rows that were mended since draw a new order of what is left.
        """
        here = self.cursor(step)
        if self._mended:
            here = {key: here[key] for key in ("batch_size", "seed")}
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
            thinking = thinks(row, self._thinking)
            self._encoded[index] = chat_sequence(
                f"row-{index}",
                row.messages,
                row.tools,
                self._tokenizer,
                thinking,
                thinking_effort=(row.meta.get("thinking_effort") or self._effort) if thinking else None,
                folder=self._rows.path.parent,
            )
        return self._encoded[index]


def mended_rows(kept: Path, rows: ChatDataset) -> int | None:
    """How many rows differ from those that `kept` has digests of, where they are few; None where they are many.

    Few is one in a hundred, and one at least: a file in which bad rows were mended is the same data, another file is
    not. 0 for the same rows, and without `kept`. What is few is written there.
    """
    here = rows.digests()
    changed = 0
    if kept.is_file():
        before = Counter(np.load(kept).tolist())
        now = Counter(here.tolist())
        changed = max((before - now).total(), (now - before).total())
        if changed > max(1, before.total() // 100):
            return None
    kept.parent.mkdir(parents=True, exist_ok=True)
    part = kept.with_suffix(".tmp")
    with part.open("wb") as file:
        np.save(file, here)
    part.replace(kept)
    return changed


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
    changed = mended_rows(folder / f"{name}.digests.npy", train)
    if changed:
        session.progress.note(f"{name}: {changed} rows of {train_file} are others than in the attempt before")
    kept = ChatBatches(heldout, tokenizer, len(heldout), config)
    batches = ChatBatches(train, tokenizer, config.batch_size, config, mended=bool(changed))
    return batches, kept.pack(np.arange(len(heldout)))


def check_data(config: SFTConfig, told: Callable[[str], None] = lambda text: None) -> None:
    """Refuses, before anything is started, what cannot be trained on: every row of the files is looked at.

    told: hears what the files hold. Raises ConfigError (DatasetError for a file of the user's) or MissingResource.
    """
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
    tokenizer, fit = tokenizer_of(config.model.start), fit_of(config)
    for path in (config.data, config.heldout_data):
        report = check_chat_file(
            Path(path), tokenizer, thinking=config.thinking, thinking_effort=config.thinking_effort, fit=fit
        )
        if report.problems:
            raise _refused(path, report.problems)
        told(f"{path}: {'; '.join(report.lines())}")


def fit_of(config: SFTConfig) -> Fit:
    """The most tokens that a row may have in this configuration."""
    start = resolve_start(config.model.start)
    model = model_config(config) if start is None else K3Config.from_json(weights_of(start) / "config.json")
    ranks = config.trainer.context_parallel
    budget = config.trainer.micro_batch_tokens * ranks
    if model.max_position_embeddings < budget:
        return Fit(model.max_position_embeddings, f"the context of {config.model.start}")
    return Fit(budget, "trainer.micro_batch_tokens" + (f" on {ranks} context ranks" if ranks > 1 else ""))


def _refused(path: str, problems: Sequence[Problem]) -> DatasetError:
    """The error of a file with these problems: the first one, and the next few with their rows."""
    first, *others = problems
    more = [f"row {problem.row}: {problem.why}" for problem in others[:_SHOWN_PROBLEMS]]
    left = len(others) - len(more)
    tail = [f"and {left:,} more problems"] if left else []
    said = "\n  ".join([first.why, *more, *tail, f"`k3rl data check {path}` shows all"])
    return DatasetError(path, first.row, said, first.key)


def _demonstrations(path: Path, config: SFTConfig, n: int, split: str) -> Path:
    if not path.is_file():
        demonstrations = make(config.env.name, **config.env.args).demonstrations
        assert demonstrations is not None, "check_data comes first"
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = demonstrations(config.seed, n, split=split)
        write_atomic(path, "".join(json.dumps(row) + "\n" for row in rows))
    return path

"""Saves and restores one rank's training state; writing goes on in the background while the next steps are taken."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from k3rl.checkpoint.train_state import Owned, Rows, TrainState, TrainStateError, commit, report_failure, write_shard
from k3rl.model import K3Config, LoraConfig
from k3rl.optim import OptimizerStateError
from k3rl.parallel import flat

_RNG = "rng/{device}/rank_{rank}"


class HasState(Protocol):
    """What a trainer shows of its state: tensors by official name, so that ranks may own them in any way."""

    def owned_state(self) -> Owned:
        """What this rank is the one to save; together the ranks own everything."""

    def wanted_state(self) -> Iterable[str] | None:
        """Names of the tensors that this rank needs to go on; None for all."""

    def load_state_tensors(self, state: Mapping[str, Tensor]) -> None:
        """Takes the tensors of `wanted_state`; each is read from the disk when the mapping is asked for it."""


class StateWriter:
    """Writes the states of one rank, one at a time, on a thread of its own.

    `save` copies and returns; the next `save` waits for it. What goes wrong in the thread is raised by the next
    `check`, `save` or `wait`. The thread keeps a process from ending before its state is written.
    """

    def __init__(self, rank: int = 0, ranks: int = 1, *, timeout_s: float = 600.0) -> None:
        """timeout_s: how long rank 0 waits for the others' shards, and `wait` for the disk."""
        self.rank, self.ranks = rank, ranks
        self._timeout_s = timeout_s
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._saving = Path()  # the state that was handed over last

    def save(
        self, directory: Path, owned: Owned, extra: Mapping[str, Any], *, save_id: str, fresh: bool = False
    ) -> None:
        """Copies `owned` and begins to write it. All ranks call it with one `directory` and one `save_id`.

        fresh: nobody else has these tensors, so that those on the host need no copy. Raises the error of the save
        before, TrainStateError among them.
        """
        self.wait()
        self._saving = directory
        copied = {name: _on_host(value, copy=not fresh) for name, value in owned.items()}
        copied |= _rng_states(self.rank)
        _refuse_full_disk(directory, copied)

        def work() -> None:
            try:
                _refuse_non_finite(copied)
                write_shard(directory, self.rank, copied, extra, save_id=save_id)
            except Exception as error:
                report_failure(directory, self.rank, str(error), save_id=save_id)
                raise
            if self.rank == 0:
                commit(directory, self.ranks, save_id=save_id, timeout_s=self._timeout_s)

        self._thread = threading.Thread(target=self._guarded, args=(work,), name=f"save {directory.name}")
        self._thread.start()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # nobody sees an exception of a thread; `check` raises it again
            self._error = error

    def check(self) -> None:
        """Raises what went wrong in a save that has ended; once."""
        if self._error is not None and (self._thread is None or not self._thread.is_alive()):
            error, self._error = self._error, None
            raise TrainStateError(
                f"the training state {self._saving} could not be saved: {error}. The state before it stays the latest, "
                "and --resume goes on from that"
            ) from error

    def wait(self) -> None:
        """Returns when the state handed over last is on the disk. Raises TrainStateError."""
        if self._thread is not None:
            self._thread.join(2 * self._timeout_s)
            if self._thread.is_alive():
                raise TrainStateError(f"{self._thread.name}: the disk took longer than {2 * self._timeout_s:g} s")
            self._thread = None
        self.check()


class _OnDisk(Mapping[str, Tensor]):
    """Tensors of a state by name, read and checked when they are asked for."""

    def __init__(self, state: TrainState, names: Iterable[str]) -> None:
        self._state, self._names = state, dict.fromkeys(names)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._state.tensor(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def restore(trainer: HasState, state: TrainState, rank: int = 0) -> dict[str, Any]:
    """Loads what this rank wants of a state into its trainer; returns rank 0's JSON.

    Raises TrainStateError for a damaged state and for one of another model or optimizer.
    """
    wanted = trainer.wanted_state()
    names = [name for name in state.names if not name.startswith("rng/")] if wanted is None else wanted
    try:
        trainer.load_state_tensors(_OnDisk(state, names))
    except (OptimizerStateError, KeyError) as error:
        raise TrainStateError(
            f"{state.directory} is the state of another model or optimizer: {error}. Resume with the configuration "
            "that it was written with"
        ) from error
    if (name := _RNG.format(device="cpu", rank=rank)) in state.names:
        torch.set_rng_state(state.tensor(name))
    if (name := _RNG.format(device="cuda", rank=rank)) in state.names and torch.cuda.is_available():
        torch.cuda.set_rng_state(state.tensor(name))
    return state.extra


def refuse_foreign(
    state: TrainState, config: K3Config, lora: LoraConfig | None, frozen: tuple[str | None, str] | None
) -> None:
    """Raises TrainStateError where `state` is that of another model than the one that is to go on from it.

    A state holds only what is trained. Beside other frozen weights, another alpha or another top-k the same tensors are
    another policy, and nothing of it shows in a shape. So a state says what it is of, and is refused for anything else.

    frozen: where the weights that do not train came from, and their `weights_fingerprint`; None where all train. States
    of older k3rl say less of themselves, and are asked for no more.
    """
    about: Mapping[str, Any] = state.extra.get("learner") or {}
    if not about:
        return
    was, now = flat("model", K3Config.from_dict(about["model"]["config"]).to_dict()), flat("model", config.to_dict())
    before = about["trainer"].get("lora")
    if before is not None and lora is not None:
        was["trainer.lora.alpha"], now["trainer.lora.alpha"] = before["alpha"], lora.alpha
    for key in sorted({*was, *now}):
        if was.get(key) != now.get(key):
            raise TrainStateError(
                f"{state.directory} was saved with {key} {was.get(key)!r}, and this run has {now.get(key)!r}: its "
                "tensors would be another policy. Resume with the configuration that it was written with"
            )
    known = about["model"].get("frozen")
    if frozen is None or known is None or known == frozen[1]:
        return
    raise TrainStateError(
        f"{state.directory} was trained beside other weights than those of {frozen[0] or frozen[1]}, which do not "
        f"train and are no part of it. Resume with the weights that it was begun with ("
        f"{about['model']['start'] or known})"
    )


def _refuse_non_finite(owned: Owned) -> None:
    """A state that holds a NaN is worse than none: the good one before it would no longer be the latest."""
    for name, value in owned.items():
        values = value.values if isinstance(value, Rows) else value
        if values.is_floating_point() and not bool(values.isfinite().all()):
            raise TrainStateError(f"{name} holds a number that is not finite; the state before stays the latest")


def _refuse_full_disk(directory: Path, owned: Owned) -> None:
    """Raises TrainStateError at once where the disk has no room for a rank's tensors; writing would take its time."""
    needed = sum(
        tensor.numel() * tensor.element_size()
        for tensor in (value.values if isinstance(value, Rows) else value for value in owned.values())
    )
    place = next(folder for folder in directory.absolute().parents if folder.is_dir())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise TrainStateError(
            f"the training state {directory} needs {needed / 2**20:,.1f} MiB and the disk of {place} has "
            f"{free / 2**20:,.1f} MiB free. The state before it stays the latest; free some room, and --resume goes on "
            "from that"
        )


def _on_host(value: Tensor | Rows, *, copy: bool) -> Tensor | Rows:
    if isinstance(value, Rows):
        return Rows(value.values.detach().to("cpu", copy=copy), value.start, value.total)
    return value.detach().to("cpu", copy=copy)


def _rng_states(rank: int) -> dict[str, Tensor]:
    """torch's generators, uint8 [n]. Everything else that k3rl draws comes from a seed and the step."""
    states = {_RNG.format(device="cpu", rank=rank): torch.get_rng_state()}
    if torch.cuda.is_available():
        states[_RNG.format(device="cuda", rank=rank)] = torch.cuda.get_rng_state()
    return states

"""A stored rollout, read back whole and scored again: is the policy that acted the policy that is there?"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from k3rl.checkpoint import load_checkpoint
from k3rl.config import NO_CHECKPOINT, ConfigError, K3Error, MissingResource
from k3rl.data import ManifestEntry, TrajectoryError, from_episodes, read_groups, read_manifest
from k3rl.parallel import Trainer, TrainerConfig
from k3rl.pipelines.start import resolve_start
from k3rl.run import RunDirectory, read_lines
from k3rl.tokens import Tokenizer
from k3rl.types import Branch, Episode, Scored, Turn

TOLERANCE = 5e-4  # nats, of any token: what engine and learner keep to in float32 on a trained model
KL_BOUND = 1e-4  # nats a token: what they keep to in any dtype, and where single tokens fall on a rounding boundary


@dataclass(frozen=True)
class Stored:
    """An episode as the run wrote it. temperature: at which it was sampled; routes: whether its experts are there;
    tokenizer: of the run."""

    episode: Episode
    step: int
    attempt: int
    temperature: float
    routes: bool
    tokenizer: Tokenizer = field(repr=False)

    def turns(self) -> Iterator[tuple[Branch, int, Turn]]:
        """Every turn with its branch and its number in it."""
        for branch in self.episode.branches:
            for number, turn in enumerate(branch.turns):
                yield branch, number, turn


@dataclass(frozen=True)
class Rescored:
    """What a checkpoint gives the sampled tokens. logprobs: (branch, turn) -> float32 [sampled tokens], in nats.

    A turn that a branch has from its parent is there once. kl: mean of exp(d) - 1 - d over the tokens, with
    d = log p_checkpoint - log p_sampler, an estimate of KL(sampler to checkpoint); mean and largest: of |d|.
    first_difference: the first token with |d| above the tolerance, None where there is none.
    """

    checkpoint: str
    tolerance: float
    tokens: int
    kl: float
    mean: float
    largest: float
    first_difference: Mapping[str, Any] | None
    logprobs: Mapping[tuple[str, int], np.ndarray] = field(repr=False)

    @property
    def equal(self) -> bool:
        return self.first_difference is None


def find_episode(root: Path, name: str) -> Stored:
    """The episode `name` of the run at `root`, of the last attempt that ran it.

    Raises MissingResource where there is no run, ConfigError where the run has no such episode, K3Error for a file of
    it that is damaged or gone.
    """
    try:
        return _find(RunDirectory.open(root), name)
    except TrajectoryError as error:
        raise K3Error(str(error)) from error


def _find(run: RunDirectory, name: str) -> Stored:
    folder = run.traces_dir / "trajectories"
    listed = [row for row, _ in read_lines(run.traces_dir / "stream.index.jsonl") if row.get("kind") == "episode"]
    steps = {row["step"] for row in listed if row["episode"] == name}
    entries = sorted(read_manifest(folder), key=_attempt) if folder.is_dir() else []
    # The list may lack an episode: watching drops what it has no time for. The files have all.
    for entry in (one for one in reversed(entries) if not steps or one.generation in steps):
        for group in read_groups(folder, entry):
            for episode in group.episodes:
                if episode.id == name:
                    return _stored(run, folder, entry, episode)
    near = next(iter(difflib.get_close_matches(name, {row["episode"] for row in listed}, n=1)), None)
    known = f"; nearest: {near}" if near else ""
    raise ConfigError(f"{run.root} has stored no episode {name!r}{known}", key="EPISODE", got=name, nearest=near)


def _attempt(entry: ManifestEntry) -> int:
    return int(entry.file.partition("-")[0].removeprefix("driver"))


def _stored(run: RunDirectory, folder: Path, entry: ManifestEntry, episode: Episode) -> Stored:
    routes = entry.routes_file is not None and (folder / entry.routes_file).is_file()
    if routes:
        groups = read_groups(folder, entry, routes=True)
        episode = next(one for group in groups for one in group.episodes if one.id == episode.id)
    tree = run.resolved(_attempt(entry))
    stage = tree.get(episode.id.rsplit("-", 3)[0], tree)  # STAGE-STEP-GROUP-MEMBER; a run of one stage has no sections
    tokenizer = Tokenizer.load(run.tokenizer_dir) if run.tokenizer_dir.is_dir() else Tokenizer.builtin()
    return Stored(episode, entry.generation, _attempt(entry), stage["sampling"]["temperature"], routes, tokenizer)


def rescore(stored: Stored, checkpoint: Path, tolerance: float = TOLERANCE) -> Rescored:
    """Scores the episode's sampled tokens by a checkpoint or an adapter, in float32 on the CPU, as a learner does.

    Raises MissingResource where `checkpoint` holds none, ConfigError for an episode in which nothing was sampled.
    """
    if resolve_start(str(checkpoint)) is None:
        raise MissingResource(f"{checkpoint} {NO_CHECKPOINT}")
    episode = replace(stored.episode, score=Scored(0.0))  # one without a reward was sampled all the same
    if not any(turn.sampled_ids for _, _, turn in stored.turns()):
        raise ConfigError(f"nothing was sampled in {episode.id}, so there is nothing to score", key="EPISODE")
    batch = from_episodes([episode], {episode.id: 0.0}, routes=stored.routes)
    model = load_checkpoint(checkpoint, torch.float32)
    settings = TrainerConfig(lora=None if model.adapter is None else model.adapter.config)
    longest = int(batch.row_lengths.max())
    trainer = Trainer(model, settings.replace(micro_batch_tokens=max(settings.micro_batch_tokens, longest)))
    found = trainer.logprobs(batch, stored.temperature)
    places = dict(zip(batch.sequence_ids, batch.cu_seqlens[:-1], strict=True))
    logprobs: dict[tuple[str, int], np.ndarray] = {}
    differences, first = [], None
    for branch, number, turn in stored.turns():
        start = places.get(f"{episode.id}/{branch.id}")
        if start is None:
            continue  # all of the branch is its parent's
        begin = start + len(turn.prompt_ids)
        rows = slice(begin, begin + len(turn.sampled_ids))
        if not batch.loss_mask[rows].all():
            continue  # the turn is its parent's
        ours = logprobs[branch.id, number] = found[rows]
        d = ours.astype(np.float64) - np.asarray(turn.logprobs)
        differences.append(d)
        if first is None and (beyond := np.flatnonzero(~(np.abs(d) <= tolerance))).size:
            at = int(beyond[0])
            first = {
                "branch": branch.id, "turn": number, "token": at, "token_id": int(turn.sampled_ids[at]),
                "sampler": float(turn.logprobs[at]), "checkpoint": float(ours[at]),
            }  # fmt: skip
    d = np.concatenate(differences)
    kl = float(np.mean(np.expm1(d) - d))
    mean, largest = float(np.abs(d).mean()), float(np.abs(d).max())
    return Rescored(str(checkpoint), tolerance, d.size, kl, mean, largest, first, logprobs)

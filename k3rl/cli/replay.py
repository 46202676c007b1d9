"""`k3rl replay`: a stored rollout turn by turn, and whether a checkpoint is the policy that sampled it."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3rl.cli.output import print_json
from k3rl.cli.parser import Parser
from k3rl.run import framed, score_row, visible

if TYPE_CHECKING:
    from k3rl.pipelines import Rescored, Stored
    from k3rl.tokens import Tokenizer
    from k3rl.types import Turn


def replay(words: Sequence[str]) -> int:
    """The `k3rl replay` command."""
    parser = Parser(
        "replay",
        "Shows a stored rollout turn by turn: each sampled token with the logprob that it was drawn with. With "
        "--checkpoint the tokens are scored again, and it says whether that is the policy that acted.",
    )
    parser.add_argument("run", type=Path, help="the run directory")
    parser.add_argument("episode", help="the episode's id, as `k3rl tail RUN` shows it")
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="a checkpoint or an adapter that scores it")
    parser.add_argument(
        "--tolerance", type=_nats, default=None, metavar="NATS", help="difference of a token's logprobs (default 5e-4)"
    )
    parser.add_argument("--json", action="store_true")
    arguments = parser.read(words)
    if arguments is None:
        return 0
    from k3rl.pipelines import TOLERANCE, find_episode, rescore

    stored = find_episode(arguments.run, arguments.episode)
    tolerance = TOLERANCE if arguments.tolerance is None else arguments.tolerance
    found = None if arguments.checkpoint is None else rescore(stored, arguments.checkpoint, tolerance)
    if arguments.json:
        print_json(_as_json(stored, found))
        return 0
    for line in _lines(stored, found, stored.tokenizer):
        print(line)
    return 0


def _nats(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"got {word}, wants a number of nats from 0")
    return value


def _as_json(stored: Stored, found: Rescored | None) -> dict[str, Any]:
    episode = stored.episode
    turns = [
        {
            "branch": branch.id,
            "turn": number,
            "versions": [turn.first_version, turn.last_version],
            "stop_reason": str(turn.stop_reason),
            "prompt_tokens": len(turn.prompt_ids),
            "token_ids": [int(token) for token in turn.sampled_ids],
            "logprobs": [float(value) for value in turn.logprobs],
            "checkpoint_logprobs": _scored(found, branch.id, number),
        }
        for branch, number, turn in stored.turns()
    ]
    about = {"episode": episode.id, "task": episode.task_id, "step": stored.step, "attempt": stored.attempt}
    about |= {"score": score_row(episode.score), "stop_reason": str(episode.stop_reason), "turns": turns}
    if found is None:
        return about | {"checkpoint": None, "equal": None, "first_difference": None}
    return about | {
        "checkpoint": found.checkpoint,
        "equal": found.equal,
        "first_difference": found.first_difference,
        "tolerance": found.tolerance,
        "tokens": found.tokens,
        "kl": found.kl,
        "mean_difference": found.mean,
        "largest_difference": found.largest,
    }


def _scored(found: Rescored | None, branch: str, turn: int) -> list[float] | None:
    values = None if found is None else found.logprobs.get((branch, turn))
    return None if values is None else values.tolist()


def _lines(stored: Stored, found: Rescored | None, tokenizer: Tokenizer) -> Iterator[str]:
    episode, known = stored.episode, 0
    yield visible(f"{episode.id}  {episode.task_id}  step {stored.step}, attempt {stored.attempt}")
    for branch, number, turn in stored.turns():
        known = 0 if number == 0 else known
        first, last = turn.first_version, turn.last_version
        version = f"v{first}" if first == last else f"v{first}-{last}"
        yield visible(f"\n{branch.id} turn {number}  {version}  {len(turn.sampled_ids)} tokens  {turn.stop_reason}")
        yield framed("".join(tokenizer.pieces(turn.prompt_ids[known:])), "  > ")
        yield from _table(turn, _scored(found, branch.id, number), tokenizer)
        known = len(turn.prompt_ids) + len(turn.sampled_ids)
    score = score_row(episode.score)
    worth = f"reward {score['reward']:g}" if score["status"] == "scored" else score["status"]
    parts = "".join(f"  {name} {value:g}" for name, value in score.get("parts", {}).items())
    why = score.get("reason") or score.get("hack") or ""
    yield "\n" + visible(f"{worth}{parts}  {episode.stop_reason}" + (f"  {why}" if why else "")).replace("\n", "\u240a")
    if found is not None:
        yield from _verdict(found)


def _table(turn: Turn, scored: list[float] | None, tokenizer: Tokenizer) -> Iterator[str]:
    yield f"  {'token':>6}  {'id':>6}  {'sampler':>10}" + (
        f"  {'checkpoint':>10}  {'difference':>10}" if scored else ""
    )
    pieces = tokenizer.pieces(turn.sampled_ids)
    for place, (token, logprob, piece) in enumerate(zip(turn.sampled_ids, turn.logprobs, pieces, strict=True)):
        line = f"  {place:>6}  {token:>6}  {logprob:>10.5f}"
        if scored is not None:
            line += f"  {scored[place]:>10.5f}  {scored[place] - logprob:>10.1e}"
        yield f"{line}  {visible(piece)}".replace("\n", "\u240a")


def _verdict(found: Rescored) -> Iterator[str]:
    from k3rl.pipelines import KL_BOUND

    far = f"differences of {found.mean:.1e} in the mean and {found.largest:.1e} at most"
    yield f"{found.checkpoint}: KL {found.kl:.2e} nats a token over {found.tokens} tokens, {far}"
    if found.first_difference is None:
        yield f"every token is within {found.tolerance:g} nats: this is the policy that acted"
        return
    at = found.first_difference
    yield (
        f"the first token beyond {found.tolerance:g} nats is token {at['token']} of turn {at['turn']} of "
        f"{at['branch']}: {at['sampler']:.5f} when it was sampled, {at['checkpoint']:.5f} here"
    )
    if found.kl <= KL_BOUND:
        yield (
            f"the KL is within {KL_BOUND:g}: this is the policy that acted, as far as that tells; single tokens lie "
            "further off where a value was rounded to the other side"
        )
    else:
        yield f"the KL is above {KL_BOUND:g}: this is another policy than the one that acted"

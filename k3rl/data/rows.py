"""Groups of episodes as table rows and back: the columns of a trajectory file.

One row is one branch; an episode without branches has one row whose branch is null. A missing reward is null. Images
are named by their SHA-256; `image_files.py` keeps what they hold.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from k3rl.data.image_files import episode_images, referring, restored
from k3rl.packed import Packed, SamplingMasks
from k3rl.tokens import image_rows
from k3rl.types import (
    Branch,
    EncodedImage,
    Episode,
    Failed,
    FailureKind,
    Group,
    Invalid,
    Message,
    Score,
    Scored,
    StopReason,
    ToolCall,
    Turn,
)

# policy versions, stop reasons and times are per turn, because one branch may be sampled by several versions.
_TURN = pa.struct(
    [
        ("prompt_tokens", pa.int32()),
        ("sampled_tokens", pa.int32()),
        ("stop_reason", pa.string()),
        ("first_version", pa.int64()),
        ("last_version", pa.int64()),
        ("model_s", pa.float64()),
        ("env_s", pa.float64()),
        ("images", pa.int32()),  # how many of the branch's images its prompt has
    ]
)
EPISODE_SCHEMA = pa.schema(
    [
        ("group_id", pa.string()),
        ("task_id", pa.string()),
        ("episode_id", pa.string()),
        ("env", pa.string()),
        ("family", pa.string()),
        ("level", pa.int32()),
        ("seed", pa.int64()),
        ("finish_reason", pa.string()),
        ("status", pa.string()),  # scored, invalid, failed
        ("reward", pa.float64()),  # null unless scored
        ("score_detail", pa.string()),  # JSON: parts, or hack and evidence, or reason
        ("answer", pa.string()),
        ("messages", pa.string()),  # JSON
        ("budgets_used", pa.string()),  # JSON
        ("metrics", pa.string()),  # JSON
        ("branch_id", pa.string()),
        ("parent", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.int8())),
        ("behaviour_logprobs", pa.list_(pa.float32())),  # what a learner reads; 0 where not sampled
        ("turns", pa.list_(_TURN)),
        ("images", pa.list_(pa.string())),  # SHA-256 of the image of each placeholder, in order
        # What tokens were drawn from (`SamplingMasks`), empty where nothing was cut.
        ("kept_which", pa.list_(pa.int32())),
        ("kept_ends", pa.list_(pa.int64())),
        ("kept_ids", pa.list_(pa.int32())),
    ]
)
ROUTE_SCHEMA = pa.schema(
    [
        ("episode_id", pa.string()),
        ("branch_id", pa.string()),
        ("turn", pa.int32()),
        ("routes", pa.binary()),
        ("shape", pa.list_(pa.int32())),
        ("dtype", pa.string()),
    ]
)


def episode_rows(groups: Sequence[Group], seed: int) -> dict[str, list[Any]]:
    """Columns of EPISODE_SCHEMA for these groups, in their order."""
    columns: dict[str, list[Any]] = {name: [] for name in EPISODE_SCHEMA.names}
    for group in groups:
        for episode in group.episodes:
            head = _episode_columns(group, episode, seed)
            for branch in episode.branches or (None,):
                for name, value in {**head, **_branch_columns(branch)}.items():
                    columns[name].append(value)
    return columns


def route_rows(groups: Sequence[Group]) -> dict[str, list[Any]]:
    """Columns of ROUTE_SCHEMA: one row per turn that recorded experts."""
    columns: dict[str, list[Any]] = {name: [] for name in ROUTE_SCHEMA.names}
    for episode in (episode for group in groups for episode in group.episodes):
        for branch in episode.branches:
            for number, turn in enumerate(branch.turns):
                if turn.routes is not None:
                    row = (
                        episode.id,
                        branch.id,
                        number,
                        turn.routes.tobytes(),
                        turn.routes.shape,
                        turn.routes.dtype.str,
                    )
                    for name, value in zip(ROUTE_SCHEMA.names, row, strict=True):
                        columns[name].append(value)
    return columns


def routes_by_turn(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str, int], np.ndarray]:
    """(episode, branch, turn) -> routes of the shape and dtype that were written, read-only."""
    return {
        (row["episode_id"], row["branch_id"], row["turn"]): np.frombuffer(row["routes"], row["dtype"]).reshape(
            row["shape"]
        )
        for row in rows
    }


def groups(
    rows: Sequence[Mapping[str, Any]],
    routes: Mapping[tuple[str, str, int], np.ndarray],
    images: Mapping[str, EncodedImage],
) -> list[Group]:
    """The groups that gave these rows. Raises KeyError for an image that is not there."""
    by_group: dict[tuple[str, str], dict[str, list[Mapping[str, Any]]]] = {}
    for row in rows:
        by_group.setdefault((row["group_id"], row["task_id"]), {}).setdefault(row["episode_id"], []).append(row)
    return [
        Group(group_id, task_id, tuple(_episode(branches, routes, images) for branches in episodes.values()))
        for (group_id, task_id), episodes in by_group.items()
    ]


def message_to_dict(message: Message, images: Mapping[str, EncodedImage]) -> dict[str, Any]:
    """A message as JSON values, with references to these images; `message_from_dict` gives it back."""
    calls = [
        {"name": call.name, "arguments": call.arguments, "id": call.id, "text": call.text}
        for call in message.tool_calls
    ]
    return {
        "role": message.role,
        "content": referring(message.content, images),
        "reasoning": message.reasoning,
        "tool_calls": calls,
        "name": message.name,
        "tool_call_id": message.tool_call_id,
    }


def message_from_dict(data: Mapping[str, Any], images: Mapping[str, EncodedImage]) -> Message:
    """The message that `message_to_dict` wrote."""
    calls = tuple(
        ToolCall(call["name"], call["arguments"], call["id"], call.get("text")) for call in data["tool_calls"]
    )
    content = restored(data["content"], images)
    return Message(data["role"], content, data["reasoning"], calls, data["name"], data["tool_call_id"])


def _episode_columns(group: Group, episode: Episode, seed: int) -> dict[str, Any]:
    status, reward, detail = _score_columns(episode.score)
    images = episode_images(episode)
    return {
        "group_id": group.id,
        "task_id": group.task_id,
        "episode_id": episode.id,
        "env": episode.env,
        "family": episode.family,
        "level": episode.level,
        "seed": seed,
        "finish_reason": episode.stop_reason.value,
        "status": status,
        "reward": reward,
        "score_detail": json.dumps(detail),
        "answer": episode.answer,
        "messages": json.dumps([message_to_dict(message, images) for message in episode.messages]),
        "budgets_used": json.dumps(_floats(episode.budgets_used)),
        "metrics": json.dumps(_floats(episode.metrics)),
    }


def _score_columns(score: Score) -> tuple[str, float | None, dict[str, Any]]:
    if isinstance(score, Scored):
        return "scored", score.reward, {"parts": _floats(score.parts)}
    if isinstance(score, Invalid):
        return "invalid", None, {"hack": score.hack, "evidence": score.evidence}
    return "failed", None, {"reason": score.reason, "kind": str(score.kind)}


def _floats(values: Mapping[str, float]) -> dict[str, float]:
    """Plain floats: a NumPy number has no JSON form."""
    return {name: float(value) for name, value in values.items()}


def _score(row: Mapping[str, Any]) -> Score:
    detail = json.loads(row["score_detail"])
    if row["status"] == "scored":
        return Scored(row["reward"], detail["parts"])
    if row["status"] == "invalid":
        return Invalid(**detail)
    return Failed(detail["reason"], FailureKind(detail.get("kind", FailureKind.OTHER)))


def _branch_columns(branch: Branch | None) -> dict[str, Any]:
    if branch is None:
        return {
            "branch_id": None,
            "parent": None,
            "token_ids": [],
            "loss_mask": [],
            "behaviour_logprobs": [],
            "turns": [],
            "images": [],
            **_mask_columns(None),
        }
    ids, mask, logprobs = branch.tokens()
    turns = [
        {
            "prompt_tokens": len(turn.prompt_ids),
            "sampled_tokens": len(turn.sampled_ids),
            "stop_reason": turn.stop_reason.value,
            "first_version": turn.first_version,
            "last_version": turn.last_version,
            "model_s": turn.model_s,
            "env_s": turn.env_s,
            "images": len(turn.images),
        }
        for turn in branch.turns
    ]
    return {
        "branch_id": branch.id,
        "parent": branch.parent,
        "token_ids": ids,
        "loss_mask": mask.astype(np.int8),
        "behaviour_logprobs": logprobs,
        "turns": turns,
        "images": [image.sha256 for image in branch.images],
        **_mask_columns(branch.sampling_mask),
    }


def _mask_columns(sampling_mask: SamplingMasks | None) -> dict[str, Any]:
    if sampling_mask is None:
        return {"kept_which": [], "kept_ends": [], "kept_ids": []}
    return {"kept_which": sampling_mask.which, "kept_ends": sampling_mask.ends, "kept_ids": sampling_mask.ids}


def _sampling_masks(row: Mapping[str, Any]) -> SamplingMasks | None:
    if not row["kept_which"]:
        return None
    which, ends, ids = row["kept_which"], row["kept_ends"], row["kept_ids"]
    return SamplingMasks(np.array(which, np.int32), np.array(ends, np.int64), np.array(ids, np.int32))


def _masks_of_turn(sampling_mask: SamplingMasks | None, start: int, stop: int) -> SamplingMasks | None:
    """Of a turn's sampled tokens; None when none of them has a set."""
    if sampling_mask is None or (sampling_mask.which[start:stop] < 0).all():
        return None
    return sampling_mask.take(np.arange(start, stop))


def _episode(
    rows: Sequence[Mapping[str, Any]],
    routes: Mapping[tuple[str, str, int], np.ndarray],
    images: Mapping[str, EncodedImage],
) -> Episode:
    head = rows[0]
    return Episode(
        id=head["episode_id"],
        task_id=head["task_id"],
        env=head["env"],
        family=head["family"],
        level=head["level"],
        branches=tuple(_branch(row, routes, images) for row in rows if row["branch_id"] is not None),
        stop_reason=StopReason(head["finish_reason"]),
        score=_score(head),
        answer=head["answer"],
        budgets_used=json.loads(head["budgets_used"]),
        metrics=json.loads(head["metrics"]),
        messages=tuple(message_from_dict(message, images) for message in json.loads(head["messages"])),
    )


def _branch(
    row: Mapping[str, Any],
    routes: Mapping[tuple[str, str, int], np.ndarray],
    images: Mapping[str, EncodedImage],
) -> Branch:
    """Turns are cut out of the branch's tokens: each prompt is all that came before its sampled tokens."""
    ids, logprobs = Packed.of(row["token_ids"], np.int32), Packed.of(row["behaviour_logprobs"], np.float32)
    known = 0
    shown = tuple(images[name] for name in row["images"])
    turns, sampling_mask = [], _sampling_masks(row)
    for number, turn in enumerate(row["turns"]):
        start, stop = turn["prompt_tokens"], turn["prompt_tokens"] + turn["sampled_tokens"]
        own = routes.get((row["episode_id"], row["branch_id"], number))
        rows_computed = stop - 1 + sum(image_rows(i.width, i.height) - 1 for i in shown[: turn["images"]])
        if own is not None and len(own) == rows_computed:  # of the whole prompt, as files of schema 3 may have them
            own = own[known:]
        known = rows_computed
        turns.append(
            Turn(
                prompt_ids=ids[:start],
                sampled_ids=ids[start:stop],
                logprobs=logprobs[start:stop],
                stop_reason=StopReason(turn["stop_reason"]),
                first_version=turn["first_version"],
                last_version=turn["last_version"],
                routes=own,
                model_s=turn["model_s"],
                env_s=turn["env_s"],
                images=shown[: turn["images"]],
                sampling_mask=_masks_of_turn(sampling_mask, start, stop),
            )
        )
    return Branch(row["branch_id"], tuple(turns), row["parent"])

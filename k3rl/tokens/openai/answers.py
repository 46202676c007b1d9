"""Answers: the objects of a completion, whole or in chunks, and how they are sent as events."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from k3rl.tokens.openai.text import token_bytes
from k3rl.tokens.tokenizer import Tokenizer
from k3rl.types import Alternatives, StopReason, ToolCall

Kind: TypeAlias = Literal["chat.completion", "chat.completion.chunk", "text_completion"]
FINISH_REASONS = {StopReason.STOP: "stop", StopReason.LENGTH: "length"}  # others go by their own names
LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON does not have
# Inside JSON they stand in strings only. JSON itself escapes those below U+0020.
_LINE_ENDS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}
DONE = "[DONE]"  # the last event of a stream


def head(answer_id: str, kind: Kind, created: int, model: str) -> dict[str, Any]:
    """What every answer and chunk begins with. created: seconds since 1970."""
    return {"id": answer_id, "object": kind, "created": created, "model": model}


def chat_message(content: str, reasoning: str | None, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """An assistant message. reasoning: None where the turn has no think channel; calls: of `tool_calls`."""
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = list(calls)
    return message


def tool_calls(calls: Sequence[ToolCall], prefix: str = "") -> list[dict[str, Any]]:
    """The calls of a turn. prefix: of the ids of calls that have none, after `call_`."""
    return [
        {
            "id": f"call_{prefix}_{place}" if call.id is None else call.id,
            "type": "function",
            "function": {
                "name": call.name,
                "arguments": call.arguments
                if isinstance(call.arguments, str)
                else json.dumps(call.arguments, ensure_ascii=False),
            },
        }
        for place, call in enumerate(calls)
    ]


def finish_reason(reason: StopReason, calls: Sequence[Any] = ()) -> str:
    """Why a completion ended."""
    if reason is StopReason.STOP and calls:
        return "tool_calls"
    return FINISH_REASONS.get(reason, str(reason))


def delta_choice(index: int, delta: Mapping[str, Any], finish: str | None = None) -> dict[str, Any]:
    """The choice of a chunk of a chat stream; calls in a delta are numbered."""
    delta = dict(delta)
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(delta["tool_calls"])]
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}


def first_delta(index: int) -> dict[str, Any]:
    """The choice that begins a chat stream."""
    return delta_choice(index, {"role": "assistant", "content": ""})


def text_choice(index: int, text: str, finish: str | None = None) -> dict[str, Any]:
    """A choice of the completions dialect, whole or of a chunk."""
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish}


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """Token counts, an image counted as all its rows; cached: of the prompt."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def cached_tokens(body: Mapping[str, Any]) -> int:
    """What the usage of an answer or chunk says of cached tokens; 0 where it says nothing."""
    return ((body.get("usage") or {}).get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def model_object(name: str, created: int) -> dict[str, Any]:
    """One model. created: seconds since 1970."""
    return {"id": name, "object": "model", "created": created, "owned_by": "k3rl"}


def model_list(models: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The answer to GET /models."""
    return {"object": "list", "data": list(models)}


def chat_logprobs(
    tokenizer: Tokenizer, ids: Sequence[int], logprobs: Sequence[float], alternatives: Sequence[Alternatives] = ()
) -> dict[str, Any]:
    """The logprobs object of the chat dialect. alternatives: of each id, or none at all."""

    def said(tokens: Alternatives) -> list[dict[str, Any]]:
        pieces = _pieces(tokenizer, [token for token, _ in tokens])
        return [
            {"token": piece, "logprob": _finite(value), "bytes": list(token_bytes(tokenizer, token))}
            for piece, (token, value) in zip(pieces, tokens, strict=True)
        ]

    sampled = said(tuple(zip(ids, logprobs, strict=True)))
    others = alternatives or [()] * len(sampled)
    content = [{**one, "top_logprobs": said(beside)} for one, beside in zip(sampled, others, strict=True)]
    return {"content": content, "refusal": None}


def text_logprobs(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    logprobs: Sequence[float],
    alternatives: Sequence[Alternatives],
    offsets: Sequence[int],
) -> dict[str, Any]:
    """The logprobs object of the completions dialect; offsets: characters of text before each token."""
    beside = [
        dict(zip(_pieces(tokenizer, [token for token, _ in one]), (_finite(v) for _, v in one), strict=True))
        for one in alternatives
    ]
    return {
        "tokens": _pieces(tokenizer, ids),
        "token_logprobs": [_finite(value) for value in logprobs],
        "top_logprobs": beside or None,
        "text_offset": list(offsets),
    }


def _pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    return [tokenizer.pieces([token])[0] if token < tokenizer.vocab_size else f"<{token}>" for token in ids]


def _finite(value: float) -> float:
    return value if math.isfinite(value) else LEAST_LOGPROB


def encoded_routes(routes: np.ndarray) -> dict[str, Any]:
    """Routes int16 [T, M, k] as JSON."""
    data = base64.b64encode(routes.astype("<i2").tobytes()).decode()
    return {"dtype": "int16", "shape": list(routes.shape), "data": data}


def chunks_of(answer: Mapping[str, Any], include_usage: bool) -> list[dict[str, Any]]:
    """A whole chat answer of one choice as a stream: the role, what is said, how it ended, and the usage if wanted."""
    start = head(answer["id"], "chat.completion.chunk", answer["created"], answer["model"])
    [choice] = answer["choices"]
    said = {key: value for key, value in choice["message"].items() if key != "role" and value is not None}
    choices = [first_delta(0), delta_choice(0, said), delta_choice(0, {}, choice["finish_reason"])]
    chunks = [{**start, "choices": [one]} for one in choices]
    return [*chunks, {**start, "choices": [], "usage": answer["usage"]}] if include_usage else chunks


def event(data: Mapping[str, Any] | str) -> str:
    """One server-sent event: an object, or DONE."""
    return f"data: {data if isinstance(data, str) else one_line(data)}\n\n"


def one_line(data: Mapping[str, Any]) -> str:
    """The JSON of an object without any character that some reader takes for the end of a line."""
    return json.dumps(data, ensure_ascii=False).translate(_LINE_ENDS)


def event_data(line: str) -> str | None:
    """What a line of an event stream carries; None for one that carries nothing."""
    return line.removeprefix("data:").strip() if line.startswith("data:") else None

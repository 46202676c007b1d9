"""OpenAI chat requests to a session, and its answers as JSON or as the chunks of a stream. No HTTP here.

The session decides how tokens are sampled: `temperature`, `top_p`, `seed` and the like are read over. `max_tokens`
can only lower the session's limit. `n` above 1, `stop` and a `response_format` are refused: a recorded turn is one
whole message.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from k3rl.envs.gateway.session import GatewaySession, Refused, Request
from k3rl.tokens import xtml
from k3rl.tokens.images import ImageError
from k3rl.tokens.vocab import TokenizerError
from k3rl.types import Message, StopReason, ToolCall, Turn

MAX_BODY_BYTES = 64 * 2**20
_UNCLEAR = (xtml.XTMLError, TokenizerError, ImageError)  # a conversation that has no tokens


@dataclass(frozen=True, slots=True)
class Answer:
    """status: of HTTP; body: a JSON object; chunks: of an event stream, in the place of the body."""

    status: int
    body: Mapping[str, Any]
    chunks: Sequence[Mapping[str, Any]] | None = None

    def text(self) -> tuple[str, str]:
        """(media type, body) as they are sent."""
        if self.chunks is None:
            return "application/json", json.dumps(self.body, ensure_ascii=False)
        events = [f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n" for chunk in self.chunks]
        return "text/event-stream", "".join([*events, "data: [DONE]\n\n"])


async def answer(session: GatewaySession, body: bytes, model: str = "policy") -> Answer:
    """The answer to one POST of /chat/completions. Never raises for what a program sends.

    An exception of the policy is kept in `session.engine_error` and told as status 500.
    """
    try:
        asked, streamed, usage = read_request(body)
        try:
            message, turn = await session.complete(asked)
        except (Refused, *_UNCLEAR):
            raise
        except Exception as error:
            session.engine_error = f"{type(error).__name__}: {error}"
            return _refusal(f"the engine failed: {session.engine_error}", 500, "engine_failed")
    except Refused as refused:
        return _refusal(str(refused), refused.status, refused.code)
    except _UNCLEAR as error:
        return _refusal(str(error), 400, "invalid_conversation")
    whole = _completion(message, turn, model)
    return Answer(200, whole, _chunks(whole, usage) if streamed else None)


def models(model: str = "policy") -> Answer:
    """The answer to GET /models."""
    return Answer(200, {"object": "list", "data": [{"id": model, "object": "model", "owned_by": "k3rl"}]})


def not_found(what: str) -> Answer:
    """The answer to anything else."""
    return _refusal(f"{what} is not served here; see chat/completions and models", 404, "not_found")


def read_request(body: bytes) -> tuple[Request, bool, bool]:
    """(the request, whether it wants a stream, whether the stream ends with the usage). Raises Refused."""
    if len(body) > MAX_BODY_BYTES:
        raise Refused(f"the body is larger than {MAX_BODY_BYTES} bytes", 413, "body_too_large")
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise _invalid(f"the body is not JSON: {error}") from None
    if not isinstance(given, dict) or not isinstance(given.get("messages"), list) or not given["messages"]:
        raise _invalid("the body must be an object with a list of messages")
    if given.get("n") not in (None, 1):
        raise _invalid(f"n is {given['n']}; one answer is recorded per request")
    if given.get("stop"):
        raise _invalid("stop is not served here: a recorded turn is one whole message")
    form = given.get("response_format")
    if form is not None and (not isinstance(form, dict) or form.get("type") != "text"):
        raise _invalid("response_format is not served here; only text is")
    choice = given.get("tool_choice")
    if choice not in (None, "auto", "none", "required"):
        raise _invalid("tool_choice must be auto, none or required")
    tools = given.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise _invalid("tools must be a list of objects")
    limits = [given.get("max_tokens"), given.get("max_completion_tokens")]
    if any(limit is not None and (type(limit) is not int or limit < 1) for limit in limits):
        raise _invalid("max_tokens must be a whole number of at least 1")
    request = Request(
        messages=tuple(_message(number, row) for number, row in enumerate(given["messages"])),
        tools=tuple(tools),
        tool_choice=None if choice == "auto" else choice,
        max_tokens=min((limit for limit in limits if limit is not None), default=None),
    )
    options = given.get("stream_options")
    return request, bool(given.get("stream")), isinstance(options, dict) and bool(options.get("include_usage"))


def _message(number: int, row: Any) -> Message:
    if not isinstance(row, dict) or not isinstance(row.get("role"), str):
        raise _invalid(f"message {number} must be an object with a role")
    calls = row.get("tool_calls") or ()
    if not isinstance(calls, list | tuple):
        raise _invalid(f"message {number} must have a list as its tool_calls")
    role = {"developer": "system"}.get(row["role"], row["role"])
    if role not in ("system", "user", "assistant", "tool"):
        raise _invalid(f"message {number} has the role {role!r}; wants system, user, assistant or tool")
    return Message(
        role,
        _content(number, role, row.get("content")),
        reasoning=_text_or_none(row.get("reasoning_content") or row.get("reasoning")),
        tool_calls=tuple(_call(number, call) for call in calls) if role == "assistant" else (),
        name=_text_or_none(row.get("name")),
        tool_call_id=_text_or_none(row.get("tool_call_id")) if role == "tool" else None,
    )


def _content(number: int, role: str, content: Any) -> Any:
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [None]
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if role == "assistant" and all(isinstance(text, str) for text in texts):
        return "".join(map(str, texts))
    if role == "assistant" or not all(isinstance(part, dict) for part in parts):
        raise _invalid(f"message {number} must have text, or a list of parts, as its content")
    return content  # which parts there may be is for the renderer to say


def _call(number: int, call: Any) -> ToolCall:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _invalid(f"message {number} has a tool call without function.name")
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = arguments
        arguments = parsed if isinstance(parsed, dict) else arguments
    return ToolCall(function["name"], arguments, _text_or_none(call.get("id")))


def _text_or_none(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _completion(message: Message, turn: Turn, model: str) -> dict[str, Any]:
    said: dict[str, Any] = {"role": "assistant", "content": message.content or (None if message.tool_calls else "")}
    if message.reasoning is not None:
        said["reasoning_content"] = message.reasoning
    if message.tool_calls:
        said["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _dumped(call)}}
            for call in message.tool_calls
        ]
    finish = "length" if turn.stop_reason is not StopReason.STOP else "tool_calls" if message.tool_calls else "stop"
    prompt, sampled = len(turn.prompt_ids), len(turn.sampled_ids)
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "message": said, "finish_reason": finish, "logprobs": None}],
        "usage": {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled},
        "weight_version": turn.last_version,
    }


def _dumped(call: ToolCall) -> str:
    return call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments, ensure_ascii=False)


def _chunks(whole: Mapping[str, Any], usage: bool) -> list[dict[str, Any]]:
    """A whole answer as a stream of three chunks: the role, what is said, how it ended."""
    head = {**{key: whole[key] for key in ("id", "created", "model")}, "object": "chat.completion.chunk"}
    [choice] = whole["choices"]
    said = {key: value for key, value in choice["message"].items() if key != "role" and value is not None}
    if "tool_calls" in said:
        said["tool_calls"] = [{"index": place, **call} for place, call in enumerate(said["tool_calls"])]
    deltas = [({"role": "assistant", "content": ""}, None), (said, None), ({}, choice["finish_reason"])]
    chunks = [{**head, "choices": [{"index": 0, "delta": delta, "finish_reason": end}]} for delta, end in deltas]
    return [*chunks, {**head, "choices": [], "usage": whole["usage"]}] if usage else chunks


def _invalid(message: str) -> Refused:
    return Refused(message, 400, "invalid_request")


def _refusal(message: str, status: int, code: str) -> Answer:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return Answer(status, {"error": {"message": message, "type": kind, "param": None, "code": code}})

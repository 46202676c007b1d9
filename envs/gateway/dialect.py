"""OpenAI chat requests to a session, and its answers as JSON or as the chunks of a stream. No HTTP here.

The session decides how tokens are sampled: `temperature`, `top_p`, `seed` and the like are read over, and so is
whatever else a program sends. `max_tokens` can only lower the session's limit. `n` above 1, `stop` and a
`response_format` are refused: a recorded turn is one whole message.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ConfigDict

from k3rl.envs.gateway.session import GatewaySession, Reply, TurnRequest
from k3rl.envs.recording import prompt_rows
from k3rl.tokens import openai
from k3rl.tokens.openai import MALFORMED, NO_TOKENS, RequestError

MAX_BODY_BYTES = 64 * 2**20
MODEL = "policy"
_INVALID = "invalid_request"
_BEGAN = int(time.time())


class _StreamOptions(openai.StreamOptions):
    model_config = ConfigDict(extra="ignore")


class ProgramRequest(openai.Conversation):
    """POST of /chat/completions by an agent program."""

    model_config = ConfigDict(extra="ignore")

    stream_options: _StreamOptions | None = None

    def request(self) -> TurnRequest:
        """What the session is asked. Raises RequestError for what it cannot record, ChatError."""
        if self.n not in (None, 1):
            raise RequestError(f"n is {self.n}; one answer is recorded per request", code=_INVALID, param="n")
        if self.stop:
            raise RequestError(
                "stop is not served here: a recorded turn is one whole message", code=_INVALID, param="stop"
            )
        if self.response_format is not None and self.response_format.get("type") != "text":
            raise RequestError(
                "response_format is not served here; only text is", code=_INVALID, param="response_format"
            )
        return TurnRequest(
            messages=self.as_messages(),
            tools=tuple(self.tools or ()),
            tool_choice=None if self.tool_choice == "auto" else self.tool_choice,
            max_tokens=self.limit,
        )


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
        return "text/event-stream", "".join(
            [*(openai.event(chunk) for chunk in self.chunks), openai.event(openai.DONE)]
        )


async def answer(session: GatewaySession, body: bytes, model: str = MODEL) -> Answer:
    """The answer to one POST of /chat/completions. Never raises for what a program sends.

    An exception of the policy is kept in `session.engine_error` and told as status 500.
    """
    try:
        if len(body) > MAX_BODY_BYTES:
            raise openai.too_large(MAX_BODY_BYTES)
        asked = ProgramRequest.model_validate_json(body)
        request = asked.request()
    except (RequestError, *MALFORMED) as error:
        return _refusal(error, _INVALID)
    try:
        reply = await session.complete(request)
    except (RequestError, *NO_TOKENS) as error:
        return _refusal(error, "invalid_conversation")
    except Exception as error:
        session.engine_error = f"{type(error).__name__}: {error}"
        return _refusal(RequestError(f"the engine failed: {session.engine_error}", status=500, code="engine_failed"))
    whole = _completion(reply, model)
    return Answer(200, whole, openai.chunks_of(whole, asked.include_usage) if asked.stream else None)


def models(model: str = MODEL) -> Answer:
    """The answer to GET /models."""
    return Answer(200, openai.model_list([openai.model_object(model, _BEGAN)]))


def not_found(what: str) -> Answer:
    """The answer to anything else."""
    message = f"{what} is not served here; see chat/completions and models"
    return _refusal(RequestError(message, status=404, code="not_found"))


def _completion(reply: Reply, model: str) -> dict[str, Any]:
    message, turn = reply.message, reply.turn
    calls = openai.tool_calls(message.tool_calls)
    choice = {
        "index": 0,
        "message": openai.chat_message(message.content, message.reasoning, calls),
        "finish_reason": openai.finish_reason(turn.stop_reason, calls),
        "logprobs": None,
    }
    return {
        **openai.head(f"chatcmpl-{uuid.uuid4().hex}", "chat.completion", int(time.time()), model),
        "choices": [choice],
        "usage": openai.usage(prompt_rows(turn), len(turn.sampled_ids), reply.cached_tokens),
        "weight_version": turn.last_version,
    }


def _refusal(error: Exception, code: str | None = None) -> Answer:
    """code: of an error that has none."""
    refused = openai.request_error(error, code)
    return Answer(refused.status, refused.body())

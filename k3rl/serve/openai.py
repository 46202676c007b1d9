"""The OpenAI dialects: request bodies to prompts and sampling parameters, sampled tokens to answers.

Nothing here knows of sockets or of the engine. Beyond the public fields, both dialects take `top_k`, `min_p`,
`stop_token_ids`, `ignore_eos`, `cache_salt`, `structured_outputs`, `return_token_ids` and `return_routes`; answers
then carry `prompt_token_ids` (one id for an image), and per choice `token_ids` and `routes` ({dtype, shape, data}:
base64 of int16 [T, M, k], an image counted as all its rows). In a stream each chunk carries those of its own tokens,
the first one those of the prompt, too.
"""

from __future__ import annotations

import base64
import codecs
import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from k3rl.config import K3Error
from k3rl.engine.protocol import Tokens
from k3rl.tokens import Tokenizer, xtml
from k3rl.tokens.images import encode_image, image_parts, image_prompts, part_source, url_bytes
from k3rl.types import Alternatives, Completion, Constraint, EncodedImage, Message, SamplingParams, StopReason

MAX_ALTERNATIVES = 20  # as in the dialect


class RequestError(K3Error, ValueError):
    """A request that cannot be served as it is. status: HTTP; code and param: of the OpenAI error object."""

    def __init__(self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


def error_object(message: str, status: int, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """The OpenAI error object."""
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False
    include_obfuscation: bool = False


class StructuredOutputs(BaseModel):
    """A constraint beyond `response_format`, in vLLM's words: exactly one of them."""

    model_config = ConfigDict(extra="forbid")

    json_schema: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    grammar: str | None = None
    choice: list[str] | None = Field(None, min_length=1)
    json_object: bool | None = None

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        if sum(value is not None for value in vars(self).values()) != 1:
            raise ValueError("give exactly one of json, regex, grammar, choice and json_object")
        return self

    def constraint(self) -> Constraint | None:
        """The constraint on the text."""
        if self.regex is not None:
            return Constraint("regex", self.regex)
        if self.grammar is not None:
            return Constraint("ebnf", self.grammar)
        if self.choice is not None:
            return Constraint(
                "ebnf", "root ::= " + " | ".join(json.dumps(text, ensure_ascii=False) for text in self.choice)
            )
        if self.json_object is not None:
            return Constraint("json_schema", _ANY_OBJECT) if self.json_object else None
        schema = self.json_schema
        return Constraint("json_schema", schema if isinstance(schema, str) else json.dumps(schema))


_ANY_OBJECT = '{"type": "object"}'


def format_constraint(response_format: Mapping[str, Any]) -> Constraint | None:
    """The constraint of an OpenAI `response_format`. Raises ValueError for one that is not known."""
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Constraint("json_schema", _ANY_OBJECT)
    outer = response_format.get("json_schema")
    if kind != "json_schema" or not isinstance(outer, Mapping):
        raise ValueError('response_format must be of type text, json_object or json_schema (with "json_schema")')
    return Constraint("json_schema", json.dumps(outer.get("schema", {"type": "object"})))


class Sampling(BaseModel):
    """What both dialects share. An unknown field is refused: a typo must not sample something else."""

    model_config = ConfigDict(extra="forbid", strict=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        """A field that is null is a field that is not there."""
        return {name: value for name, value in body.items() if value is not None} if isinstance(body, dict) else body

    model: str = ""
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    n: int | None = Field(None, ge=1, le=128)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    seed: int | None = None
    logit_bias: dict[int, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str = ""
    return_token_ids: bool = False
    return_routes: bool = False
    response_format: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    # Accounting of the caller's; they change nothing here.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="after")
    def _supported(self) -> Sampling:
        if self.presence_penalty or self.frequency_penalty:
            raise ValueError("penalties would make logprobs that no learner can recompute; leave them at 0")
        if self.response_format is not None and self.structured_outputs is not None:
            raise ValueError("response_format and structured_outputs both say what the text must match; keep one")
        return self

    def constraint(self) -> Constraint | None:
        """What the text must match. Raises ValueError."""
        if self.structured_outputs is not None:
            return self.structured_outputs.constraint()
        return None if self.response_format is None else format_constraint(self.response_format)

    def params(self, max_tokens: int, stop_id: int) -> SamplingParams:
        """Sampling parameters; `max_tokens` when the request names none, `stop_id` unless it ignores it."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k, 0),
            min_p=self.min_p,
            max_tokens=max_tokens if self.max_tokens is None else self.max_tokens,
            stop_ids=tuple(dict.fromkeys([*self.stop_token_ids, *([] if self.ignore_eos else [stop_id])])),
            stop=stop,
            seed=self.seed,
            logit_bias=tuple((self.logit_bias or {}).items()),
            return_routes=self.return_routes,
            cache_salt=self.cache_salt,
            constraint=self.constraint(),
            top_logprobs=self.alternatives(),
        )

    def alternatives(self) -> int:
        """How many likely tokens to name with each sampled one."""
        return 0


class ChatRequest(Sampling):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none", "required"] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "low", "high", "max"] | None = None
    thinking: bool = True
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_ALTERNATIVES)

    @field_validator("messages")
    @classmethod
    def _roles(cls, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """A developer message is what a system message was called before."""
        return [{**said, "role": "system"} if said.get("role") == "developer" else said for said in messages]

    @model_validator(mode="after")
    def _beside_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError(f"top_logprobs is {self.top_logprobs}; it needs logprobs to be true")
        return self

    def alternatives(self) -> int:
        return self.top_logprobs or 0

    @property
    def thinks(self) -> bool:
        """Whether the answer begins in the think channel."""
        return self.thinking and self.reasoning_effort != "none"

    def constraint(self) -> Constraint | None:
        """The constraint on the response channel of a whole turn, which may call the request's tools instead."""
        text = super().constraint()
        if text is None:
            return None
        calls = bool(self.tools) and self.tool_choice != "none"
        return dataclasses.replace(text, turn="think" if self.thinks else "response", calls=calls)

    def images(self, sees: bool, limit: int, pixel_limit: int) -> tuple[EncodedImage, ...]:
        """The images of the messages, in the order of their media blocks: `data:` URLs, nothing is downloaded.

        sees: whether the model has a vision tower; limit: images at most; pixel_limit: pixels of one at most. Raises
        XTMLError, ImageError or RequestError.
        """
        parts = image_parts(self.messages)
        if parts and not sees:
            raise RequestError(
                "the messages have images and this model has no vision tower; send text", param="messages"
            )
        if len(parts) > limit:
            raise RequestError(f"the messages have {len(parts)} images; at most {limit} are taken", param="messages")
        sources = [part_source(part) for part in parts]
        for source in sources:
            if not isinstance(source, str):
                raise RequestError(
                    f"an image part holds {type(source).__name__}; wanted image_url with a data: URL", param="messages"
                )
        return tuple(encode_image(url_bytes(source), pixel_limit) for source in sources)

    def prompt_ids(self, tokenizer: Tokenizer, images: Sequence[EncodedImage] = ()) -> list[int]:
        """The conversation with the generation prefix, one placeholder for each of `images`.

        Raises XTMLError or TokenizerError.
        """
        return tokenizer.encode_segments(
            xtml.render(
                self.messages,
                tools=self.tools,
                thinking=self.thinks,
                thinking_effort=None if self.reasoning_effort == "none" else self.reasoning_effort,
                tool_choice=self.tool_choice,
                response_format=self.response_format,
                image_prompts=image_prompts(images),
            )
        )

    def params(self, max_tokens: int, stop_id: int) -> SamplingParams:
        limits = [limit for limit in (self.max_completion_tokens, self.max_tokens) if limit is not None]
        return dataclasses.replace(super().params(max_tokens, stop_id), max_tokens=min(limits, default=max_tokens))


class TextRequest(Sampling):
    """POST /v1/completions. A prompt is text, token ids, or a list of either."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=MAX_ALTERNATIVES)
    echo: Literal[False] | None = None

    def alternatives(self) -> int:
        return self.logprobs or 0

    def prompts(self, tokenizer: Tokenizer) -> list[list[int]]:
        """Token ids of each prompt; text never gives a special id."""
        if isinstance(self.prompt, str):
            return [tokenizer.encode(self.prompt)]
        if all(isinstance(item, int) for item in self.prompt):
            return [[int(item) for item in self.prompt]]  # type: ignore[arg-type]
        return [tokenizer.encode(item) if isinstance(item, str) else list(item) for item in self.prompt]  # type: ignore[arg-type]


# ---- tokens to text


class TextCutter:
    """Bytes of one text as they come -> text that is safe to show: whole characters, and nothing of a stop string.

    Of several stop strings it is cut before the one that the engine stopped at (`StopStrings`).
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._done = False

    def feed(self, data: bytes, final: bool = False) -> str:
        """New text; what may be the beginning of a stop string is held back until `final`."""
        if self._done:
            return ""
        text = self._held + self._decoder.decode(data, final)
        cuts = [(place + len(stop), place) for stop in self._stop if (place := text.find(stop)) >= 0]
        if cuts:
            self._done = True
            return text[: min(cuts)[1]]
        hold = 0 if final else max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that a stop string begins with."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


class PlainText:
    """Sampled ids -> ("text", piece) pairs; special tokens stand for nothing.

    offsets: of each id, the whole characters before it.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._tokenizer, self._cutter = tokenizer, TextCutter(stop)
        self._whole = TextCutter(())
        self._characters = 0
        self.offsets: list[int] = []

    def feed(self, ids: Iterable[int], final: bool = False) -> list[tuple[str, str]]:
        """The text that these ids add; `final` with the last ones."""
        pieces = [token_bytes(self._tokenizer, token) for token in ids]
        for piece in pieces:
            self.offsets.append(self._characters)
            self._characters += len(self._whole.feed(piece))
        text = self._cutter.feed(b"".join(pieces), final)
        return [("text", text)] if text else []


class Channels:
    """Sampled ids of an assistant turn -> (channel, piece) pairs of "reasoning_content" and "content".

    Shows what there is of a turn that is cut off or malformed, too; tool calls are left to `xtml.parse`.
    """

    _NAMES = {"think": "reasoning_content", "response": "content"}

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], thinking: bool) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._channel: str | None = "reasoning_content" if thinking else "content"
        self._cutter = TextCutter(stop)
        self._header: bytes | None = None  # of the tag being read
        self._opens = False

    def feed(self, ids: Iterable[int], final: bool = False) -> list[tuple[str, str]]:
        """The text that these ids add, in order; `final` with the last ones."""
        found: list[tuple[str, str]] = []
        for token in ids:
            name = self._tokenizer.special_name(token) if token < self._tokenizer.vocab_size else ""
            if name is None and self._header is not None:
                self._header += self._tokenizer.decode_bytes([token])
            elif name is None:
                self._add(found, self._tokenizer.decode_bytes([token]), False)
            elif name in ("open", "close", "end_of_msg"):
                self._add(found, b"", True)
                self._header, self._opens, self._channel = b"", name == "open", None
            elif name == "sep" and self._header is not None:
                tag = self._header.decode("utf-8", "replace")
                self._header = None
                self._channel = self._NAMES.get(tag) if self._opens else None
                self._cutter = TextCutter(self._stop)
        if final:
            self._add(found, b"", True)
        return found

    def _add(self, found: list[tuple[str, str]], data: bytes, final: bool) -> None:
        if self._channel is not None and (text := self._cutter.feed(data, final)):
            found.append((self._channel, text))


def token_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """The bytes of an ordinary token; none for a special one or one that only the model knows."""
    if token >= tokenizer.vocab_size or tokenizer.special_name(token) is not None:
        return b""
    return tokenizer.decode_bytes([token])


# ---- answers


@dataclass(slots=True)
class Choice:
    """One sample as it grows: its text by channel, and at its end the completion that it came from."""

    index: int
    text: PlainText | Channels
    said: dict[str, str] = field(default_factory=dict)
    ids: list[int] = field(default_factory=list)

    def add(self, ids: Sequence[int], final: bool = False) -> list[tuple[str, str]]:
        """Takes sampled ids in; (channel, new text) pairs."""
        self.ids += ids
        pieces = self.text.feed(ids, final)
        for channel, piece in pieces:
            self.said[channel] = self.said.get(channel, "") + piece
        return pieces


def parse_turn(tokenizer: Tokenizer, ids: Sequence[int], thinking: bool) -> Message | None:
    """The message of a whole, valid assistant turn, else None."""
    message = xtml.parse(ids, tokenizer, thinking=thinking)
    return message if isinstance(message, Message) else None


def tool_calls(message: Message | None, answer_id: str, index: int) -> list[dict[str, Any]]:
    """The calls of a turn in OpenAI form; ids are unique within the answer."""
    calls = message.tool_calls if message is not None else ()
    return [
        {
            "id": f"call_{answer_id}_{index}_{place}",
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


def finish_reason(completion: Completion, calls: Sequence[Any] = ()) -> str:
    """OpenAI's word for why a completion ended."""
    if completion.stop_reason is StopReason.STOP:
        return "tool_calls" if calls else "stop"
    return "length" if completion.stop_reason is StopReason.LENGTH else str(completion.stop_reason)


def chat_logprobs(tokenizer: Tokenizer, event: Tokens) -> dict[str, Any]:
    """The logprobs object of the chat dialect."""

    def said(tokens: Alternatives) -> list[dict[str, Any]]:
        pieces = _pieces(tokenizer, [token for token, _ in tokens])
        return [
            {"token": piece, "logprob": _finite(value), "bytes": list(token_bytes(tokenizer, token))}
            for piece, (token, value) in zip(pieces, tokens, strict=True)
        ]

    sampled = said(tuple(zip(event.ids, event.logprobs, strict=True)))
    others = event.alternatives or [()] * len(sampled)
    content = [{**one, "top_logprobs": said(beside)} for one, beside in zip(sampled, others, strict=True)]
    return {"content": content, "refusal": None}


def text_logprobs(tokenizer: Tokenizer, event: Tokens, offsets: Sequence[int]) -> dict[str, Any]:
    """The logprobs object of the completions dialect; offsets: characters of text before each token."""
    beside = [
        dict(zip(_pieces(tokenizer, [token for token, _ in one]), (_finite(v) for _, v in one), strict=True))
        for one in event.alternatives
    ]
    return {
        "tokens": _pieces(tokenizer, event.ids),
        "token_logprobs": [_finite(value) for value in event.logprobs],
        "top_logprobs": beside or None,
        "text_offset": list(offsets),
    }


def _pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    return [tokenizer.pieces([token])[0] if token < tokenizer.vocab_size else f"<{token}>" for token in ids]


def _finite(value: float) -> float:
    return value if math.isfinite(value) else -9999.0  # JSON has no infinity; the number is the dialect's


def extras(request: Sampling, completion: Completion) -> dict[str, Any]:
    """What a choice carries beyond the dialect."""
    found: dict[str, Any] = {"weight_version": completion.weight_version}
    if request.return_token_ids:
        found["token_ids"] = list(completion.token_ids)
    if completion.stop_string is not None:
        found["stop_reason"] = completion.stop_string
    if completion.routes is not None:
        found["routes"] = encoded_routes(completion.routes)
    return found


def encoded_routes(routes: np.ndarray) -> dict[str, Any]:
    """Routes int16 [T, M, k] as JSON."""
    data = base64.b64encode(routes.astype("<i2").tobytes()).decode()
    return {"dtype": "int16", "shape": list(routes.shape), "data": data}


def usage(prompts: Sequence[int], completions: Sequence[Completion]) -> dict[str, Any]:
    """Token counts; `prompts`: those of each prompt, an image counted as all its rows.

    A prompt counts once however many samples share it; cached tokens likewise.
    """
    given, sampled = sum(prompts), sum(len(completion.token_ids) for completion in completions)
    each = max(len(completions) // max(len(prompts), 1), 1)
    cached = sum(completion.cached_tokens for completion in completions[::each])
    return {
        "prompt_tokens": given,
        "completion_tokens": sampled,
        "total_tokens": given + sampled,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def validation_message(errors: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """(message, param) of the first of pydantic's errors."""
    first = errors[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where or 'the body'}: {first['msg']}", where

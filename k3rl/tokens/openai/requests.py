"""Request bodies: what may stand in one, and the prompt and the sampling parameters that it stands for."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from k3rl.tokens import xtml
from k3rl.tokens.images import encode_image, image_parts, image_prompts, part_source, url_bytes
from k3rl.tokens.message_keys import LOSS_KEYS, XTMLError
from k3rl.tokens.openai.errors import RequestError
from k3rl.tokens.tokenizer import Tokenizer
from k3rl.tokens.xtml_normalize import normalize
from k3rl.types import Constraint, EncodedImage, Message, SamplingParams, ToolCall

MAX_ALTERNATIVES = 20  # as in the dialect
MAX_SAMPLES = 128  # of one prompt
MAX_STOPS = 64  # each is looked for in every piece of text
MAX_STOP_CHARACTERS = 1024
MAX_STOP_IDS = 256
MAX_BIASES = 8192
MAX_CHOICES = 4096
StopText: TypeAlias = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Count: TypeAlias = Annotated[int, Field(strict=True, ge=1)]


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
    choice: list[str] | None = Field(None, min_length=1, max_length=MAX_CHOICES)
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


class Body(BaseModel):
    """What every body may have. A field that is null is a field that is not there."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        return {name: value for name, value in body.items() if value is not None} if isinstance(body, dict) else body

    model: str = ""
    max_tokens: Count | None = None
    n: int | None = Field(None, ge=1, le=MAX_SAMPLES)
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def limit(self) -> int | None:
        """Tokens to sample at most, where the body names a number."""
        return self.max_tokens


class Conversation(Body):
    """What every body of the chat dialect may have."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: Count | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none", "required"] | None = None

    @field_validator("messages")
    @classmethod
    def _roles(cls, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """A developer message is what a system message was called before; loss is no matter of a request."""
        for number, said in enumerate(messages):
            if key := next((key for key in LOSS_KEYS if said.get(key) is not None), None):
                raise ValueError(f"message {number} has the key {key!r}, which says what is trained; leave it out")
        return [{**said, "role": "system"} if said.get("role") == "developer" else said for said in messages]

    @property
    def limit(self) -> int | None:
        limits = (self.max_completion_tokens, self.max_tokens)
        return min((limit for limit in limits if limit is not None), default=None)

    def as_messages(self) -> tuple[Message, ...]:
        """The messages as values, which say what `xtml.render` makes of the rows.

        Raises XTMLError, also for tools that a system message declares: a `Message` has none.
        """
        return tuple(_message(row, number) for number, row in enumerate(self.messages))


def _message(row: Mapping[str, Any], number: int) -> Message:
    if row.get("role") == "system" and row.get("tools"):
        raise XTMLError(f"message {number} declares tools; declare them with the request", "tools")
    [said] = normalize([row], number)
    content: Any = row.get("content") or ""
    if said.role == "assistant" and not isinstance(content, str):
        texts = [part.text for part in said.parts if part.text is not None]
        if len(texts) < len(said.parts):
            raise XTMLError(f"message {number} shows an image; an assistant message is text")
        content = "".join(texts)
    calls = tuple(ToolCall(call.name, call.arguments if call.raw is None else call.raw, call.id) for call in said.calls)
    call_id = said.call_id if said.role == "tool" else None
    return Message(said.role, content, said.reasoning or None, calls, said.name, call_id)


class Sampling(Body):
    """What says how a sample is drawn. An unknown field is refused: a typo must not sample something else."""

    model_config = ConfigDict(extra="forbid")

    temperature: float | None = Field(None, ge=0, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    stop_token_ids: list[int] = Field([], max_length=MAX_STOP_IDS)
    ignore_eos: bool = False
    seed: int | None = None
    logit_bias: dict[int, float] | None = Field(None, max_length=MAX_BIASES)
    cache_salt: str = ""
    return_token_ids: bool = False
    return_routes: bool = False
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
            max_tokens=max_tokens if self.limit is None else self.limit,
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


class FunctionName(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str = Field(min_length=1)


class NamedTool(BaseModel):
    """A tool that the turn has to call."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["function"] = "function"
    function: FunctionName


class ChatRequest(Conversation, Sampling):
    """POST /v1/chat/completions."""

    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None  # type: ignore[assignment]
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "low", "high", "max"] | None = None
    thinking: bool = True
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_ALTERNATIVES)

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
        """The constraint on the response channel of a whole turn, which may call the request's tools instead.

        Of a named tool: that the turn calls it.
        """
        text = super().constraint()
        if isinstance(self.tool_choice, NamedTool):
            if text is not None:
                raise ValueError("a named tool_choice leaves no response for a response_format; keep one of them")
            tool = json.dumps(self._tool(self.tool_choice.function.name))
            return Constraint("tool_call", tool, turn="think" if self.thinks else "response")
        if text is None:
            return None
        calls = bool(self.tools) and self.tool_choice != "none"
        return dataclasses.replace(text, turn="think" if self.thinks else "response", calls=calls)

    def _tool(self, name: str) -> dict[str, Any]:
        """{name, parameters} of a tool of the request. Raises ValueError where it has none of that name."""
        declared = [tool.get("function", tool) for tool in self.tools or ()]
        for tool in declared:
            if isinstance(tool, dict) and tool.get("name") == name:
                return {"name": name, "parameters": tool.get("parameters")}
        names = ", ".join(str(tool.get("name")) for tool in declared if isinstance(tool, dict)) or "none"
        raise ValueError(f"tool_choice names {name!r:.80}, and the request has the tools: {names}")

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
                tool_choice="required" if isinstance(self.tool_choice, NamedTool) else self.tool_choice,
                response_format=self.response_format,
                image_prompts=image_prompts(images),
            )
        )


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

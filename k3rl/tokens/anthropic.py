"""Anthropic's dialect: bodies of POST /v1/messages as chat requests, and the answers to those as messages or events.

A request becomes a `k3rl.tokens.openai.ChatRequest`, so that both dialects are sampled alike; what has no place there
is refused by name. `thinking` is off unless it is enabled, and its budget sets nothing. Thinking blocks of an answer
have an empty signature: nothing here checks one.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from k3rl.tokens.openai import ChatRequest, RequestError, one_line

_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_KINDS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}


class ToolChoice(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1)
    display: str | None = None


class MessagesRequest(BaseModel):
    """POST /v1/messages."""

    model_config = ConfigDict(extra="forbid")

    model: str
    max_tokens: int = Field(ge=1)
    messages: list[dict[str, Any]] = Field(min_length=1)
    system: str | list[dict[str, Any]] | None = None
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool = False
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    # Accounting of the caller's; they change nothing here.
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None

    def chat(self) -> ChatRequest:
        """The same request in the chat dialect. Raises RequestError or ValidationError."""
        messages = [said for number, message in enumerate(self.messages) for said in _messages(message, number)]
        if self.system:
            messages.insert(0, {"role": "system", "content": _text(self.system, "system")})
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": self.max_tokens,
            "messages": messages,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop": self.stop_sequences or None,
            "stream": self.stream,
            "stream_options": {"include_usage": True} if self.stream else None,
            "tools": [_tool(tool, number) for number, tool in enumerate(self.tools)] if self.tools else None,
            "tool_choice": self._choice(),
            "thinking": self.thinking is not None and self.thinking.type != "disabled",
        }
        return ChatRequest.model_validate({name: value for name, value in body.items() if value is not None})

    def _choice(self) -> Any:
        chosen = self.tool_choice
        if chosen is None:
            return None
        if chosen.type != "tool":
            return {"any": "required"}.get(chosen.type, chosen.type)
        if chosen.name is None:
            raise RequestError("tool_choice of the type tool has no name", param="tool_choice")
        return {"type": "function", "function": {"name": chosen.name}}


def _tool(tool: Mapping[str, Any], number: int) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom" or not isinstance(tool.get("name"), str):
        raise RequestError(f"tools.{number} is no tool of the caller's; wanted name and input_schema", param="tools")
    function = {"name": tool["name"], "parameters": tool.get("input_schema") or {"type": "object"}}
    if tool.get("description"):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _text(value: Any, where: str) -> str:
    """Text, or text blocks as one text. Raises RequestError for other blocks."""
    if isinstance(value, str):
        return value
    for block in value:
        if not isinstance(block, Mapping) or block.get("type") != "text" or not isinstance(block.get("text"), str):
            raise RequestError(f"{where} has a block of the type {_kind(block)!r}; wanted text", param="messages")
    return "".join(block["text"] for block in value)


def _kind(block: Any) -> Any:
    return block.get("type") if isinstance(block, Mapping) else type(block).__name__


def _messages(message: Mapping[str, Any], number: int) -> list[dict[str, Any]]:
    """A message as those of the chat dialect: results of tools first, each on its own."""
    where, role, content = f"message {number}", message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise RequestError(f"{where} has the role {role!r:.40}; wanted user or assistant", param="messages")
    if unknown := sorted(set(message) - {"role", "content"}):
        raise RequestError(f"{where} has the key {unknown[0]!r:.60}; wanted role and content", param="messages")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list) or not content:
        raise RequestError(f"{where} says nothing: content is text, or a list of blocks", param="messages")
    return _answered(content, where) if role == "assistant" else _asked(content, where)


def _asked(blocks: list[Any], where: str) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    for block in blocks:
        kind = _kind(block)
        if kind == "tool_result":
            shown = [_part(inner, where) for inner in _blocks(block.get("content"))]
            said = {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": shown}
            results.append(said)
        else:
            parts.append(_part(block, where))
    return [*results, {"role": "user", "content": parts}] if parts else results


def _blocks(content: Any) -> list[Any]:
    if content is None:
        return []
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _part(block: Any, where: str) -> dict[str, Any]:
    kind = _kind(block)
    if kind == "text" and isinstance(block.get("text"), str):
        return {"type": "text", "text": block["text"]}
    source = block.get("source") if kind == "image" else None
    if isinstance(source, Mapping) and source.get("type") == "base64":
        url = f"data:{source.get('media_type')};base64,{source.get('data')}"
        return {"type": "image_url", "image_url": {"url": url}}
    raise RequestError(f"{where} has a block of the type {kind!r:.40}, not served here", param="messages")


def _answered(blocks: list[Any], where: str) -> list[dict[str, Any]]:
    said: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: list[dict[str, Any]] = []
    for block in blocks:
        kind = _kind(block)
        if kind == "text" and isinstance(block.get("text"), str):
            said["content"] += block["text"]
        elif kind == "thinking" and isinstance(block.get("thinking"), str):
            said["reasoning_content"] = said.get("reasoning_content", "") + block["thinking"]
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input") or {}}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        else:
            raise RequestError(
                f"{where} has a block of the type {kind!r:.40} that is not served here", param="messages"
            )
    return [{**said, "tool_calls": calls} if calls else said]


# ------------------------------------------------------------------------------------------------------- answers


def answer(whole: Mapping[str, Any]) -> dict[str, Any]:
    """The message of a chat completion with one choice."""
    [choice] = whole["choices"]
    said, content = choice["message"], list[dict[str, Any]]()
    if said.get("reasoning_content"):
        content.append({"type": "thinking", "thinking": said["reasoning_content"], "signature": ""})
    if said.get("content"):
        content.append({"type": "text", "text": said["content"]})
    content += [_use(call) for call in said.get("tool_calls") or ()]
    ended = _ended(choice)
    return {**_head(whole), "content": content, **ended, "usage": _usage(whole["usage"])}


def _head(whole: Mapping[str, Any]) -> dict[str, Any]:
    name = str(whole["id"]).rpartition("-")[2]
    return {"id": f"msg_{name}", "type": "message", "role": "assistant", "model": whole["model"]}


def _ended(choice: Mapping[str, Any]) -> dict[str, Any]:
    stop = choice.get("stop_reason")  # the stop string, where one ended the text
    reason = "stop_sequence" if stop is not None else _STOPS.get(choice["finish_reason"], choice["finish_reason"])
    return {"stop_reason": reason, "stop_sequence": stop}


def _use(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    try:
        given = json.loads(function["arguments"])
    except ValueError:
        given = None
    arguments = given if isinstance(given, dict) else {"arguments": function["arguments"]}
    return {"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments}


def _usage(counts: Mapping[str, Any]) -> dict[str, Any]:
    cached = (counts.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return {
        "input_tokens": counts["prompt_tokens"] - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": counts["completion_tokens"],
    }


async def events(chunks: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[dict[str, Any], None]:
    """The events of a message, from the chunks of a chat stream of one choice with its usage at the end."""
    index, open_kind, ended = -1, "", dict[str, Any]()
    usage = {"input_tokens": 0, "output_tokens": 0}
    begun = False
    async for chunk in chunks:
        if not begun:
            begun = True
            empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
            yield {"type": "message_start", "message": {**_head(chunk), **empty}}
        if chunk.get("usage"):
            usage = _usage(chunk["usage"])
        for choice in chunk["choices"]:
            for kind, block, delta in _deltas(choice["delta"]):
                if kind != open_kind or kind == "tool_use":
                    if open_kind:
                        yield {"type": "content_block_stop", "index": index}
                    index, open_kind = index + 1, kind
                    yield {"type": "content_block_start", "index": index, "content_block": block}
                yield {"type": "content_block_delta", "index": index, "delta": delta}
            if choice["finish_reason"] is not None:
                ended = _ended(choice)
    if open_kind:
        yield {"type": "content_block_stop", "index": index}
    yield {"type": "message_delta", "delta": ended, "usage": usage}
    yield {"type": "message_stop"}


def _deltas(delta: Mapping[str, Any]) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """(kind, the block as it begins, what is new in it) of each channel of a chunk."""
    found: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
    if thought := delta.get("reasoning_content"):
        begin = {"type": "thinking", "thinking": "", "signature": ""}
        found.append(("thinking", begin, {"type": "thinking_delta", "thinking": thought}))
    if text := delta.get("content"):
        found.append(("text", {"type": "text", "text": ""}, {"type": "text_delta", "text": text}))
    for call in delta.get("tool_calls") or ():
        used = _use(call)
        given = json.dumps(used["input"], ensure_ascii=False)
        found.append(("tool_use", {**used, "input": {}}, {"type": "input_json_delta", "partial_json": given}))
    return found


def event(data: Mapping[str, Any]) -> str:
    """One server-sent event, named by its type."""
    return f"event: {data['type']}\ndata: {one_line(data)}\n\n"


def error_object(message: str, status: int) -> dict[str, Any]:
    """The error object of an HTTP status."""
    kind = _KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}

"""One request being answered: its samples as they grow, and the OpenAI objects that tell of them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from k3rl.engine import Tokens
from k3rl.serve.driver import Stream
from k3rl.tokens import Tokenizer, chat_format, openai
from k3rl.tokens.openai import Channels, ChatRequest, K2Channels, PlainText, TextRequest
from k3rl.types import Completion, Message


@dataclass(slots=True)
class Choice:
    """One sample as it grows: its text by channel, and at its end the completion that it came from."""

    index: int
    text: PlainText | Channels | K2Channels
    said: dict[str, str] = field(default_factory=dict)
    ids: list[int] = field(default_factory=list)

    def add(self, ids: Sequence[int], final: bool = False) -> dict[str, str]:
        """Takes sampled ids in; the new text by channel. `final` with the last ones."""
        self.ids += ids
        new: dict[str, str] = {}
        for channel, piece in self.text.feed(ids, final):
            new[channel] = new.get(channel, "") + piece
        for channel, piece in new.items():
            self.said[channel] = self.said.get(channel, "") + piece
        return new


@dataclass(slots=True)
class Job:
    """prompts: token ids; rows: those of each prompt in the model; streams and choices: one of each per sample."""

    body: ChatRequest | TextRequest
    tokenizer: Tokenizer
    model: str
    prompts: list[list[int]]
    rows: list[int]
    streams: list[Stream] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    began: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.id = self.id or ("chatcmpl-" if self.chat else "cmpl-") + uuid.uuid4().hex

    @property
    def chat(self) -> bool:
        return isinstance(self.body, ChatRequest)

    @property
    def thinks(self) -> bool:
        """Whether the answer begins in the think channel."""
        return isinstance(self.body, ChatRequest) and self.body.thinks and chat_format(self.tokenizer).thinks

    def add(self, stream: Stream) -> None:
        """One more sample."""
        stop = stream.params.stop
        text = openai.channels(self.tokenizer, stop, self.thinks) if self.chat else PlainText(self.tokenizer, stop)
        self.choices.append(Choice(len(self.choices), text))
        self.streams.append(stream)

    def usage(self) -> dict[str, Any]:
        """Token counts of the samples that are done. A prompt counts once however many share it, cached or not."""
        done = [stream.completion for stream in self.streams if stream.completion is not None]
        each = max(len(done) // max(len(self.rows), 1), 1)
        return openai.usage(
            sum(self.rows),
            sum(len(completion.token_ids) for completion in done),
            sum(completion.cached_tokens for completion in done[::each]),
        )

    # ---- whole

    def answer(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """The answer of a request that is not streamed."""
        answer = openai.head(self.id, "chat.completion" if self.chat else "text_completion", self.created, self.model)
        answer["choices"] = [
            self._whole(choice, completion) for choice, completion in zip(self.choices, completions, strict=True)
        ]
        if self.body.return_token_ids:
            answer["prompt_token_ids"] = self.prompts[0] if len(self.prompts) == 1 else self.prompts
        return {**answer, "usage": self.usage()}

    def _whole(self, choice: Choice, completion: Completion) -> dict[str, Any]:
        choice.add(completion.token_ids, final=True)
        sampled = Tokens(completion.token_ids, completion.logprobs, completion.top_logprobs or ())
        own = {**self._logprobs(choice, sampled), **self._extras(completion)}
        if self.body.return_token_ids:
            own["token_ids"] = list(completion.token_ids)
        if completion.routes is not None:
            own["routes"] = openai.encoded_routes(completion.routes)
        if not self.chat:
            finish = openai.finish_reason(completion.stop_reason)
            return {**openai.text_choice(choice.index, choice.said.get("text", ""), finish), **own}
        calls = self._calls(choice)
        reasoning = choice.said.get("reasoning_content", "") if self.thinks else None
        message = openai.chat_message(choice.said.get("content", ""), reasoning, calls)
        finish = openai.finish_reason(completion.stop_reason, calls)
        return {"index": choice.index, "message": message, "logprobs": None, "finish_reason": finish, **own}

    # ---- streamed

    def chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        """A chunk with this choice."""
        return {**self._chunk_head(), "choices": [choice]}

    def usage_chunk(self) -> dict[str, Any]:
        """The chunk that ends a stream whose client asked for the usage."""
        return {**self._chunk_head(), "choices": [], "usage": self.usage()}

    def new_tokens(self, choice: Choice, tokens: Tokens) -> dict[str, Any]:
        """The chunk of tokens that came."""
        said = choice.add(tokens.ids)
        if self.chat:
            told = openai.delta_choice(choice.index, said)
        else:
            told = openai.text_choice(choice.index, said.get("text", ""))
        if self.body.return_token_ids:
            told["token_ids"] = list(tokens.ids)
        if tokens.routes is not None:
            told["routes"] = openai.encoded_routes(tokens.routes)
        return self.chunk({**told, **self._logprobs(choice, tokens)})

    def end(self, choice: Choice, completion: Completion) -> dict[str, Any]:
        """The last chunk of a choice; ids and routes came with those before."""
        said: dict[str, Any] = choice.add((), final=True)
        extras = self._extras(completion)
        if not self.chat:
            finish = openai.finish_reason(completion.stop_reason)
            return self.chunk({**openai.text_choice(choice.index, said.get("text", ""), finish), **extras})
        calls = self._calls(choice)
        if calls:
            said["tool_calls"] = calls
        finish = openai.finish_reason(completion.stop_reason, calls)
        return self.chunk({**openai.delta_choice(choice.index, said, finish), **extras})

    def _chunk_head(self) -> dict[str, Any]:
        return openai.head(
            self.id, "chat.completion.chunk" if self.chat else "text_completion", self.created, self.model
        )

    # ---- parts of both

    @staticmethod
    def _extras(completion: Completion) -> dict[str, Any]:
        """What the end of a choice carries beyond the dialect."""
        extras: dict[str, Any] = {"weight_version": completion.weight_version}
        if completion.stop_string is not None:
            extras["stop_reason"] = completion.stop_string
        return extras

    def _logprobs(self, choice: Choice, tokens: Tokens) -> dict[str, Any]:
        """Of the last tokens of a choice, where they are asked for."""
        given = tokens.ids, tokens.logprobs, tokens.alternatives
        if isinstance(choice.text, Channels | K2Channels):
            return {"logprobs": openai.chat_logprobs(self.tokenizer, *given)} if self.body.logprobs else {}
        if self.body.logprobs is None:
            return {}
        offsets = choice.text.offsets[len(choice.ids) - len(tokens.ids) :]
        return {"logprobs": openai.text_logprobs(self.tokenizer, *given, offsets)}

    def _calls(self, choice: Choice) -> list[dict[str, Any]]:
        """The tool calls of a whole, valid turn; ids are unique within the answer."""
        message = chat_format(self.tokenizer).parse(choice.ids, thinking=self.thinks)
        calls = message.tool_calls if isinstance(message, Message) else ()
        return openai.tool_calls(calls, f"{self.id[-8:]}_{choice.index}")

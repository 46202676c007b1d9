"""What goes over the wire to a vLLM server and back: request bodies, streamed chunks, errors. No sockets here.

The endpoint is `POST /inference/v1/generate`, vLLM's own token-in-token-out dialect, because it alone gives the
sampling masks of top-p, top-k and min-p (`sampling_mask`) beside ids, logprobs, routed experts and weight versions. Its
usage, finish reasons, errors and events are those of the OpenAI dialect (`k3rl.tokens.openai`).
"""

from __future__ import annotations

import base64
import hashlib
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from k3rl.engine.prompts import check_numbers
from k3rl.engine.protocol import ContextExceeded, EngineError, InvalidRequest
from k3rl.tokens import openai
from k3rl.types import Completion, SamplingParams, StopReason

GENERATE = "/inference/v1/generate"
_ID_PREFIX = "generate-tokens-"  # vLLM's, before the id that a request brings

_BIAS = 100.0  # what the OpenAI dialect allows on either side; vLLM clamps to it at some of its doors
_TEMPERATURES = (0.01, 2.0)  # vLLM raises what is below to 0.01 and refuses what is above
_REASONS = {word: reason for reason, word in openai.FINISH_REASONS.items()} | {"abort": StopReason.ABORTED}


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a handshake found. vllm_version of the server; model: the name it serves; max_context: tokens of prompt and
    answer; sampling_mask, routed_experts: whether an answer carries them; config: `/server_info`, as JSON."""

    vllm_version: str
    model: str
    max_context: int
    sampling_mask: bool
    routed_experts: bool
    config: Mapping[str, Any] = field(repr=False)


def engine_id(request_id: str) -> str:
    """The name under which vLLM knows a generate request of this id."""
    return _ID_PREFIX + request_id


def cuts(params: SamplingParams) -> bool:
    """Whether some tokens cannot be drawn, so that a learner needs the sampling mask."""
    return params.temperature > 0 and (params.top_p < 1 or params.top_k > 0 or params.min_p > 0)


def check_room(length: int, max_tokens: int, server: ServerInfo) -> None:
    """Raises ContextExceeded where a prompt of this length leaves no room for `max_tokens`."""
    room = server.max_context - length
    if max_tokens > room:
        raise ContextExceeded(
            f"{length} prompt tokens and max_tokens {max_tokens} exceed the context of "
            f"{server.max_context}; ask for at most {max(room, 0)}"
        )


def check_options(params: SamplingParams, server: ServerInfo, vocabulary: int) -> None:
    """Raises InvalidRequest for what vLLM cannot do exactly as asked, or would change without a word."""
    check_numbers(params)
    low, high = _TEMPERATURES
    if params.temperature != 0 and not low <= params.temperature <= high:
        raise InvalidRequest(f"temperature is {params.temperature}; vLLM samples at 0 or in [{low}, {high}]")
    if params.top_logprobs:
        raise InvalidRequest("top_logprobs are not taken from vLLM; use the k3rl engine, or leave them at 0")
    if cuts(params) and not server.sampling_mask:
        raise InvalidRequest(
            "top_p, top_k and min_p need the sampling masks, which this vLLM does not return; "
            "start it with --return-sampling-mask, or sample without them"
        )
    if params.return_routes and not server.routed_experts:
        raise InvalidRequest("this vLLM returns no routed experts; start it with --enable-return-routed-experts")
    if params.constraint is not None:
        raise InvalidRequest("the vLLM engine takes no schemas or grammars; use the k3rl engine for constrained text")
    if params.adapter:
        raise InvalidRequest(f"the vLLM engine serves no adapters, such as {params.adapter!r}; use the k3rl engine")
    for token, bias in params.logit_bias:
        if not 0 <= token < vocabulary:
            raise InvalidRequest(f"logit_bias names token id {token}, outside the vocabulary of {vocabulary}")
        if not -_BIAS <= bias <= _BIAS:
            raise InvalidRequest(f"logit_bias of token {token} is {bias}; vLLM takes [{-_BIAS:g}, {_BIAS:g}] only")


def generate_body(
    request_id: str, model: str, prompt: Sequence[int], params: SamplingParams, seed: int, salt: str
) -> dict[str, Any]:
    """The JSON of one streamed request. seed in [0, 2^63); salt: of the prefix cache, the weight version in it."""
    sampling: dict[str, Any] = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "max_tokens": params.max_tokens,
        "stop_token_ids": list(params.stop_ids),
        "ignore_eos": True,  # only what the caller names ends a sample
        "seed": seed,
        "logprobs": 0,  # of the sampled token alone
        "detokenize": bool(params.stop),
        "watermarking": False,
    }
    if params.stop:
        sampling["stop"] = list(params.stop)
    if params.logit_bias:
        sampling["logit_bias"] = {str(token): bias for token, bias in params.logit_bias}
    return {
        "request_id": request_id,
        "model": model,
        "token_ids": list(prompt),
        "sampling_params": sampling,
        "cache_salt": salt,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


class Answer:
    """One streamed answer as it grows. Raises EngineError for whatever does not fit together."""

    def __init__(self, prompt_tokens: int, params: SamplingParams) -> None:
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.finish: str | None = None
        self._prompt_tokens, self._params = prompt_tokens, params
        self._mask: list[list[int]] = []
        self._routes: str | None = None
        self._stop: int | str | None = None
        self._cached = 0
        self.spans: list[tuple[str, int, int]] = []

    def feed(self, chunk: Mapping[str, Any]) -> None:
        """Takes one event of the stream in."""
        if "error" in chunk:
            raise error_of(int(chunk["error"].get("code") or 500), chunk)
        self._cached = openai.cached_tokens(chunk) or self._cached
        for choice in chunk.get("choices", ()):
            ids = [int(token) for token in choice.get("token_ids") or ()]
            content = (choice.get("logprobs") or {}).get("content") or []
            if len(ids) != len(content):
                raise EngineError(f"vLLM sent {len(ids)} token ids with {len(content)} logprobs")
            for token, entry in zip(ids, content, strict=True):
                value = float(entry["logprob"])
                if entry.get("token_id", token) != token:
                    raise EngineError(f"vLLM sent the logprob of token {entry['token_id']} with token {token}")
                if not openai.LEAST_LOGPROB < value <= 0.0 + 1e-3:
                    raise EngineError(f"vLLM gave token {token} the logprob {value}; its logits are broken")
                self.logprobs.append(min(value, 0.0))
            self.ids += ids
            self._mask += choice.get("sampling_mask") or []
            self._routes = choice.get("routed_experts") or self._routes
            self._stop = choice.get("stop_reason", self._stop)
            self.finish = choice.get("finish_reason") or self.finish
            self.spans += [(str(s["version"]), s["start"], s["end"]) for s in choice.get("weight_versions") or ()]

    def completion(self, versions: Sequence[int], moe_layers: Sequence[int], top_k: int) -> Completion:
        """The finished completion. versions: of each of `spans`, or the served one when nothing was sampled."""
        if self.finish not in _REASONS:
            raise EngineError(f"vLLM ended the request with finish_reason {self.finish!r}")
        sampling_mask = None
        if cuts(self._params) and self.ids:
            if len(self._mask) != len(self.ids):
                raise EngineError(f"vLLM sent {len(self._mask)} sampling masks for {len(self.ids)} tokens")
            sampling_mask = tuple(np.sort(np.asarray(ids, np.int64)) for ids in self._mask)
        return Completion(
            token_ids=tuple(self.ids),
            logprobs=tuple(self.logprobs),
            stop_reason=_REASONS[self.finish],
            weight_version=versions[-1],
            first_version=versions[0],
            routes=self._decoded_routes(moe_layers, top_k) if self._params.return_routes else None,
            sampling_mask=sampling_mask,
            stop_string=self._stop if isinstance(self._stop, str) else None,
            cached_tokens=self._cached,
        )

    def _decoded_routes(self, moe_layers: Sequence[int], top_k: int) -> np.ndarray | None:
        """int16 [prompt + sampled - 1, M, k]; None when nothing was sampled."""
        if not self.ids:
            return None
        if self._routes is None:
            raise EngineError("vLLM sent no routed experts with this answer")
        found = decode_array(self._routes)
        rows = self._prompt_tokens + len(self.ids) - 1
        if found.ndim == 3 and found.shape[1] > len(moe_layers) and found.shape[1] > max(moe_layers):
            found = found[:, list(moe_layers)]  # vLLM has a row for every layer, a dense one too
        if found.shape != (rows, len(moe_layers), top_k):
            raise EngineError(
                f"vLLM sent routed experts of shape {found.shape}; wanted {(rows, len(moe_layers), top_k)}"
            )
        return found.astype(np.int16)


def decode_array(text: str) -> np.ndarray:
    """base64 of a .npy file -> the array; pickled objects are refused. Raises EngineError."""
    try:
        return np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    except ValueError as error:
        raise EngineError(f"vLLM sent an array that cannot be read: {error}") from error


def error_of(status: int, body: Any) -> EngineError:
    """The typed error of an HTTP answer: 400, 413 and 422 are the request's fault, everything else the engine's."""
    text = f"vLLM answered {status}: {str(openai.error_message(body))[:1000]}"
    return InvalidRequest(text) if status in (400, 413, 422) else EngineError(text)


def wire_seed(seed: int) -> int:
    """A 64-bit word as vLLM takes it: not negative, since -1 means no seed there."""
    return seed & 0x7FFFFFFFFFFFFFFF


def wire_salt(label: str, salt: str) -> str:
    """The prefix-cache salt of a weight version and a caller's own salt, in characters that vLLM takes."""
    return f"{label}-{hashlib.sha256(salt.encode()).hexdigest()[:32]}" if salt else label


def finite_seconds(name: str, value: float) -> float:
    """Raises ValueError unless it is a time that ends."""
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} is {value}; every wait needs a deadline in seconds")
    return value

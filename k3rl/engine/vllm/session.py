"""What a client and one vLLM server agree on: the served model, and names of requests and of weight versions.

Names hold a number of the session, so that a server that was started again cannot answer for the one before.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from k3rl.data import ImagePatches
from k3rl.engine.prompts import checked_ids
from k3rl.engine.protocol import EngineError, InvalidRequest, Prompt
from k3rl.engine.vllm import wire
from k3rl.engine.vllm.client import Client, EngineLost, IncompatibleServer, handshake
from k3rl.engine.vllm.weights import BACKEND
from k3rl.types import SamplingParams

_CANARY_TOKENS = 4


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Of the model being trained: its vocabulary, the depth indexes of its M MoE layers, experts per token k."""

    vocab_size: int
    moe_layers: Sequence[int]
    experts_per_token: int


class Session:
    """Opened by a handshake. model: the served name, needed when there are several; require: what the handshake
    insists on."""

    def __init__(self, client: Client, shape: ModelShape, model: str | None, require: Collection[str]) -> None:
        self._client, self.shape, self._model, self._require = client, shape, model, tuple(require)
        self.version = 0  # of the weights that sample the next token
        self._run = ""
        self._versions: dict[str, int] = {}  # of every label that was set

    @property
    def updates_weights(self) -> bool:
        """Whether the server takes weight updates."""
        return "weights" in self._require

    def shake_hands(self, version: int) -> None:
        """A fresh session with a server whose weights are `version`. Raises IncompatibleServer."""
        self.server = handshake(self._client, self._model, self._require, BACKEND)
        self._versions.clear()
        self.renumber(version)
        self.register(version)

    def renumber(self, version: int) -> tuple[int, str]:
        """Versions count from this one on, under other names -> what `restore` takes to undo it."""
        before = self.version, self._run
        self.version, self._run = version, uuid.uuid4().hex[:12]
        return before

    def restore(self, before: tuple[int, str]) -> None:
        """Undoes `renumber`."""
        self.version, self._run = before

    def register(self, version: int) -> str:
        """The label of a version that is about to be set: answers may name it from now on."""
        label = self.label(version)
        self._versions[label] = version
        return label

    def label(self, version: int) -> str:
        """The server's name of a version."""
        return f"{self._run}-{version}"

    def name(self, number: int) -> str:
        """The server's name of a request."""
        return f"{self._run}-{number}"

    def version_of(self, label: str, since: int) -> int:
        """The version of a label in an answer to a request that was sent under version `since`. Raises EngineError."""
        version = self._versions.get(label)
        if version is None or version < since:
            raise EngineError(
                f"vLLM sampled under the weight version {label!r}, which this engine never set after version "
                f"{since} was served; it was restarted or updated by someone else: reconnect and publish again"
            )
        return version

    def begin(self) -> None:
        """Sets the version and looks at an answer. Raises IncompatibleServer for one that lacks something."""
        self._client.call("POST", "/update_weight_version", body={"new_version": self.label(self.version)})
        try:
            self._probe()
        except EngineLost:
            raise
        except EngineError as error:
            raise IncompatibleServer(
                self._client.url, [f"an answer to two tokens as rollouts need it: {error}"]
            ) from error

    def checked_prompt(
        self, prompt_ids: Sequence[int] | Prompt, params: SamplingParams, images: Sequence[ImagePatches]
    ) -> Prompt:
        """The prompt as it is sent. Raises InvalidRequest for a request that the server would not do as asked."""
        if images:
            raise InvalidRequest("the vLLM engine does not send images; use the k3rl engine for prompts that have some")
        if isinstance(prompt_ids, Prompt):
            prompt = prompt_ids
        else:
            prompt = Prompt(checked_ids(prompt_ids, self.shape.vocab_size), (), b"")
        wire.check_room(prompt.rows.size, params.max_tokens, self.server)
        wire.check_options(params, self.server, self.shape.vocab_size)
        return prompt

    def greedy(self) -> wire.Answer:
        """A few tokens that depend on the weights alone."""
        params = SamplingParams(temperature=0.0, max_tokens=_CANARY_TOKENS)
        return self._ask(params, sampling_mask=False)

    def _probe(self) -> None:
        """Samples two tokens and looks at everything that an answer must carry. Raises EngineError."""
        params = SamplingParams(top_k=1, max_tokens=2, return_routes="routes" in self._require)
        answer = self._ask(params, sampling_mask=self.server.sampling_mask)
        if not answer.spans or answer.spans[-1][0] != self.label(self.version):
            raise EngineError(f"vLLM answered with weight versions {answer.spans} right after one was set")
        if len(answer.ids) != 2 or max(map(abs, answer.logprobs)) > 1e-3:
            raise EngineError(
                f"with top_k 1 vLLM sampled {answer.ids} with logprobs {answer.logprobs}; two tokens of logprob 0 "
                "were wanted, so these are not the logprobs of the sampling distribution"
            )

    def _ask(self, params: SamplingParams, *, sampling_mask: bool) -> wire.Answer:
        """One request past the queue, checked as all are."""
        prompt = [self.shape.vocab_size - 1]
        answer = wire.Answer(len(prompt), params)
        name = f"{self._run}-probe-{uuid.uuid4().hex[:8]}"
        body = wire.generate_body(name, self.server.model, prompt, params, 0, name)
        self._client.wait(self._client.stream(body, answer.feed, lambda: True), self._client.deadlines.stall)
        if sampling_mask:
            answer.completion([self.version], self.shape.moe_layers, self.shape.experts_per_token)
        return answer

"""The vocabulary of k3rl on one page.

Plain frozen dataclasses; arrays are NumPy, so a value travels between Ray actors without torch.
Dimension letters: T tokens of one sequence, M MoE layers in depth order, k experts per token.

Message, ToolCall          what is said; `k3rl.tokens.xtml` turns it into tokens and back
EncodedImage               an image of a conversation, as the bytes of its file
Task, Budgets              what is asked of a policy, and how much it may spend
SamplingParams, Completion what an engine is asked for, and what it gives; Constraint: what its text must match;
                           `packed.SamplingMasks`: the tokens that each one was drawn from
Turn, Branch, Episode      what happened when a policy acted on a task
Scored, Invalid, Failed    the three states of a `Score`; a missing reward is Failed (FailureKind), never 0
Group                      the episodes of one task, joined by id
WeightVersion              an int with the manifest of the tensors that make it
Communicator, Exchange, ContextCommunicator, WeightSlices, ForwardObserver
                           what a model is handed by whoever runs it
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

from k3rl.packed import Packed, Record, SamplingMasks, TurnColumns


class StopReason(StrEnum):
    """Why a completion or an episode ended."""

    STOP = "stop"  # a stop id was sampled
    LENGTH = "length"  # max_tokens of this completion
    CONTEXT_OVERFLOW = "context_overflow"  # prompt + sampled tokens would exceed the context
    ABORTED = "aborted"  # the caller took the request back
    COMPLETED = "completed"  # the agent ended the episode
    ENV_DONE = "env_done"  # the environment ended it
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"  # the episode's token budget
    MAX_TOOL_CALLS = "max_tool_calls"
    WALL_TIMEOUT = "wall_timeout"
    VIRTUAL_TIMEOUT = "virtual_timeout"  # the task's own time, which does not depend on how fast an engine is
    PARSE_ERROR = "parse_error"  # the assistant message is not valid XTML
    PROGRAM_FAILED = "program_failed"  # the policy's program ended with an error after the policy had acted
    CHEAT_DETECTED = "cheat_detected"
    INFRA_ERROR = "infra_error"
    CANCELLED = "cancelled"
    PAUSED = "paused"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool. `arguments` is a mapping, or the raw string when it is not valid JSON."""

    name: str
    arguments: Mapping[str, Any] | str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation. `content` is text or a list of text/image parts (OpenAI form; inside episodes an
    image is an `image_url` with a `data:` URL, see `k3rl.tokens.images`).

    `reasoning` is the think channel of an assistant turn; None means the turn has none.
    `name` is the tool's name on a tool result; `tool_call_id` joins a result to its call.
    """

    role: str
    content: Any = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    name: str | None = None
    tool_call_id: str | None = None


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """An image as the bytes of its file (PNG, JPEG, ...), with its size in pixels.

    What travels and is stored: a tenth of what the pixels weigh that a vision tower reads. Engine and learner both
    prepare those by `k3rl.data.images.preprocess`, so equal bytes are equal rows on both sides.
    """

    data: bytes = field(repr=False)
    width: int
    height: int

    @property
    def sha256(self) -> str:
        """Of the bytes, in hex: the name under which records keep an image."""
        return hashlib.sha256(self.data).hexdigest()


@dataclass(frozen=True, slots=True)
class Budgets:
    """What one episode may spend. None means no limit of that kind."""

    turns: int | None = None
    tokens: int | None = None  # sampled tokens, all turns together
    tokens_per_turn: int | None = None
    tool_calls: int | None = None
    sub_agents: int | None = None
    wall_s: float | None = None  # real time of the episode
    virtual_s: float | None = None  # time of tools plus sampled tokens at a nominal rate


@dataclass(frozen=True, slots=True)
class Task:
    """One problem. `hidden` is what only the grader may see; `public()` is what leaves for the agent.

    `id` is stable: the same environment, split and seed give the same id and the same task.
    `domain` picks the teacher in distillation, `family` and `level` are reporting keys.
    `tools` are JSON-schema tool declarations (OpenAI form); `tool_choice` as in `xtml.render`.
    """

    id: str
    env: str
    messages: tuple[Message, ...]
    family: str
    level: int = 0
    domain: str = "general"
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: str | None = None
    budgets: Budgets = Budgets()
    data: Mapping[str, Any] = field(default_factory=dict)
    hidden: Mapping[str, Any] | None = None
    seed: int = 0
    schema_version: int = 1

    def public(self) -> Task:
        """The same task without its hidden part."""
        return dataclasses.replace(self, hidden=None)


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the text of a completion must match, from its first token to its stop id.

    kind and source: "json_schema" and a JSON schema as JSON text; "regex" and a pattern for the whole text; "ebnf" and
    a grammar whose first rule is called root; "tool_call" and a tool as JSON {name, parameters}, which the turn then
    calls once, with an empty response. turn: None, the text is all there is; "response" or "think", the
    completion is a whole assistant turn whose prompt opened that channel, and the response channel's content is the
    text. calls: such a turn may call tools instead.
    """

    kind: Literal["json_schema", "regex", "ebnf", "tool_call"]
    source: str
    turn: Literal["response", "think"] | None = None
    calls: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ("json_schema", "regex", "ebnf", "tool_call"):
            raise ValueError(
                f"the kind of a constraint is {self.kind!r}; it must be json_schema, regex, ebnf or tool_call"
            )
        if self.kind == "tool_call" and self.turn is None:
            raise ValueError("a tool_call is one of a whole turn; say which channel the prompt opened (turn)")
        if not self.source:
            raise ValueError("the source of a constraint is empty; give a schema, a pattern or a grammar")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample one completion.

    temperature 0 is argmax with logprobs at temperature 1. With `top_p` < 1, `top_k` > 0 or `min_p` > 0 the logprob
    is that of the renormalized sampling mask; `min_p` keeps what has at least this share of the largest probability.
    logit_bias: (token id, number added to its logit before the temperature) pairs; -inf forbids the token, and the
    logprob is that of the biased distribution. A stop id is part of the completion. stop: texts that end it; it then
    ends with the token that completes the text. Special tokens, tags and tool calls are no text. `seed` fixes this
    request's draws whatever else the engine runs; None derives it from the engine's seed and the request's number.
    cache_salt: prefix-cache entries are shared only between requests of one salt (a tenant).
    session: the name of the conversation that the request goes on; its state stays in the engine until the next turn,
    or until the session ends. Empty: none. ends_session: this is its last turn, behind which nothing is kept.
    routes_from: tokens of the prompt whose routes the caller has; `Completion.routes` begins behind them.
    adapter: the name of a published adapter to compute with; empty for the weights as they are.
    top_logprobs: how many of the likeliest tokens to give with each sampled one (`Completion.top_logprobs`).
    priority: above 0 the request goes before all others, and takes the row of the youngest where none is free.
    constraint: what the text must match; tokens that would leave it are forbidden before anything else, and it needs a
    stop id, which is allowed only where the text is complete.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 32
    stop_ids: tuple[int, ...] = ()
    seed: int | None = None
    return_routes: bool = False
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    cache_salt: str = ""
    constraint: Constraint | None = None
    adapter: str = ""
    top_logprobs: int = 0
    session: str = ""
    ends_session: bool = False
    routes_from: int = 0
    priority: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}; it must be 0 (argmax) or more, and finite")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be in (0, 1]")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; it must be 0 (off) or more")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is {self.min_p}; it must be in [0, 1], 0 is off")
        if self.top_logprobs < 0:
            raise ValueError(f"top_logprobs is {self.top_logprobs}; it must be 0 (off) or more")
        if self.routes_from < 0:
            raise ValueError(f"routes_from is {self.routes_from}; it must be 0 (all routes) or more")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; it must be at least 1")
        if isinstance(self.stop, str) or not all(self.stop):
            raise ValueError(f"stop is {self.stop!r}; it must be a tuple of texts, none of them empty")
        if len({token for token, _ in self.logit_bias}) != len(self.logit_bias):
            raise ValueError("logit_bias names a token twice; give each one number")
        if self.constraint is not None and not self.stop_ids:
            raise ValueError("a constraint needs a stop id, which ends the text; stop_ids is empty")
        if not all(bias < float("inf") for _, bias in self.logit_bias):
            raise ValueError("a logit_bias is NaN or infinite; it must be a number, or -inf to forbid the token")


Alternatives: TypeAlias = tuple[tuple[int, float], ...]  # (token id, logprob) pairs


@dataclass(frozen=True, slots=True)
class Completion(Record):
    """What an engine sampled for one prompt.

    token_ids: sampled ids, a stop id included; logprobs: one float per id, under the sampling distribution.
    weight_version: the version that sampled the last token; `first_version` the first (equal unless the
    weights changed in between). routes: int16 [prompt + sampled - 1, M, k] without those of the first
    `SamplingParams.routes_from` tokens, or None when not asked for; an image of the prompt counts as the rows that it
    takes in the model, not as its one placeholder id.
    sampling_mask: per sampled token the ids that top-p, top-k, min-p, forbidden tokens and a constraint left, or None
    when nothing was cut (equal sets in a row are one array);
    finite logit biases are not in it, whoever recomputes a logprob adds them from the request.
    top_logprobs: per sampled token the likeliest ones of the distribution that it was drawn from, the likeliest first,
    or None when not asked for.
    stop_string: the text of `SamplingParams.stop` that ended it. cached_tokens: prompt tokens whose states came from
    the prefix cache (rows, where there are images); how a result was computed is no part of it, so it does not count
    when results are compared.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop_reason: StopReason
    weight_version: int
    first_version: int
    routes: np.ndarray | None = None
    sampling_mask: tuple[np.ndarray, ...] | None = None
    stop_string: str | None = None
    cached_tokens: int = field(default=0, compare=False)
    top_logprobs: tuple[Alternatives, ...] | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One prompt and what the policy sampled for it, exactly as the engine saw and gave it.

    prompt_ids, sampled_ids int32, logprobs float32: sequences are taken and kept as `Packed`; the turns of a branch
    share one array of ids, of which these are slices. routes: int16 [rows, M, k] of the rows that this turn computed
    first, in the model: those of its prompt and sampled tokens but the last, without the rows of the branch's turns
    before it. images: one for each placeholder id of the prompt, in order. Turns of an episode share the objects.
    sampling_mask: what each sampled token was drawn from, None when nothing was cut (`Completion.sampling_mask`).
    """

    prompt_ids: Packed
    sampled_ids: Packed
    logprobs: Packed
    stop_reason: StopReason
    first_version: int
    last_version: int
    routes: np.ndarray | None = None
    model_s: float = 0.0
    env_s: float = 0.0
    images: tuple[EncodedImage, ...] = ()
    sampling_mask: SamplingMasks | None = None

    def __post_init__(self) -> None:
        for name, dtype in (("prompt_ids", np.int32), ("sampled_ids", np.int32), ("logprobs", np.float32)):
            object.__setattr__(self, name, Packed.of(getattr(self, name), dtype))

    @property
    def ids(self) -> Packed:
        """The prompt and what was sampled for it."""
        return self.prompt_ids.extended(self.sampled_ids)


@dataclass(frozen=True, slots=True)
class Branch:
    """Turns from the root to one leaf; each prompt extends the previous prompt and its sampled ids."""

    id: str
    turns: tuple[Turn, ...]
    parent: str | None = None

    @property
    def images(self) -> tuple[EncodedImage, ...]:
        """One for each placeholder id of the prompts, in order: those of the last prompt, which holds all others.

        Raises ValueError when the images of a prompt do not extend those before it.
        """
        images: tuple[EncodedImage, ...] = ()
        for number, turn in enumerate(self.turns):
            if turn.images[: len(images)] != images:
                raise ValueError(f"branch {self.id}: the images of turn {number} do not extend those before it")
            images = turn.images
        return images

    def tokens(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(ids int64 [T], loss mask bool [T], sampler logprobs float32 [T], 0 where not sampled).

        Raises ValueError when a prompt does not extend what came before it: that branch was re-rendered
        somewhere, and its logprobs would belong to other tokens.
        """
        known = Packed.of((), np.int32)
        mask, logprobs = [np.empty(0, bool)], [np.empty(0, np.float32)]
        for number, turn in enumerate(self.turns):
            if turn.prompt_ids[: len(known)] != known:
                raise ValueError(
                    f"branch {self.id}: the prompt of turn {number} does not extend the tokens before it; "
                    "append new tokens to the old ones, never re-render a conversation"
                )
            fresh = len(turn.prompt_ids) - len(known)
            mask += [np.zeros(fresh, bool), np.ones(len(turn.sampled_ids), bool)]
            logprobs += [np.zeros(fresh, np.float32), turn.logprobs.array]
            known = turn.ids
        return known.array.astype(np.int64), np.concatenate(mask), np.concatenate(logprobs)

    @property
    def sampling_mask(self) -> SamplingMasks | None:
        """Over the T tokens of `tokens`, None when nothing was cut anywhere."""
        if all(turn.sampling_mask is None for turn in self.turns):
            return None
        parts: list[SamplingMasks | int] = []
        known = 0
        for turn in self.turns:
            parts += [
                len(turn.prompt_ids) - known,
                len(turn.sampled_ids) if turn.sampling_mask is None else turn.sampling_mask,
            ]
            known = len(turn.prompt_ids) + len(turn.sampled_ids)
        return SamplingMasks.join(parts)


@dataclass(frozen=True, slots=True)
class Scored(Record):
    """The grader ran to its end. `parts` are the named pieces of the reward."""

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Invalid:
    """The submission tried to cheat: which hack, and what shows it."""

    hack: str
    evidence: str


class FailureKind(StrEnum):
    """What went wrong where no reward exists."""

    RAISED = "raised"  # code of the environment or of its grader raised
    HUNG = "hung"  # gave no answer in its time
    FLOODED = "flooded"  # said or printed more than anyone reads
    BAD_REWARD = "bad_reward"  # NaN, infinite, out of its declared range, or no number
    DIED = "died"  # its process or its node ended
    ENGINE = "engine"  # the engine gave no tokens: not the environment's fault
    TRIPPED = "tripped"  # not played: its circuit breaker is open
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Failed(Record):
    """No reward exists: the infrastructure, not the policy, failed. Leaves the batch and the baseline."""

    reason: str
    kind: FailureKind = FailureKind.OTHER


Score: TypeAlias = Scored | Invalid | Failed


@dataclass(frozen=True, slots=True)
class Episode:
    """One policy acting once on one task. `answer` is the final text handed to the grader."""

    id: str
    task_id: str
    env: str
    family: str
    level: int
    branches: tuple[Branch, ...]
    stop_reason: StopReason
    score: Score
    answer: str = ""
    budgets_used: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    messages: tuple[Message, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        """Every token once: turns travel as columns, see `TurnColumns`."""
        names = [branch.id for branch in self.branches]
        parents = [names.index(b.parent) if b.parent in names else None for b in self.branches]
        columns = TurnColumns.of([branch.turns for branch in self.branches], parents)
        bare = tuple((branch.id, branch.parent) for branch in self.branches)
        values = [getattr(self, item.name) for item in dataclasses.fields(self)]
        values[[item.name for item in dataclasses.fields(self)].index("branches")] = (bare, columns)
        return _episode, tuple(values)


def _episode(*values: Any) -> Episode:
    """The inverse of `Episode.__reduce__`."""
    made = {item.name: value for item, value in zip(dataclasses.fields(Episode), values, strict=True)}
    bare, columns = made["branches"]
    turns = columns.turns(Turn)
    made["branches"] = tuple(Branch(name, own, parent) for (name, parent), own in zip(bare, turns, strict=True))
    return Episode(**made)


@dataclass(frozen=True, slots=True)
class Group:
    """The episodes of one task. Baselines are computed over the episodes that have a reward."""

    id: str
    task_id: str
    episodes: tuple[Episode, ...]


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """A whole set of weights. `manifest`: official tensor name -> SHA-256 of its stored bytes, buffers too."""

    number: int
    manifest: Mapping[str, str]


class Exchange(Protocol):
    """One trip of a forward's rows to the experts and back; N rows, k experts a row, R rows of this rank's experts.

    Every method is a collective of the ranks that share the experts, and none of them is differentiated: the expert
    bank writes its own backward out of the same calls.
    """

    @property
    def counts(self) -> list[int]:
        """Rows of each expert that this rank holds; they sum to R."""
        ...

    @property
    def ends(self) -> Any:
        """Their running sum, int32 [experts of this rank] where the rows are."""
        ...

    def dispatch(self, rows: Any) -> Any:
        """Rows [N, C] -> [R, C], the row of each assignment to this rank's experts, in expert order."""
        ...

    @property
    def weights(self) -> Any:
        """The weight of each assignment [R], in the order of `dispatch`."""
        ...

    def combine(self, *parts: Any) -> tuple[Any, ...]:
        """Parts [R, C] in the order of `dispatch`, equal in dtype -> each [N * k, C] in (row, choice) order on the rank
        that its rows came from."""
        ...


class Communicator(Protocol):
    """Where expert parallelism cuts into a forward. A model without one holds all experts.

    Tensors are torch tensors; the types are Any so that this page needs no torch.
    """

    experts: range  # those that this rank holds

    def exchange(self, expert_ids: Any, weights: Any) -> Exchange:
        """The trip of rows whose experts are expert_ids int64 [N, k], with weights [N, k]; a collective."""
        ...


class ContextCommunicator(Protocol):
    """What a model needs of its neighbours when a rank holds a range of rows of longer sequences.

    A rank's first segment may have begun on ranks to its left, and its last one may go on at its right; every segment
    between is whole. All ranks that share the rows run the same model and so call the same methods in the same order.
    Tensors are torch tensors.
    """

    @property
    def before(self) -> int:
        """Rows of the first segment's sequence that ranks to the left hold; 0 when it begins here."""
        ...

    @property
    def continues(self) -> bool:
        """Whether the last segment's sequence goes on at the right."""
        ...

    def rows_before(self, rows: Any, reach: int | None = None) -> Any:
        """Own rows [N, ...] -> those just before them in the first segment's sequence, [min(before, reach), ...].

        Oldest first; `reach` None means all of them. Differentiable: gradients go back to the ranks they came from.
        """
        ...

    def receive(self, like: Any, *, right: bool = False) -> Any:
        """What the left (or right) neighbour sends, in the shape and dtype of `like`. Not differentiable."""
        ...

    def send(self, tensor: Any, *, right: bool = False) -> None:
        """Sends to the left (or right) neighbour, without waiting for it. Not differentiable."""
        ...


class WeightSlices(Protocol):
    """Weights of which a process holds a slice each and gathers the rest where a part of the model runs.

    Parts are modules: what attends, what follows it, embedding and head. Tensors are torch tensors.
    """

    in_place: bool  # whether all weights are there for a while, to be read

    def gather(self, module: Any) -> Any:
        """The module, with its weights there. A collective, as is `gather_both_ways`."""
        ...

    def gather_both_ways(self, module: Any, rows: Any) -> Any:
        """`rows` as they are; the part is gathered now and when their gradient comes by."""
        ...


class ForwardObserver(Protocol):
    """What a training forward reports, without another one. Called under no_grad with detached tensors."""

    def router(self, layer: int, scores: Any, cutoff: Any) -> None:
        """scores [N, E]: sigmoid scores before bias; cutoff [N]: the (k+1)-th biased score of each token."""
        ...

    def attention_logits(self, layer: int, maximum: Any) -> None:
        """maximum [H]: the largest pre-softmax logit of each MLA head, scale included."""
        ...

"""Constraints: which tokens may come next so that a completion's text matches a schema, a pattern or a grammar.

The set is a pure function of the constraint and the tokens sampled so far (`xgrammar` computes it), so a request keeps
its matcher when it is preempted. Forbidden tokens are taken out before the temperature, the logprob is that of the
renormalized rest, and the set is recorded like that of top-p.

Special tokens are structure, never text: their bytes begin with 0xff, which no text in UTF-8 has. A stop id is allowed
where the text is complete and nowhere else. Sources are checked before the compiler sees them, and it has processes of
its own (`grammar_process.py`): what hangs or ends it is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from k3rl.config import MissingResource
from k3rl.engine.protocol import EngineError, InvalidRequest
from k3rl.engine.rows import RowTable
from k3rl.engine.sampling.call_format import call_format
from k3rl.engine.sampling.grammar_process import CompileLimits, GrammarProcesses
from k3rl.engine.sampling.json_schema import MAX_WHITESPACE, SchemaError, check_brackets, enforceable
from k3rl.engine.sampling.patterns import enforced
from k3rl.engine.sampling.sampler import Allowed
from k3rl.engine.uploads import upload
from k3rl.tokens import Tokenizer
from k3rl.types import Constraint, SamplingParams

MAX_SOURCE = 65_536  # characters
MAX_KNOWN = 256  # compiled grammars at hand


# By vocabulary: engines of one process share what compiles for them.
_SHARED: dict[tuple[str, int, CompileLimits | None], GrammarProcesses] = {}


class DeadEnd(EngineError):
    """A constraint and the forbidden tokens of one request left no token to sample; what it had is lost."""

    @classmethod
    def of(cls, request: int) -> DeadEnd:
        return cls(f"request {request}: its constraint and its forbidden tokens leave nothing to sample")


class Matcher:
    """Where one request stands in its grammar."""

    def __init__(self, matcher: Any, vocabulary: int, stop_ids: Sequence[int]) -> None:
        self._matcher, self._vocabulary, self._stop = matcher, vocabulary, np.array(stop_ids, np.int64)
        self._bits = torch.empty(1, -(-vocabulary // 32), dtype=torch.int32)

    def accept(self, token: int) -> None:
        """Takes the next token of the text; a stop id changes nothing. Raises EngineError for a forbidden one."""
        if not (self._stop == token).any() and not self._matcher.accept_token(token):
            raise EngineError(f"token {token} leaves the grammar of its request, and was sampled")

    def allowed(self) -> np.ndarray:
        """bool [V]: what may be sampled next."""
        self._matcher.fill_next_token_bitmask(self._bits)
        words = self._bits.numpy().view(np.uint8)
        found = np.unpackbits(words, bitorder="little")[: self._vocabulary].astype(bool)
        found[self._stop] = self._matcher.is_completed()
        return found


class Grammars:
    """Compiles constraints for one vocabulary and keeps what it compiled. Threads may share it.

    vocab_size: of the model; ids behind the tokenizer's are never allowed.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, limits: CompileLimits | None = None) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._lock = threading.Lock()  # of what follows, never of compiling
        self._info: Any = None  # the vocabulary as xgrammar has it
        self._processes: GrammarProcesses | None = None
        self._limits = limits
        self._known: dict[Constraint, Any] = {}

    def check(self, params: SamplingParams) -> None:
        """Compiles the constraint of `params`, if any.

        Raises InvalidRequest when it cannot be kept, MissingResource without xgrammar.
        """
        if params.constraint is not None:
            if not self._stop_ids(params):
                raise InvalidRequest(
                    f"a constraint ends with a stop id, and none of {list(params.stop_ids)} is in the vocabulary of "
                    f"{self._vocab_size}"
                )
            self._compiled(params.constraint)

    def matcher(self, params: SamplingParams) -> Matcher | None:
        """The matcher of a request that has sampled nothing; None without a constraint."""
        if params.constraint is None:
            return None
        stops = self._stop_ids(params)
        made = self._xgrammar().GrammarMatcher(self._compiled(params.constraint), override_stop_tokens=stops)
        return Matcher(made, self._vocab_size, stops)

    def _stop_ids(self, params: SamplingParams) -> list[int]:
        """Those that can be sampled."""
        return [token for token in params.stop_ids if 0 <= token < self._vocab_size]

    def _compiled(self, constraint: Constraint) -> Any:
        known = self._known.get(constraint)
        if known is not None:
            return known
        if self._tokenizer is None:
            raise InvalidRequest("a constraint needs the text of tokens; give the engine a tokenizer")
        try:
            form = _form(constraint, self._tokenizer)
            info, processes = self._ready(self._tokenizer)
            made = self._xgrammar().CompiledGrammar.deserialize_json(processes.compile(form), info)
            with self._lock:
                while len(self._known) >= MAX_KNOWN:
                    self._known.pop(next(iter(self._known)))
                self._known[constraint] = made
            return made
        except (SchemaError, RuntimeError, ValueError, TypeError) as error:
            detail = str(error).strip().splitlines()[0].rpartition("] ")[2]
            raise InvalidRequest(f"the {constraint.kind} of the constraint cannot be used: {detail}") from error

    @staticmethod
    def _xgrammar() -> Any:
        try:
            import xgrammar
        except ImportError as error:
            raise MissingResource(
                f"a constraint needs the package {error.name or 'xgrammar'}; install k3rl[constraints]"
            ) from error
        return xgrammar

    def _ready(self, tokenizer: Tokenizer) -> tuple[Any, GrammarProcesses]:
        """The vocabulary, and the processes that compile for it."""
        module = self._xgrammar()
        with self._lock:
            if self._processes is None or self._processes.closed:
                texts = [_token_text(tokenizer, token) for token in range(min(tokenizer.vocab_size, self._vocab_size))]
                stops = [tokenizer.special("end_of_msg")]
                self._info = module.TokenizerInfo(
                    texts, module.VocabType.RAW, vocab_size=self._vocab_size, stop_token_ids=stops
                )
                key = (tokenizer.hash, self._vocab_size, self._limits)
                if key not in _SHARED or _SHARED[key].closed:
                    _SHARED[key] = GrammarProcesses(texts, self._vocab_size, stops, self._limits)
                self._processes = _SHARED[key]
            return self._info, self._processes


def end_compilers() -> None:
    """Ends every process that compiles constraints; what waits for one is refused, and later ones get fresh ones."""
    for processes in list(_SHARED.values()):
        processes.close()
    _SHARED.clear()


def _token_text(tokenizer: Tokenizer, token: int) -> bytes:
    name = tokenizer.special_name(token)
    return tokenizer.decode_bytes([token]) if name is None else b"\xff" + name.encode()


def _text_format(constraint: Constraint) -> dict[str, Any]:
    """The text as an xgrammar format. Raises SchemaError."""
    source = constraint.source
    if len(source) > MAX_SOURCE:
        raise SchemaError(f"it has {len(source)} characters; at most {MAX_SOURCE} are taken")
    if constraint.kind == "json_schema":
        return {"type": "json_schema", "json_schema": enforceable(source), "max_whitespace_cnt": MAX_WHITESPACE}
    check_brackets(source, "it")
    if constraint.kind == "regex":
        return {"type": "regex", "pattern": enforced(source)}
    return {"type": "grammar", "grammar": source}


def _form(constraint: Constraint, tokenizer: Tokenizer) -> dict[str, Any]:
    """What is sampled, as an xgrammar format. Raises SchemaError."""
    if constraint.turn is None:
        return _text_format(constraint)
    text = None if constraint.kind == "tool_call" else _text_format(constraint)
    return _turn_format(text, constraint, tokenizer)


def _turn_format(text: dict[str, Any] | None, constraint: Constraint, tokenizer: Tokenizer) -> dict[str, Any]:
    """A whole assistant turn (`xtml.parse`) whose response is the text, or, with `calls`, free text and tool calls.

    Without a text, an empty response and one call of the constraint's tool.
    """

    def tag(kind: str, name: str) -> list[dict[str, Any]]:
        return [special(kind), {"type": "const_string", "value": name}, special("sep")]

    def special(name: str) -> dict[str, Any]:
        return {"type": "token", "token": tokenizer.special(name)}

    def sequence(*parts: dict[str, Any]) -> dict[str, Any]:
        return {"type": "sequence", "elements": list(parts)}

    structure = {tokenizer.special(name) for name in ("open", "close", "sep")}
    specials = [token for token in range(tokenizer.vocab_size) if tokenizer.special_name(token) is not None]
    free = {"type": "any_text"}  # UTF-8, and so without special tokens
    calls = {"type": "any_tokens", "exclude_tokens": [token for token in specials if token not in structure]}
    begin = [free, *tag("close", "think"), *tag("open", "response")] if constraint.turn == "think" else []
    if text is None:
        if len(constraint.source) > MAX_SOURCE:
            raise SchemaError(f"the tool has {len(constraint.source)} characters; at most {MAX_SOURCE} are taken")
        call = call_format(constraint.source, special)
        tools = [*tag("open", "tools"), *call, *tag("close", "tools")]
        return sequence(*begin, *tag("close", "response"), *tools, *tag("close", "message"))
    answer = sequence(text, *tag("close", "response"), *tag("close", "message"))
    if constraint.calls:
        called = sequence(free, *tag("close", "response"), *tag("open", "tools"), calls, *tag("close", "message"))
        answer = {"type": "or", "elements": [answer, called]}
    return sequence(*begin, answer)


@dataclass(frozen=True, slots=True)
class Constrained:
    """Rows that can be sampled from, their logits and sets, and the rows that have nothing left."""

    rows: np.ndarray
    logits: Tensor
    allowed: Allowed | None
    dead: np.ndarray


def constrain(table: RowTable, rows: np.ndarray, logits: Tensor) -> Constrained:
    """What the constraints of these rows [R] leave of logits [R, V]; forbidden tokens of their biases are taken out."""
    places = np.flatnonzero(table.is_constrained[rows])
    if not places.size:
        return Constrained(rows, logits, None, rows[:0])
    sets = []
    for running in table.running[rows[places]]:
        allowed = running.matcher.allowed()
        if running.bias is not None:
            ids, values = running.bias
            allowed[ids[values == -np.inf]] = False
        sets.append(allowed)
    mask = np.stack(sets)
    alive = mask.any(1)
    if alive.all():
        return Constrained(rows, logits, Allowed(places, mask), rows[:0])
    keep = np.ones(len(rows), bool)
    keep[places[~alive]] = False
    moved = np.cumsum(keep) - 1
    allowed_rows = Allowed(moved[places[alive]], mask[alive]) if alive.any() else None
    return Constrained(rows[keep], logits[upload(keep, logits.device)], allowed_rows, rows[~keep])

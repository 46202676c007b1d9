"""What a request must be before an engine takes it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from k3rl.data import ImagePatches
from k3rl.engine.images import Placed, expand
from k3rl.engine.protocol import ContextExceeded, InvalidRequest, Prompt
from k3rl.engine.running import Running
from k3rl.engine.sampling.grammar import Grammars
from k3rl.engine.sampling.stopping import StopStrings
from k3rl.engine.weights import ServedWeights
from k3rl.model import K3Config
from k3rl.tokens import Tokenizer
from k3rl.types import SamplingParams

_WORD = 2**63  # what NumPy's integers end before


class Admission:
    """Checks requests for one engine and makes them. `weights` says which adapters there are."""

    def __init__(
        self, weights: ServedWeights, max_context: int, tokenizer: Tokenizer | None, grammars: Grammars, *, exact: bool
    ) -> None:
        self._weights, self._config, self.max_context = weights, weights.model.config, max_context
        self._tokenizer, self._grammars, self._exact = tokenizer, grammars, exact

    def check(
        self, prompt_ids: Sequence[int] | Prompt, params: SamplingParams, images: Sequence[ImagePatches]
    ) -> Running:
        """The request as it would be queued, without its number and seed. Raises InvalidRequest. Any thread may ask."""
        if isinstance(prompt_ids, Prompt):
            prompt = prompt_ids
        else:
            prompt = checked_prompt(prompt_ids, images, self._config, self.max_context)
        check_room(prompt, params.max_tokens, self.max_context)
        if params.constraint is not None:
            self._grammars.check(params)
        self._weights.adapters.check(params.adapter)
        if self._exact and params.adapter:
            raise InvalidRequest("an exact engine does not compute adapters; use an engine without `exact` for them")
        check_options(params, self._config.vocab_size, has_tokenizer=self._tokenizer is not None)
        stop = StopStrings(params.stop, self._tokenizer) if params.stop and self._tokenizer is not None else None
        return Running(-1, prompt.rows, params, images=prompt.images, stop=stop, key=prompt.key)


def checked_prompt(
    prompt_ids: Sequence[int], images: Sequence[ImagePatches], config: K3Config, max_context: int
) -> Prompt:
    """The prompt in rows of the model, and where its images are (`k3rl.engine.images`).

    Raises InvalidRequest for an empty prompt, ids outside the vocabulary, images that do not fit the ids or the model,
    and ContextExceeded when the rows, with one to sample, exceed `max_context`.
    """
    prompt = checked_ids(prompt_ids, config.vocab_size)
    rows, placed = expand(prompt, images, config)
    if rows.size >= max_context:
        raise ContextExceeded(
            f"the prompt has {rows.size} {_what(placed)}; with one to sample it must fit a context of {max_context}"
        )
    return Prompt(rows, placed, rows.tobytes())


def checked_ids(prompt_ids: Sequence[int], vocabulary: int) -> np.ndarray:
    """int64 [P], its own memory. Raises InvalidRequest for an empty prompt and ids outside the vocabulary."""
    prompt = token_row(prompt_ids)
    if not prompt.size:
        raise InvalidRequest("the prompt is empty; it needs at least one token")
    if prompt.ndim != 1:
        raise InvalidRequest(f"the prompt has shape {prompt.shape}; it must be one row of token ids")
    if prompt.dtype.kind not in "iu":
        raise InvalidRequest(f"the prompt holds {prompt.dtype} values; it must hold token ids")
    ids = prompt if prompt.dtype == np.int64 and prompt is not prompt_ids else prompt.astype(np.int64)
    if ids.view(np.uint64).max() >= vocabulary:  # a negative id is a large word
        bad = prompt[(prompt < 0) | (prompt >= vocabulary)]
        raise InvalidRequest(f"token id {bad[0]} is outside the vocabulary of {vocabulary}")
    return ids


def check_room(prompt: Prompt, max_tokens: int, max_context: int) -> None:
    """Raises ContextExceeded when the prompt and `max_tokens` to sample exceed `max_context`."""
    length = prompt.rows.size
    if length + max_tokens > max_context:
        raise ContextExceeded(
            f"{length} prompt {_what(prompt.images)} and max_tokens {max_tokens} exceed the context of {max_context}; "
            f"ask for at most {max_context - length}"
        )


def _what(placed: Placed) -> str:
    return f"tokens and rows of {len(placed)} images" if placed else "tokens"


def token_row(ids: Sequence[int]) -> np.ndarray:
    """The ids as NumPy sees them; of a list of integers in two thirds of its time."""
    if isinstance(ids, list | tuple) and not isinstance(ids[0] if ids else None, bool):
        try:
            return np.frombuffer(array("q", ids), np.int64) if ids else np.empty(0)
        except (TypeError, OverflowError):  # NumPy says what they are
            pass
    try:
        return np.asarray(ids)
    except ValueError as error:
        raise InvalidRequest(f"the prompt is no row of token ids: {error}") from error


def check_options(params: SamplingParams, vocabulary: int, *, has_tokenizer: bool) -> None:
    """Raises InvalidRequest for stop texts without a tokenizer, for biases of unknown tokens or of all of them, and for
    numbers that the engine's tables cannot hold."""
    check_numbers(params)
    if params.stop and not has_tokenizer:
        raise InvalidRequest("stop strings need the text of tokens; give the engine a tokenizer, or use stop_ids")
    for token, _ in params.logit_bias:
        if not 0 <= token < vocabulary:
            raise InvalidRequest(f"logit_bias names token id {token}, outside the vocabulary of {vocabulary}")
    if params.logit_bias and sum(bias == -np.inf for _, bias in params.logit_bias) == vocabulary:
        raise InvalidRequest("logit_bias forbids every token; leave at least one")


def check_numbers(params: SamplingParams) -> None:
    """Raises InvalidRequest for numbers that are no integers where integers are wanted, or too large for tables."""
    biased = [token for token, _ in params.logit_bias]
    for value in (params.top_k, params.max_tokens, params.top_logprobs, *params.stop_ids, *biased):
        if type(value) is not int or not -_WORD <= value < _WORD:
            _refuse_numbers(params)
            break
    if not isinstance(params.seed, int | np.integer | None):
        raise InvalidRequest(f"seed is {params.seed!r}; it must be an integer")


def _refuse_numbers(params: SamplingParams) -> None:
    """Raises InvalidRequest for the first number that is none of ours; integers of NumPy are."""
    for name, values in (
        ("stop_ids", params.stop_ids),
        ("top_k", (params.top_k,)),
        ("max_tokens", (params.max_tokens,)),
        ("top_logprobs", (params.top_logprobs,)),
        ("logit_bias", [token for token, _ in params.logit_bias]),
    ):
        for value in values:
            if not isinstance(value, int | np.integer) or not -_WORD <= value < _WORD:
                raise InvalidRequest(f"{name} has {value!r}; it must be an integer of at most 64 bits")

"""Stop strings and the other options through the engine, against text and distributions computed another way."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from k3rl.engine import Engine, InvalidRequest
from k3rl.engine.sampling.sampler import request_samples
from k3rl.engine.sampling.stopping import StopStrings
from k3rl.tokens import Tokenizer, TurnText, xtml
from k3rl.types import Message, SamplingParams, StopReason, ToolCall

PROMPT = [5, 9, 2]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.builtin()


@settings(max_examples=200, deadline=None)
@given(
    tokens=st.lists(st.sampled_from([97, 98, 99, 195, 169, 300, 301, 320, 503, 505, 506]), max_size=30),
    stop=st.lists(st.text("abc\u00e9 e", min_size=1, max_size=4), min_size=1, max_size=3, unique=True),
)
def test_the_first_token_that_completes_a_stop_string_is_found(tokens, stop):
    tokenizer = Tokenizer.builtin()
    watch = StopStrings(stop, tokenizer)
    found = next((index for index, token in enumerate(tokens) if watch.feed(token)), None)
    expected = None
    for index in range(len(tokens)):  # the text of every prefix afresh; what markup is between is apart
        pieces, in_tag = [b""], False
        for token in tokens[: index + 1]:
            if token in (503, 505, 506):  # open, sep, and one that stands alone
                pieces.append(b"")
                in_tag = token == 503 or (in_tag and token == 506)
            elif not in_tag:
                pieces[-1] += tokenizer.decode_bytes([token])
        if any(text.encode() in piece for text in stop for piece in pieces):
            expected = index
            break
    assert found == expected


def test_names_of_tags_and_tool_calls_end_nothing_and_the_same_words_as_text_do(tokenizer):
    calls = (ToolCall("call", {"key": "response"}),)
    turn = Message("assistant", "The key.", reasoning="Let me think.", tool_calls=calls)
    ids = tokenizer.encode_segments(xtml.render([turn], add_generation_prompt=False))
    ids = ids[len(tokenizer.encode_segments(xtml.render([]))) :]
    text = "Let me think.The key."

    def ended(*stop):
        watch = StopStrings(stop, tokenizer)
        return next((index + 1 for index, token in enumerate(ids) if watch.feed(token)), None)

    assert ended("response", "call", "tools", "argument", "message") is None
    for word in ("think", "key"):
        count = ended(word)
        seen = TurnText(tokenizer)
        shown = b"".join(piece for token in ids[:count] if (piece := seen.feed(token)) is not None).decode()
        assert text.startswith(shown)
        assert shown.rstrip(".").endswith(word)


def test_a_stop_string_ends_the_completion_with_the_token_that_completes_it(build_model, tokenizer):
    model = build_model(vocab_size=512, media_placeholder_token_id=509, pad_token_id=511)
    own = SamplingParams(max_tokens=30, seed=3)
    (free,) = Engine(model).generate([PROMPT], own)
    ordinary = [t for t in free.token_ids if tokenizer.special_name(t) is None]
    wanted = next(tokenizer.decode([t]) for t in ordinary[4:] if tokenizer.decode([t]).isascii())
    engine = Engine(model, tokenizer=tokenizer)
    stopped, other = engine.generate([PROMPT] * 2, [SamplingParams(max_tokens=30, seed=3, stop=("zzzz", wanted)), own])
    count = len(stopped.token_ids)
    assert stopped.token_ids == free.token_ids[:count]
    assert stopped.stop_reason is StopReason.STOP
    assert stopped.stop_string == wanted
    assert wanted in tokenizer.decode(stopped.token_ids)
    assert wanted not in tokenizer.decode(stopped.token_ids[:-1])
    assert other.token_ids == free.token_ids
    assert other.stop_string is None


def test_options_that_the_engine_cannot_keep_are_refused(model):
    engine = Engine(model)
    for changes, says in [
        ({"stop": ("x",)}, "tokenizer"),
        ({"logit_bias": ((40, 1.0),)}, "token id 40"),
        ({"logit_bias": tuple((i, -math.inf) for i in range(40))}, "at least one"),
        ({"logit_bias": ((1.5, 1.0),)}, "logit_bias has 1.5"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"stop_ids": ("a",)}, "stop_ids has 'a'"),
    ]:
        with pytest.raises(InvalidRequest, match=says):
            engine.submit(PROMPT, SamplingParams(**changes))


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_min_p_and_biases_leave_a_logprob_that_the_learner_can_recompute(model, run_teacher_forced, temperature):
    bias = ((3, 2.5), (7, -math.inf), (11, -1.0))
    own = SamplingParams(temperature=temperature, min_p=0.05, top_p=0.9, logit_bias=bias, max_tokens=12, seed=4)
    completion, plain = Engine(model).generate([PROMPT] * 2, [own, SamplingParams(max_tokens=12, seed=4)])
    (alone,) = Engine(model).generate([PROMPT], SamplingParams(max_tokens=12, seed=4))
    assert (plain.token_ids, plain.sampling_mask) == (alone.token_ids, None), "its neighbour's options do not touch it"
    logits, _ = run_teacher_forced(model, [*PROMPT, *completion.token_ids])
    for step, token in enumerate(completion.token_ids):
        row = logits[len(PROMPT) - 1 + step].clone()
        for place, value in bias:
            row[place] += value
        row /= temperature or 1.0
        mask = torch.from_numpy(completion.sampling_mask[step]).long()
        assert token in mask
        assert 7 not in mask
        if temperature:
            assert (row[mask] >= row.max() + math.log(0.05) - 1e-9).all()
        expected = row[token] - torch.logsumexp(row[mask], 0)
        assert completion.logprobs[step] == pytest.approx(float(expected), abs=1e-9)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_top_logprobs_are_the_likeliest_of_what_a_token_was_drawn_from(model, run_teacher_forced, temperature):
    asked = SamplingParams(
        temperature=temperature, top_p=0.8, max_tokens=6, seed=3, top_logprobs=4, logit_bias=((7, 1.5), (5, -math.inf))
    )
    plain = SamplingParams(temperature=temperature, max_tokens=6, seed=3)
    completion, other = Engine(model).generate([PROMPT] * 2, [asked, plain])
    assert other.top_logprobs is None
    logits, _ = run_teacher_forced(model, [*PROMPT, *completion.token_ids[:-1]])
    for place, token in enumerate(completion.token_ids):
        z = logits[len(PROMPT) - 1 + place].clone()
        z[7] += 1.5
        mask = torch.zeros(len(z), dtype=torch.bool)
        mask[torch.from_numpy(completion.sampling_mask[place]).long()] = True
        want = (z / (temperature or 1.0)).masked_fill(~mask, -math.inf).log_softmax(0)
        found = completion.top_logprobs[place]
        assert len(found) == min(4, int(mask.sum()))
        assert [i for i, _ in found] == want.argsort(descending=True)[: len(found)].tolist()
        np.testing.assert_allclose(
            [value for _, value in found], want.sort(descending=True)[0][: len(found)], atol=1e-9
        )
        assert dict(found).get(token, completion.logprobs[place]) == completion.logprobs[place]


def test_n_samples_share_one_prefill_and_equal_themselves_alone(model):
    engine = Engine(model, max_running=3)
    own = SamplingParams(max_tokens=6, seed=1)
    completions = engine.generate([PROMPT] * 5, request_samples(own, 5))
    assert engine.counters.prefilled_tokens == len(PROMPT)
    assert completions[0].token_ids == Engine(model).generate([PROMPT], own)[0].token_ids
    assert len({completion.token_ids for completion in completions}) > 1
    assert np.all([len(completion.token_ids) == 6 for completion in completions])

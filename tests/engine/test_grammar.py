"""Constraints: whatever the model, the text matches; logprobs are those of the renormalized allowed set."""

from __future__ import annotations

import json
import pickle
import re
import sys

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k3rl.config import MissingResource
from k3rl.engine import Engine, InvalidRequest
from k3rl.engine.sampling.grammar import DeadEnd, Grammars
from k3rl.engine.sampling.json_schema import SchemaError, enforceable
from k3rl.tokens import Tokenizer, xtml
from k3rl.types import Constraint, Message, SamplingParams, StopReason

TOKENIZER = Tokenizer.builtin()
STOP = TOKENIZER.special("end_of_msg")
VOCAB = TOKENIZER.vocab_size + 8  # the model knows ids that the tokenizer does not
TOLERANCE = 1e-9  # float64: only the order of summation differs
PROMPT = TOKENIZER.encode("say it")
ANSWER = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 4}, "n": {"type": ["integer", "null"]}},
        "required": ["name", "n"],
    }
)


@pytest.fixture(scope="module")
def model(build_model):
    return build_model(vocab_size=VOCAB, media_placeholder_token_id=509, pad_token_id=511, max_position_embeddings=512)


def constrained(kind: str, source: str, **changes) -> SamplingParams:
    options = {"max_tokens": 60, "seed": 1, "stop_ids": (STOP,), "temperature": 0.5, **changes}
    return SamplingParams(constraint=Constraint(kind, source), **options)


def text_of(completion) -> str:
    ids = completion.token_ids
    assert ids[-1] == STOP
    return TOKENIZER.decode_bytes(ids[:-1]).decode()


# ---- what is sampled matches

leaves = st.sampled_from(
    [
        {"type": "integer", "minimum": -3, "maximum": 40},
        {"type": "string", "maxLength": 3},
        {"type": "string", "minLength": 1, "maxLength": 2},
        {"type": "string", "pattern": '^["\\\\a]{1,3}$'},
        {"type": ["boolean", "null", "string"], "maxLength": 2},
        {"enum": ["a", 1, None, {"k": [1.5]}]},
        {"const": 'é"\n'},
        {"minimum": 2, "maximum": 3},
        {"title": "a note", "type": "number", "exclusiveMinimum": 0},
        {"$ref": "#/$defs/pair"},
        {"type": "number", "multipleOf": 2.5e1, "minimum": -60, "exclusiveMaximum": 100},
        {"type": "integer", "multipleOf": 7, "minimum": 1.5, "maximum": 30},
        {"type": "string", "pattern": r"^\d\D\W?|x[^\s\d]$"},
        {"type": "string", "pattern": "(?:ab|^c+?)[^b-y]"},
        *({"type": "string", "format": name} for name in ("date", "ipv4", "email", "uuid", "time", "date-time")),
    ]
)


def containers(inner):
    return st.one_of(
        st.builds(lambda item, least: {"type": "array", "items": item, "minItems": least, "maxItems": 2}, inner,
                  st.integers(0, 2)),
        st.builds(lambda a, b, needed: {"properties": {"a": a, "b\n": b}, "required": needed}, inner, inner,
                  st.sampled_from([[], ["a"], ["b\n", "a"]])),
        st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner),
        st.builds(lambda value: {"type": "object", "additionalProperties": value, "maxProperties": 1}, inner),
    )  # fmt: skip


schemas = st.recursive(leaves, containers, max_leaves=4)


@settings(max_examples=40, deadline=None)
@given(schema=schemas, seed=st.integers(0, 2**32))
def test_whatever_is_sampled_from_the_allowed_tokens_is_json_that_the_schema_accepts(schema, seed):
    whole = {**schema, "$defs": {"pair": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}}}
    params = constrained("json_schema", json.dumps(whole))
    matcher = GRAMMARS.matcher(params)
    rng, ids = np.random.default_rng(seed), []
    for _ in range(400):
        allowed = np.flatnonzero(matcher.allowed())
        token = STOP if STOP in allowed and rng.random() < 0.7 else int(rng.choice(allowed))
        if token == STOP:
            break
        assert token < TOKENIZER.vocab_size
        matcher.accept(token)
        ids.append(token)
    else:
        return  # a number of hundreds of digits is valid, too
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    jsonschema.Draft202012Validator(whole, format_checker=checker).validate(json.loads(TOKENIZER.decode_bytes(ids)))


GRAMMARS = Grammars(TOKENIZER, VOCAB)


@pytest.mark.parametrize("temperature", [0.0, 0.5, 3.0])
@pytest.mark.parametrize(
    ("kind", "source", "matches"),
    [
        ("json_schema", ANSWER, lambda text: jsonschema.validate(json.loads(text), json.loads(ANSWER)) is None),
        ("regex", r"(ab|[0-9]{2}){1,3}\.", lambda text: re.fullmatch(r"(ab|[0-9]{2}){1,3}\.", text)),
        ("ebnf", 'root ::= "(" root ")" | [xy]', lambda text: re.fullmatch(r"\(*[xy]\)*", text)),
    ],
)
def test_what_the_engine_samples_matches_and_its_logprobs_are_those_of_the_allowed_set(
    model, run_teacher_forced, kind, source, matches, temperature
):
    engine = Engine(model, tokenizer=TOKENIZER)
    own = [constrained(kind, source, temperature=temperature, seed=seed) for seed in range(3)]
    plain = SamplingParams(max_tokens=9, seed=4)
    *got, free = engine.generate([PROMPT] * 4, [*own, plain])
    (alone,) = Engine(model).generate([PROMPT], plain)
    assert (free.token_ids, free.sampling_mask) == (alone.token_ids, None), "who has no constraint is not touched"
    assert kind != "regex" or all(completion.stop_reason is StopReason.STOP for completion in got)
    for completion in got:
        if completion.stop_reason is StopReason.STOP:
            assert matches(text_of(completion))
        logits, _ = run_teacher_forced(model, [*PROMPT, *completion.token_ids])
        rows = logits[len(PROMPT) - 1 : -1] / (temperature or 1.0)
        for row, token, logprob, sampling_mask in zip(
            rows, completion.token_ids, completion.logprobs, completion.sampling_mask, strict=True
        ):
            expected = row[token] - torch.logsumexp(row[torch.from_numpy(sampling_mask).long()], 0)
            assert logprob == pytest.approx(float(expected), abs=TOLERANCE)


def test_top_p_top_k_and_biases_cut_within_the_allowed_set(model):
    engine = Engine(model, tokenizer=TOKENIZER)
    ones, twos = TOKENIZER.encode("1")[0], TOKENIZER.encode("2")[0]
    own = constrained("regex", "[0-9]{20}", top_p=0.8, top_k=4, logit_bias=((ones, -np.inf), (twos, 3.0)))
    (got,) = engine.generate([PROMPT], own)
    assert re.fullmatch("[02-9]{20}", text_of(got))
    digits = {token for token in range(500) if re.fullmatch(rb"[02-9]+", TOKENIZER.decode_bytes([token]))}
    assert all(
        0 < len(sampling_mask) <= 4 and {*sampling_mask.tolist()} <= digits for sampling_mask in got.sampling_mask[:-1]
    )
    assert got.sampling_mask[-1].tolist() == [STOP]


def test_a_whole_turn_is_valid_xtml_with_the_text_in_its_response(model):
    engine = Engine(model, tokenizer=TOKENIZER)
    answered = 0
    for turn, calls in [("think", False), ("response", False), ("response", True)]:
        constraint = Constraint("regex", "[0-9]{3}", turn, calls)
        bias = ((TOKENIZER.special("close"), 9.0),)  # short thoughts
        own = [
            SamplingParams(3.0, max_tokens=60, seed=s, stop_ids=(STOP,), constraint=constraint, logit_bias=bias)
            for s in range(4)
        ]
        for got in engine.generate([PROMPT] * 4, own):
            if got.stop_reason is not StopReason.STOP:
                continue
            message = xtml.parse(got.token_ids, TOKENIZER, thinking=turn == "think")
            if calls and not isinstance(message, Message):
                continue  # free to call tools, and free to call them wrongly
            assert isinstance(message, Message)
            assert message.tool_calls or re.fullmatch("[0-9]{3}", message.content)
            answered += 1
    assert answered >= 6


def test_a_turn_may_call_a_tool_instead_of_answering():
    call = xtml.render([Message("user", "u")], thinking=False)
    from k3rl.types import ToolCall

    turn = Message("assistant", "", tool_calls=(ToolCall("add", {"a": 1}),))
    whole = TOKENIZER.encode_segments(xtml.render([Message("user", "u"), turn], thinking=False,
                                                  add_generation_prompt=False))  # fmt: skip
    ids = whole[len(TOKENIZER.encode_segments(call)) :]
    for calls in (True, False):
        params = SamplingParams(stop_ids=(STOP,), constraint=Constraint("regex", "[0-9]{3}", "response", calls))
        matcher = GRAMMARS.matcher(params)
        accepted = 0
        for token in ids:
            if not matcher.allowed()[token]:
                break
            matcher.accept(token)
            accepted += 1
        assert (accepted == len(ids)) == calls


# ---- schedules


@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(1, 4)), min_size=3, max_size=6))
def test_preemption_and_batches_change_nothing(model, plan):
    config = model.config
    cache = model.new_cache(1)
    cache.reserve(1)
    slot = sum(cache.recurrent(n).nbytes + cache.conv(n).nbytes for n in config.kda_layers)
    page = 4 * sum(cache.latent(n, 1).numel() * 8 for n in config.mla_layers)
    engine = Engine(
        model, max_running=4, max_context=40, memory_bytes=5 * slot + 10 * page, page_tokens=4, poison=True,
        tokenizer=TOKENIZER,
    )  # fmt: skip
    asked, outcomes = [], {}
    for has, seed, steps in plan:
        own = constrained("regex", "([a-z]{3} )+", seed=seed, max_tokens=24) if has else SamplingParams(max_tokens=24)
        asked.append((engine.submit(PROMPT, own), own))
        for _ in range(steps):
            outcomes.update(engine.step())
    outcomes.update(engine.drain())
    assert engine.counters.preempted or len(plan) < 4
    alone = Engine(model, tokenizer=TOKENIZER)
    for number, own in asked:
        if own.constraint is None:
            continue
        (expected,) = alone.generate([PROMPT], own)
        assert outcomes[number].token_ids == expected.token_ids
        np.testing.assert_allclose(outcomes[number].logprobs, expected.logprobs, atol=TOLERANCE, rtol=0)
        assert all(
            np.array_equal(a, b) for a, b in zip(outcomes[number].sampling_mask, expected.sampling_mask, strict=True)
        )


def test_a_preempted_request_goes_on_in_its_grammar(model):
    engine = Engine(model, tokenizer=TOKENIZER, max_running=2)
    own = constrained("regex", "([a-z]{3} ){12}", max_tokens=90)
    number = engine.submit(PROMPT, own)
    for _ in range(5):
        engine.step()
    engine.batch.preempt([engine.batch.requests[number]])
    ((_, got),) = engine.drain()
    assert re.fullmatch("([a-z]{3} ){12}", text_of(got))
    assert got.token_ids == Engine(model, tokenizer=TOKENIZER).generate([PROMPT], own)[0].token_ids


def test_forbidding_all_that_the_constraint_allows_ends_that_request_alone(model):
    engine = Engine(model, tokenizer=TOKENIZER)
    plus = TOKENIZER.encode("+")[0]
    dead = engine.submit(PROMPT, constrained("regex", r"\+", logit_bias=((plus, -np.inf),)))
    fine = engine.submit(PROMPT, constrained("regex", r"\+"))
    outcomes = dict(engine.drain())
    assert isinstance(outcomes[dead], DeadEnd)
    assert text_of(outcomes[fine]) == "+"
    assert (engine.num_running, engine.num_waiting) == (0, 0)


# ---- refusals


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ("{", "not JSON"),
        ("[]", "must be a JSON object"),
        ('{"type": "strin"}', "type"),
        ('{"uniqueItems": true, "type": "array"}', "uniqueItems"),
        ('{"not": {}}', "not"),
        ('{"type": "string", "pattern": "a", "maxLength": 2}', "length"),
        ('{"enum": [1], "minimum": 3}', "minimum"),
        ('{"enum": []}', "no value"),
        ('{"anyOf": []}', "anyOf"),
        ('{"allOf": [{"minimum": 1}, {"maximum": 2}]}', "allOf"),
        ('{"required": ["z"], "properties": {}}', "z"),
        ('{"$ref": "#"}', "comes back to itself"),
        ('{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}', "comes back"),
        ('{"$ref": "http://example.com/x"}', "only references into this schema"),
        ('{"items": ' * 100 + "{}" + "}" * 100, "nested deeper"),
        ('{"minimum": 1, "minLength": 2}', "name its type"),
        ('{"type": "number", "multipleOf": 0.01}', "#/multipleOf is 0.01"),
        ('{"type": "integer", "multipleOf": 7, "minimum": 0}', "between a minimum and a maximum"),
        ('{"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 6}', "0 values"),
        ('{"type": "string", "format": "money"}', '#/format is "money"'),
        ('{"type": "string", "format": "date", "maxLength": 3}', "length beside a format"),
        ('{"type": "string", "pattern": "a(?=b)"}', "a lookaround"),
        ('{"type": "string", "pattern": "a^b"}', "the anchor ^ inside"),
        ('{"type": "string", "pattern": "(a|b$)c"}', "the anchor $ inside"),
        ('{"type": "string", "pattern": "\\\\bword"}', "a word boundary"),
        ('{"type": "string", "pattern": "(a)\\\\1"}', "a back reference"),
        ('{"type": "string", "pattern": "(?i)a"}', "the group '(?i)'"),
        ('{"patternProperties": {"(?!a)": {}}}', "a lookaround"),
        (json.dumps({"type": "string", "pattern": "(" * 300 + "a" + ")" * 300}), "nested 300 deep"),
        (json.dumps({"properties": {f"p{i}": {} for i in range(99)}, "minProperties": 50}), "99 properties"),
    ],
)
def test_a_schema_that_cannot_be_kept_exactly_is_refused(schema, says):
    with pytest.raises(SchemaError, match=re.escape(says)):
        enforceable(schema)


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("json_schema", '{"not": {}}'),
        ("regex", "("),
        ("regex", "a(?=b)"),
        ("regex", "(" * 20_000 + "a" + ")" * 20_000),
        ("regex", "a" * 70_000),
        ("ebnf", 'start ::= "a"'),
        ("ebnf", "root ::= other"),
    ],
)
def test_a_bad_source_is_refused_when_it_is_submitted_and_nothing_is_queued(model, kind, source):
    engine = Engine(model, tokenizer=TOKENIZER)
    with pytest.raises(InvalidRequest, match=kind):
        engine.submit(PROMPT, constrained(kind, source))
    assert engine.num_waiting == 0


def test_what_a_constraint_needs_is_said(model, monkeypatch):
    with pytest.raises(ValueError, match="stop id"):
        SamplingParams(constraint=Constraint("regex", "a"))
    with pytest.raises(ValueError, match="kind"):
        Constraint("yaml", "a")
    with pytest.raises(ValueError, match="empty"):
        Constraint("regex", "")
    with pytest.raises(InvalidRequest, match="tokenizer"):
        Engine(model).submit(PROMPT, constrained("regex", "a"))
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(MissingResource, match=r"k3rl\[constraints\]"):
        Engine(model, tokenizer=TOKENIZER).submit(PROMPT, constrained("regex", "a"))


def test_parameters_with_a_constraint_are_values():
    own = constrained("regex", "a+")
    assert pickle.loads(pickle.dumps(own)) == own
    assert hash(own) == hash(constrained("regex", "a+"))
    assert own != constrained("regex", "a*")

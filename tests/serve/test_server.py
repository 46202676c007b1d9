"""The server over loopback, by the `openai` client and by plain HTTP."""

from __future__ import annotations

import base64
import io
import json
import math
import threading
import time

import httpx
import numpy as np
import openai
import pytest
from PIL import Image
from serving import CALLS, HEADERS, MESSAGES, TOKEN, TOKENIZER, TOOLS, TURN, Scripted, running, turn_ids, wait_until

from k3rl.data.images import preprocess_files
from k3rl.engine import Engine, prompts
from k3rl.engine.sampling.sampler import request_samples
from k3rl.model import VisionConfig
from k3rl.serve import ServerLimits, create_app, serve
from k3rl.serve.server import name_of
from k3rl.tokens import openai as tokens_openai
from k3rl.tokens import xtml
from k3rl.tokens.images import data_url, encode_image, image_prompts
from k3rl.types import SamplingParams


@pytest.fixture(scope="module")
def model(build_model):
    return build_model(vocab_size=512, media_placeholder_token_id=509, pad_token_id=511, max_position_embeddings=1024)


@pytest.fixture(scope="module")
def served(model):
    with running(lambda: Engine(model, max_running=4, tokenizer=TOKENIZER)) as (url, server):
        wait_until(lambda: httpx.get(url + "/ready").status_code == 200)
        yield url, server


@pytest.fixture(scope="module")
def scripted(model):
    Scripted.script = turn_ids(TURN)
    with running(lambda: Scripted(model, tokenizer=TOKENIZER)) as (url, _):
        wait_until(lambda: httpx.get(url + "/ready").status_code == 200)
        yield openai.OpenAI(base_url=url + "/v1", api_key=TOKEN, max_retries=0)


def check_turn(content, reasoning, calls) -> None:
    assert (content, reasoning) == (TURN.content, TURN.reasoning)
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        (call.name, call.arguments) for call in CALLS
    ]
    assert len({call.id for call in calls}) == 2


def test_the_openai_client_gets_content_reasoning_tool_calls_and_logprobs(scripted):
    answer = scripted.chat.completions.create(
        model="tiny", messages=MESSAGES, tools=TOOLS, logprobs=True, extra_body={"return_token_ids": True}
    )
    (choice,) = answer.choices
    check_turn(choice.message.content, choice.message.reasoning_content, choice.message.tool_calls)
    assert choice.finish_reason == "tool_calls"
    assert choice.token_ids == Scripted.script
    assert len(choice.logprobs.content) == len(Scripted.script) == answer.usage.completion_tokens
    text = b"".join(bytes(token.bytes) for token in choice.logprobs.content).decode()
    assert text.startswith("Let me think.thinkresponseIt is \u00e9 and done."), "markers have no bytes, tag names have"
    prompt = TOKENIZER.encode_segments(xtml.render(MESSAGES, tools=TOOLS))
    assert answer.prompt_token_ids == prompt
    assert answer.usage.prompt_tokens == len(prompt)


def test_a_streamed_turn_adds_up_to_the_whole_one(scripted):
    said, calls, ids, finish, usage = {"content": "", "reasoning_content": ""}, [], [], None, None
    chunks = 0
    for chunk in scripted.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"return_token_ids": True},
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            chunks += 1
            for channel in said:
                said[channel] += getattr(choice.delta, channel, None) or ""
            calls += choice.delta.tool_calls or []
            ids += getattr(choice, "token_ids", None) or []
            finish = choice.finish_reason or finish
    check_turn(said["content"], said["reasoning_content"], calls)
    assert ids == Scripted.script
    assert finish == "tool_calls"
    assert usage.completion_tokens == len(ids)
    assert chunks > 5, "it came in pieces"


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_before_it(scripted, stream):
    answer = scripted.chat.completions.create(model="tiny", messages=MESSAGES, stop=["and d"], stream=stream)
    if stream:
        deltas = [choice for chunk in answer for choice in chunk.choices]
        content = "".join(choice.delta.content or "" for choice in deltas)
        finish = deltas[-1].finish_reason
    else:
        content, finish = answer.choices[0].message.content, answer.choices[0].finish_reason
    assert (content, finish) == ("It is \u00e9 ", "stop")


def read_routes(choice: dict) -> np.ndarray:
    return np.frombuffer(base64.b64decode(choice["routes"]["data"]), "<i2").reshape(choice["routes"]["shape"])


def test_completions_give_the_engines_tokens_logprobs_and_routes(served, model):
    url, _ = served
    prompts = [[5, 9, 2], [7, 7, 7, 7]]
    body = {"prompt": prompts, "n": 2, "max_tokens": 6, "seed": 3, "logprobs": 0, "return_token_ids": True}
    answer = httpx.post(url + "/v1/completions", headers=HEADERS, json={**body, "return_routes": True}).json()
    engine = Engine(model)
    own = SamplingParams(max_tokens=6, seed=3, stop_ids=(502,), return_routes=True)
    expected = [done for prompt in prompts for done in engine.generate([prompt] * 2, request_samples(own, 2))]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    for choice, completion in zip(answer["choices"], expected, strict=True):
        assert choice["token_ids"] == list(completion.token_ids)
        np.testing.assert_allclose(choice["logprobs"]["token_logprobs"], completion.logprobs, atol=1e-9, rtol=0)
        assert np.array_equal(np.sort(read_routes(choice), -1), np.sort(completion.routes, -1))
        assert choice["text"] == TOKENIZER.decode(completion.token_ids, skip_special=True)
    assert answer["usage"]["prompt_tokens"] == 7
    assert answer["prompt_token_ids"] == prompts


def test_stop_strings_that_tags_are_made_of_leave_a_turn_whole(scripted):
    asked = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "max_tokens": 400}
    answer = scripted.chat.completions.create(**asked, stop=["response", "tools", "call", "argument"]).choices[0]
    check_turn(answer.message.content, answer.message.reasoning_content, answer.message.tool_calls)
    cut = scripted.chat.completions.create(**asked, stop=["is", "done"]).choices[0]
    assert (cut.message.content, cut.message.tool_calls, cut.finish_reason) == ("It ", None, "stop")


def test_a_prompt_of_many_samples_is_checked_once(served, monkeypatch):
    url, _ = served
    checked, check = [], prompts.checked_prompt

    def counted(prompt_ids, *given):
        checked.append(len(prompt_ids))
        return check(prompt_ids, *given)

    monkeypatch.setattr(prompts, "checked_prompt", counted)
    body = {"prompt": [[5, 6, 7] * 20, [8, 9]], "n": 16, "max_tokens": 1}
    answer = httpx.post(url + "/v1/completions", headers=HEADERS, json=body).json()
    assert len(answer["choices"]) == 32
    assert checked == [60, 2]


def test_streamed_completions_of_several_samples_equal_the_whole_ones(served):
    url, _ = served
    body = {"prompt": "abc", "n": 3, "max_tokens": 12, "seed": 1, "return_token_ids": True, "top_p": 0.9}
    body["return_routes"] = True
    whole = httpx.post(url + "/v1/completions", headers=HEADERS, json=body).json()
    ids, text = {0: [], 1: [], 2: []}, {0: "", 1: "", 2: ""}
    routes = {0: [], 1: [], 2: []}
    with httpx.stream("POST", url + "/v1/completions", headers=HEADERS, json={**body, "stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    for line in lines[:-1]:
        (choice,) = json.loads(line)["choices"]
        ids[choice["index"]] += choice.get("token_ids", [])
        text[choice["index"]] += choice["text"]
        if "routes" in choice:
            routes[choice["index"]].append(read_routes(choice))
    for choice in whole["choices"]:
        assert ids[choice["index"]] == choice["token_ids"]
        assert len(routes[choice["index"]]) > 1  # as they come
        np.testing.assert_array_equal(
            np.sort(np.concatenate(routes[choice["index"]]), -1), np.sort(read_routes(choice), -1)
        )
        assert text[choice["index"]] == choice["text"]


@pytest.mark.parametrize("stream", [False, True])
def test_top_logprobs_name_the_likeliest_tokens(served, stream):
    client = openai.OpenAI(base_url=served[0] + "/v1", api_key=TOKEN, max_retries=0)
    asked = {"model": "tiny", "max_tokens": 5, "seed": 2, "stream": stream}
    answer = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=3, temperature=0, **asked)
    found = [part.choices[0].logprobs for part in (answer if stream else [answer])]
    content = [one for logprobs in found if logprobs for one in logprobs.content]
    assert len(content) == 5
    for one in content:
        values = [beside.logprob for beside in one.top_logprobs]
        assert (len(values), values) == (3, sorted(values, reverse=True))
        assert (one.top_logprobs[0].token, values[0]) == (one.token, one.logprob)
    answer = client.completions.create(prompt="a", logprobs=2, top_p=1e-9, **asked)
    found = [part.choices[0].logprobs for part in (answer if stream else [answer])]
    tops = [top for logprobs in found if logprobs for top in logprobs.top_logprobs]
    assert [list(top.values()) for top in tops] == [[0.0]] * 5


def named(name):
    return {"type": "function", "function": {"name": name}}


BAD = [
    ("completions", {"prompt": "a", "max_tokens": 5000}, 400, "context_length_exceeded", None),
    ("completions", {"prompt": [1] * 2000}, 400, "context_length_exceeded", None),
    ("completions", {"prompt": []}, 400, None, "prompt"),
    ("completions", {"prompt": [600]}, 400, None, None),
    ("completions", {"prompt": "a", "temprature": 1}, 400, None, "temprature"),
    ("completions", {"prompt": "a", "logprobs": 21}, 400, None, "logprobs"),
    ("completions", {"prompt": "a", "stop": [""]}, 400, None, None),
    ("completions", {"prompt": "a", "top_k": 2**63}, 400, None, None),
    ("completions", {"prompt": "a", "temperature": math.inf}, 400, None, "temperature"),
    ("completions", {"prompt": "a", "stop_token_ids": [-(2**63) - 1]}, 400, None, None),
    (
        "completions",
        {"prompt": "a", "stop_token_ids": [600], "ignore_eos": True, "structured_outputs": {"regex": "a"}},
        400,
        None,
        None,
    ),
    ("completions", {"prompt": "a", "model": "other"}, 404, "model_not_found", "model"),
    ("completions", {"prompt": "a", "n": 100}, 400, None, "n"),
    ("completions", {"prompt": "a" * 9000}, 413, "body_too_large", None),
    ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, None, "messages"),
    ("chat/completions", {"messages": MESSAGES, "presence_penalty": 0.5}, 400, None, None),
    ("chat/completions", {"messages": MESSAGES, "top_logprobs": 3}, 400, None, None),
    ("completions", {"prompt": "a", "stop": ["x"] * 65}, 400, None, "stop"),
    ("completions", {"prompt": "a", "stop": "x" * 1025}, 400, None, "stop"),
    ("completions", {"prompt": "a", "n": 129}, 400, None, "n"),
    ("completions", {"prompt": "a", "stop_token_ids": [1] * 257}, 400, None, "stop_token_ids"),
    ("chat/completions", {"messages": [{"role": "user", "text": "hi"}]}, 400, None, "messages"),
    ("chat/completions", {"messages": [{"role": "user", "content": None}]}, 400, None, "messages"),
    ("chat/completions", {"messages": [{"role": "user"}]}, 400, None, "messages"),
    ("chat/completions", {"messages": [*MESSAGES, {"role": "assistant", "content": "a", "weight": 0}]}, 400, None, "m"),
    ("chat/completions", {"messages": MESSAGES, "tools": TOOLS, "tool_choice": named("sub")}, 400, None, None),
]


@pytest.fixture(scope="module")
def limited(model):
    limits = ServerLimits(body_bytes=8000, samples=8)
    with running(lambda: Engine(model, tokenizer=TOKENIZER), limits=limits) as (url, _):
        wait_until(lambda: httpx.get(url + "/ready").status_code == 200)
        yield url


@pytest.mark.parametrize(("path", "body", "status", "code", "param"), BAD)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests_get_an_openai_error_object(limited, path, body, status, code, param, stream):
    asked = json.dumps({**body, "stream": stream})
    answer = httpx.post(f"{limited}/v1/{path}", headers=HEADERS, content=asked, timeout=60)  # a first constraint waits
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["code"] == code
    assert error["message"]
    assert error["type"] == "invalid_request_error"
    assert param is None or param in error["param"]
    fine = httpx.post(limited + "/v1/completions", headers=HEADERS, json={"prompt": "a", "max_tokens": 1})
    assert fine.status_code == 200


def test_who_comes_while_all_samples_are_taken_is_told_to_come_again(limited):
    never = {str(xtml.stop_id(TOKENIZER)): -100}
    eight = {"prompt": "a", "n": 8, "max_tokens": 1000, "logit_bias": never, "stream": True}
    one = {"prompt": "a", "max_tokens": 1}
    with httpx.stream("POST", limited + "/v1/completions", headers=HEADERS, json=eight, timeout=60) as answer:
        assert answer.status_code == 200
        refused = httpx.post(limited + "/v1/completions", headers=HEADERS, json=one)
    assert refused.status_code == 429, refused.text
    assert refused.headers["retry-after"] == "1"
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    wait_until(lambda: httpx.post(limited + "/v1/completions", headers=HEADERS, json=one).status_code == 200)


def test_without_the_token_only_health_and_readiness_answer(served):
    url, _ = served
    for headers in ({}, {"authorization": "Bearer wrong"}):
        assert httpx.get(url + "/v1/models", headers=headers).status_code == 401
        assert httpx.get(url + "/metrics", headers=headers).status_code == 401
    listed = httpx.get(url + "/v1/models", headers={"authorization": f"bearer {TOKEN}"}).json()["data"][0]
    assert listed == httpx.get(url + "/v1/models/tiny", headers=HEADERS).json()
    assert (listed["id"], listed["created"] > 0) == ("tiny", True)
    assert httpx.get(url + "/v1/models/other", headers=HEADERS).status_code == 404
    assert httpx.get(url + "/health").json()["status"] == "ready"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=url + "/v1", api_key="wrong", max_retries=0).models.list()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_slots(served, stream):
    url, server = served
    body = {"prompt": "abc", "n": 4, "max_tokens": 1000, "ignore_eos": True, "stream": stream}
    before = server.metrics.cancelled
    if stream:
        with httpx.stream("POST", url + "/v1/completions", headers=HEADERS, json=body) as answer:
            next(answer.iter_lines())
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url + "/v1/completions", headers=HEADERS, json=body, timeout=0.3)
    wait_until(lambda: server.driver.engine.num_running == 0)
    wait_until(lambda: "k3rl_in_flight_samples 0\n" in httpx.get(url + "/metrics", headers=HEADERS).text)
    assert server.metrics.cancelled == before + 1
    assert server.driver.engine.counters.sampled_tokens < 4000
    assert httpx.post(url + "/v1/completions", headers=HEADERS, json={"prompt": "a"}).status_code == 200


def test_metrics_are_prometheus_text_and_count(served):
    url, _ = served

    def read() -> dict[str, float]:
        answer = httpx.get(url + "/metrics", headers=HEADERS)
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        lines = [line.rsplit(" ", 1) for line in answer.text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in lines}

    before = read()
    httpx.post(
        url + "/v1/completions", headers=HEADERS, json={"prompt": [1, 2, 3], "max_tokens": 5, "ignore_eos": True}
    )
    after = read()
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["k3rl_prompt_tokens_total"] == 3
    assert grown["k3rl_sampled_tokens_total"] == 5
    assert grown['k3rl_requests_total{endpoint="completions",status="200"}'] == 1
    assert grown["k3rl_request_seconds_count"] == grown['k3rl_request_seconds_bucket{le="+Inf"}'] == 1
    assert after["k3rl_running_requests"] == 0


def test_starting_is_not_sick_and_failing_to_load_is(model):
    go = threading.Event()

    def load():
        go.wait(20)
        raise RuntimeError("no weights here")

    with running(load) as (url, _):
        assert httpx.get(url + "/health").json() == {"status": "starting", "failure": None}
        assert httpx.get(url + "/ready").status_code == 503
        assert "k3rl_ready 0" in httpx.get(url + "/metrics", headers=HEADERS).text
        early = httpx.post(url + "/v1/completions", headers=HEADERS, json={"prompt": "a"})
        assert (early.status_code, early.json()["error"]["code"]) == (503, "starting")
        go.set()
        wait_until(lambda: httpx.get(url + "/health").status_code == 500)
        assert "no weights here" in httpx.get(url + "/health").json()["failure"]
        late = httpx.post(url + "/v1/completions", headers=HEADERS, json={"prompt": "a"})
        assert "no weights here" in late.json()["error"]["message"]


def test_an_engine_that_cannot_be_loaded_ends_the_command():
    def load():
        raise RuntimeError("no weights")

    with pytest.raises(RuntimeError, match="no weights"):
        serve(create_app(load, TOKENIZER), port=0)


# ---- images


def picture(size: tuple[int, int], colour: str = "red") -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, colour).save(out, "PNG")
    return out.getvalue()


def asking(*urls: str) -> list[dict]:
    """A conversation with these images and a text that tries to move them."""
    parts = [{"type": "image_url", "image_url": {"url": url, "detail": "auto"}} for url in urls]
    return [{"role": "user", "content": [{"type": "text", "text": xtml.IMAGE_PLACEHOLDER}, *parts]}]


@pytest.fixture(scope="module")
def seeing(build_model):
    width = dict.fromkeys(("vt_hidden_size", "vt_intermediate_size", "qkv_hidden_size", "mm_hidden_size"), 16)
    vision = VisionConfig(
        vt_num_attention_heads=2, vt_num_hidden_layers=1, text_hidden_size=32, init_pos_emb_height=4,
        init_pos_emb_width=4, **width,
    )  # fmt: skip
    pad = TOKENIZER.special("media_pad")
    return build_model(
        vocab_size=512, media_placeholder_token_id=pad, max_position_embeddings=512, vision_config=vision
    )


@pytest.fixture(scope="module")
def gallery(seeing):
    limits = ServerLimits(body_bytes=20_000, images=2, image_pixels=100 * 100)
    with running(lambda: Engine(seeing, tokenizer=TOKENIZER), limits=limits) as (url, _):
        wait_until(lambda: httpx.get(url + "/ready").status_code == 200)
        yield openai.OpenAI(base_url=url + "/v1", api_key=TOKEN, max_retries=0)


@pytest.mark.parametrize("stream", [False, True])
def test_the_openai_client_shows_images(gallery, seeing, stream):
    files = [picture((60, 33)), picture((20, 20), "blue")]
    messages = asking(*map(data_url, files))
    own = {"max_tokens": 6, "seed": 4, "extra_body": {"return_token_ids": True, "ignore_eos": True}}
    answer = gallery.chat.completions.create(
        model="tiny",
        messages=messages,
        stream=stream,
        stream_options={"include_usage": True} if stream else None,
        **own,
    )
    images = [encode_image(file) for file in files]
    prompt = TOKENIZER.encode_segments(xtml.render(messages, image_prompts=image_prompts(images)))
    assert prompt.count(TOKENIZER.special("media_pad")) == 2
    (expected,) = Engine(seeing).generate(
        [prompt], SamplingParams(max_tokens=6, seed=4), [preprocess_files(images, {})]
    )
    if stream:
        chunks = list(answer)
        ids = [token for chunk in chunks for choice in chunk.choices for token in getattr(choice, "token_ids", [])]
        usage = chunks[-1].usage
    else:
        ids, usage = answer.choices[0].token_ids, answer.usage
        assert answer.prompt_token_ids == prompt
    assert ids == list(expected.token_ids)
    assert usage.prompt_tokens == len(prompt) + 5, "six rows for the first image, one for the second"


@pytest.mark.parametrize(
    ("urls", "message"),
    [
        (["https://example.org/a.png"], "would have to be downloaded.*send its bytes as data:"),
        (["data:image/png;base64,!!"], "holds no base64"),
        ([data_url(b"no image")], "cannot be read"),
        ([data_url(picture((90, 90))[:60])], "cannot be read"),
        ([data_url(picture((101, 100)))], "101 x 100 pixels; at most 10000"),
        ([data_url(picture((8, 8)))] * 3, "3 images; at most 2"),
        ([7], "holds int"),
        ([data_url(picture((8, 8))) + "A" * 20_000], "larger than 20000 bytes"),
    ],
)
def test_images_that_cannot_be_taken_are_refused(gallery, urls, message):
    with pytest.raises(openai.APIStatusError, match=message) as caught:
        gallery.chat.completions.create(model="tiny", messages=asking(*urls), max_tokens=1)
    assert caught.value.status_code == (413 if "larger" in message else 400)
    assert caught.value.body["param"] == (None if "larger" in message else "messages")


def test_a_prompt_whose_images_do_not_fit_is_refused_and_so_is_a_bare_placeholder(gallery):
    urls = [data_url(picture((99, 99)))] * 2  # 16 rows each
    with pytest.raises(openai.BadRequestError, match="exceed the context of 512") as caught:
        gallery.chat.completions.create(model="tiny", messages=asking(*urls), max_tokens=460)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match=r"1 image placeholders .* 0 images"):
        gallery.completions.create(model="tiny", prompt=[1, TOKENIZER.special("media_pad")], max_tokens=1)


def test_a_model_without_a_tower_refuses_images(served):
    client = openai.OpenAI(base_url=served[0] + "/v1", api_key=TOKEN, max_retries=0)
    with pytest.raises(openai.BadRequestError, match="no vision tower"):
        client.chat.completions.create(model="tiny", messages=asking(data_url(picture((8, 8)))))


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["n"]}


@pytest.mark.parametrize("thinking", [True, False])
def test_response_format_gives_json_of_the_schema_in_the_response(served, thinking):
    url, _ = served
    client = openai.OpenAI(base_url=url + "/v1", api_key=TOKEN, max_retries=0)
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    for seed in range(4):
        answer = client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            response_format=wanted,
            temperature=2.0,
            max_tokens=120,
            seed=seed,
            logit_bias={str(TOKENIZER.special("close")): 9.0},  # short thoughts
            extra_body={"thinking": thinking},
        )
        (choice,) = answer.choices
        if choice.finish_reason == "stop":
            assert 0 <= json.loads(choice.message.content)["n"] <= 99
            return
    raise AssertionError("none of four answers came to its end")


@pytest.mark.parametrize(
    ("extra", "matches"),
    [
        ({"structured_outputs": {"regex": "[0-9]{3}"}}, lambda text: text.isdecimal() and len(text) == 3),
        ({"structured_outputs": {"choice": ['a"\u00e9', "b"]}}, lambda text: text in ('a"\u00e9', "b")),
        ({"structured_outputs": {"grammar": 'root ::= "x" | "yy"'}}, lambda text: text in ("x", "yy")),
        ({"structured_outputs": {"json": SCHEMA}}, lambda text: json.loads(text)["n"] <= 99),
    ],
)
def test_a_completion_keeps_to_a_pattern_a_choice_a_grammar_and_a_schema(served, extra, matches):
    body = {"prompt": "say", "max_tokens": 80, "temperature": 3, **extra}
    (choice,) = httpx.post(served[0] + "/v1/completions", json=body, headers=HEADERS).json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert matches(choice["text"])


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "'not'"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"structured_outputs": {"regex": "("}}, "regex"),
        ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "exactly one"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "text"}}, "keep one"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "stop id"),
    ],
)
def test_a_constraint_that_cannot_be_kept_is_refused(served, extra, says):
    answer = httpx.post(served[0] + "/v1/completions", json={"prompt": "say", **extra}, headers=HEADERS)
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]


def test_keys_that_nothing_reads_are_named_in_the_refusal(served):
    body = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "thinking": "c"}]}
    answer = httpx.post(served[0] + "/v1/chat/completions", json=body, headers=HEADERS)
    said = answer.json()["error"]["message"]
    assert (answer.status_code, "message 1" in said, "'thinking'" in said) == (400, True, True)
    assert "'reasoning_content'" in said


@pytest.mark.parametrize("thinking", [True, False])
def test_a_tool_that_is_named_is_called_with_the_arguments_that_it_declares(served, thinking):
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}, "how": {"enum": ["up", "down"]}},
        "required": ["n"],
    }
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in ("other", 'a"b')]
    client = openai.OpenAI(base_url=served[0] + "/v1", api_key=TOKEN, max_retries=0)
    for seed in range(6):
        answer = client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            tools=tools,
            tool_choice=named('a"b'),
            temperature=2.0,
            max_tokens=300,
            seed=seed,
            logit_bias={str(TOKENIZER.special("close")): 9.0},  # short thoughts
            extra_body={"thinking": thinking},
        )
        (choice,) = answer.choices
        if choice.finish_reason == "tool_calls":
            [call] = choice.message.tool_calls
            arguments = json.loads(call.function.arguments)
            assert call.function.name == 'a"b'
            assert arguments["n"] in range(10)
            assert arguments.get("how", "up") in ("up", "down")
            return
    raise AssertionError("none of six answers came to its end")


def test_a_slow_constraint_keeps_no_other_client_waiting_and_ends_with_the_server(model):
    slow = {"prompt": "a", "structured_outputs": {"json": {"type": "string", "pattern": "^[ab]{30000}$"}}}
    with running(lambda: Engine(model, tokenizer=TOKENIZER)) as (url, _):
        wait_until(lambda: httpx.get(url + "/ready").status_code == 200)
        quick = {"prompt": "a", "structured_outputs": {"regex": "[ab]"}}
        assert httpx.post(url + "/v1/completions", headers=HEADERS, json=quick, timeout=60).status_code == 200
        said = []
        threads = [
            threading.Thread(
                target=lambda: said.append(httpx.post(url + "/v1/completions", headers=HEADERS, json=slow, timeout=60))
            )
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        plain = {"messages": MESSAGES, "max_tokens": 1}
        began = time.monotonic()
        assert httpx.post(url + "/v1/chat/completions", headers=HEADERS, json=plain, timeout=60).status_code == 200
        assert time.monotonic() - began < 5  # the constraints take 15 s each, two at a time
    assert time.monotonic() - began < 20  # three seconds for who is in flight, on a busy machine
    for thread in threads:
        thread.join(10)
    assert {answer.status_code for answer in said} <= {400, 500}


def test_line_separators_are_escaped_in_a_stream():
    sent = tokens_openai.event({"a": "\u2028\u2029\x85\r\n"})
    assert len(sent.splitlines()) == 2  # the data, and the empty line that ends it
    assert json.loads(tokens_openai.event_data(sent.splitlines()[0])) == {"a": "\u2028\u2029\x85\r\n"}


def test_a_folder_of_the_hugging_face_cache_is_called_by_its_repository(tmp_path):
    snapshot = tmp_path / "hub" / "models--moonshotai--Kimi-K3" / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    assert name_of(snapshot) == "moonshotai/Kimi-K3"
    (tmp_path / "mine").symlink_to(snapshot)
    assert name_of(tmp_path / "mine") == "moonshotai/Kimi-K3"
    (tmp_path / "run").mkdir()
    assert name_of(tmp_path / "run") == "run"

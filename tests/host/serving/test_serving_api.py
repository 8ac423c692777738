# SPDX-License-Identifier: MIT
"""The OpenAI API through the official client, on the real server."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from fake_runner import FakeRunner, next_token, oracle
from server_under_test import ServerUnderTest, TextModel, eventually
from vtpu.serving.scheduler import SchedulerConfig
from vtpu.serving.step_plan import SamplingParams, StepPlan
from vtpu.tokenizer import Tokenizer

MakeServer = Callable[..., ServerUnderTest]


def client_of(server: ServerUnderTest) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture
def client(server: ServerUnderTest) -> Iterator[openai.OpenAI]:
    with client_of(server) as client:
        yield client
    server.wait_idle()


def answering(tokenizer: Tokenizer, answers: dict[str, list[int]]) -> FakeRunner:
    """A runner that gives fixed answers to some prompts, then the end token."""
    runner = FakeRunner()
    known = {tuple(tokenizer.encode(text)): ids for text, ids in answers.items()}
    assert tokenizer.eos_token_id is not None
    eos = tokenizer.eos_token_id

    def script(tokens: list[int], position: int) -> int | None:
        ids = known.get(tuple(tokens[: len(tokens) - position]))
        if ids is None:
            return None
        return ids[position] if position < len(ids) else eos

    runner.script = script
    return runner


def bytewise(tokenizer: Tokenizer, text: str) -> list[int]:
    """A text as one token a byte, so that everything is split."""
    single = {tokenizer.raw_bytes(i): i for i in range(tokenizer.vocab_size)}
    return [single[bytes([b])] for b in text.encode()]


def streamed(client: openai.OpenAI, **request: Any) -> tuple[str, str | None]:
    text, reason = "", None
    for chunk in client.completions.create(stream=True, **request):
        assert reason is None, "nothing may follow the finish_reason"
        text += chunk.choices[0].text
        reason = chunk.choices[0].finish_reason
    return text, reason


# ---- answers ----


def test_models(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").owned_by == "vtpu"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_completion_matches_the_oracle(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    prompt = "Once upon a time"
    expected = oracle(tokenizer.encode(prompt), 20, SamplingParams(0.0))
    answer = client.completions.create(model="fake", prompt=prompt, max_tokens=20, temperature=0)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.choices[0].text == tokenizer.decode(expected)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(tokenizer.encode(prompt))
    assert answer.usage.completion_tokens == 20
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 20


def test_completion_defaults_to_sixteen_tokens(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="x")
    assert answer.usage is not None and answer.usage.completion_tokens == 16


def test_prompt_forms(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Hello there")
    arguments: dict[str, Any] = {"model": "fake", "max_tokens": 5, "temperature": 0}
    text = client.completions.create(prompt="Hello there", **arguments)
    tokens = client.completions.create(prompt=ids, **arguments)
    several = client.completions.create(prompt=["Hello there", "Bye"], **arguments)
    lists = client.completions.create(prompt=[ids, ids[:1]], **arguments)
    bye = client.completions.create(prompt="Bye", **arguments)
    assert text.choices[0].text == tokens.choices[0].text
    assert [c.index for c in several.choices] == [0, 1]
    assert several.choices[0].text == text.choices[0].text
    assert several.choices[1].text == bye.choices[0].text
    assert lists.choices[0].text == text.choices[0].text
    assert several.usage is not None
    assert several.usage.prompt_tokens == len(ids) + len(tokenizer.encode("Bye"))
    assert several.usage.completion_tokens == 10


def test_streamed_equals_unstreamed(client: openai.OpenAI) -> None:
    for seed in range(10):
        request: dict[str, Any] = {
            "model": "fake",
            "prompt": f"Story {seed}:",
            "max_tokens": 40,
            "seed": seed,
            # Likely to occur, and split over tokens when it does.
            "stop": ["er", "on th", "a"][: seed % 4] or None,
        }
        whole = client.completions.create(**request).choices[0]
        assert streamed(client, **request) == (whole.text, whole.finish_reason)


def test_chat(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    messages: list[Any] = [{"role": "user", "content": "Hi"}]
    prompt = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by "
        "Hugging Face<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids = tokenizer.encode(prompt)
    expected = tokenizer.decode(oracle(ids, 12, SamplingParams(0.0)))
    answer = client.chat.completions.create(
        model="fake", messages=messages, max_completion_tokens=12, temperature=0
    )
    assert answer.choices[0].message.content == expected
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage is not None and answer.usage.prompt_tokens == len(ids)
    parts: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}
    ]
    stream = client.chat.completions.create(
        model="fake", messages=parts, max_tokens=12, temperature=0, stream=True
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == expected
    reasons = [c.choices[0].finish_reason for c in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]
    assert all(c.usage is None for c in chunks)


def test_usage_comes_once_at_the_end(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": "Hi"}],
            max_tokens=9,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert all(c.usage is None for c in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 9


# ---- text ----


def test_split_characters_and_stop_strings(make_server: MakeServer, tokenizer: Tokenizer) -> None:
    text = "naïve 漢字 👩‍👩‍👧 then STOP and more"
    runner = answering(tokenizer, {"go": bytewise(tokenizer, text)})
    server = make_server(runner)
    with client_of(server) as client:
        request: dict[str, Any] = {"model": "fake", "prompt": "go", "max_tokens": 200}
        whole = client.completions.create(**request)
        assert whole.choices[0].text == text
        assert whole.choices[0].finish_reason == "stop"
        assert streamed(client, **request) == (text, "stop")
        for stop in ("STOP", ["zzz", " STOP a"], "漢字", "👩‍👧", "n"):
            cut = text[: text.index(stop if isinstance(stop, str) else stop[1])]
            answer = client.completions.create(stop=stop, **request).choices[0]
            assert (answer.text, answer.finish_reason) == (cut, "stop")
            assert streamed(client, stop=stop, **request) == (cut, "stop")
        # The end token comes while "more" might still begin a stop string.
        assert streamed(client, stop="more to come", **request) == (text, "stop")
        # And so does max_tokens: "STO" is held back until then.
        length = len(text.split("P and")[0].encode())
        request["max_tokens"] = length
        assert streamed(client, stop="STOP", **request) == (
            text.split("P and")[0],
            "length",
        )
    server.wait_idle()


def test_usage_counts_up_to_the_token_that_completed_the_stop_string(
    make_server: MakeServer, tokenizer: Tokenizer
) -> None:
    runner = answering(tokenizer, {"go": bytewise(tokenizer, "abcSTOPdef")})
    server = make_server(runner)
    with client_of(server) as client:
        answer = client.completions.create(
            model="fake", prompt="go", stop="STOP", max_tokens=50, logprobs=0
        )
    assert answer.usage is not None and answer.usage.completion_tokens == 7
    assert answer.choices[0].logprobs is not None
    assert len(answer.choices[0].logprobs.tokens or []) == 7
    server.wait_idle()


def test_control_token_as_stop_string_and_ignore_eos(
    make_server: MakeServer, tokenizer: Tokenizer
) -> None:
    ids = [*bytewise(tokenizer, "one"), 4, *bytewise(tokenizer, "two")]
    server = make_server(answering(tokenizer, {"go": ids}))
    with client_of(server) as client:
        request: dict[str, Any] = {"model": "fake", "prompt": "go", "max_tokens": 12}
        plain = client.completions.create(**request).choices[0]
        assert (plain.text, plain.finish_reason) == ("onetwo", "stop")
        stop = client.completions.create(stop="<reponame>", **request).choices[0]
        assert (stop.text, stop.finish_reason) == ("one", "stop")
        on = client.completions.create(extra_body={"ignore_eos": True}, **request)
        assert on.choices[0].finish_reason == "length"
        late = client.completions.create(
            extra_body={"stop_token_ids": [4], "min_tokens": 4}, **request
        )
        assert late.choices[0].text == "onetwo"
    server.wait_idle()


# ---- log probabilities ----


def check_completion_logprobs(logprobs: Any, text: str, count: int, tokens: list[Any]) -> None:
    assert logprobs.token_logprobs == [t.logprob for t in tokens]
    at = 0
    for name, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert offset == at
        assert text.startswith(name, at)
        at += len(name)
    assert at == len(text)
    for top, token in zip(logprobs.top_logprobs, tokens, strict=True):
        assert len(top) in (count, count + 1)
        assert {v for _, v in token.top_logprobs} <= set(top.values())


@pytest.mark.parametrize("count", [0, 1, 20])
def test_completion_logprobs(client: openai.OpenAI, tokenizer: Tokenizer, count: int) -> None:
    prompt = tokenizer.encode("Numbers:")
    sampling = SamplingParams(0.0, n_logprobs=count)
    ids = oracle(prompt, 8, sampling)
    tokens = [next_token([*prompt, *ids[:i]], sampling, i, 300, 20000) for i in range(8)]
    request: dict[str, Any] = {
        "model": "fake", "prompt": prompt, "max_tokens": 8, "temperature": 0,
        "logprobs": count,
    }  # fmt: skip
    choice = client.completions.create(**request).choices[0]
    check_completion_logprobs(choice.logprobs, choice.text, count, tokens)
    merged: dict[str, list[Any]] = {}
    for chunk in client.completions.create(stream=True, **request):
        part = chunk.choices[0].logprobs
        assert part is not None
        for key, value in part.model_dump().items():
            merged.setdefault(key, []).extend(value)
    assert choice.logprobs is not None
    assert merged == choice.logprobs.model_dump()


def test_chat_logprobs(make_server: MakeServer, tokenizer: Tokenizer) -> None:
    runner = FakeRunner()
    pieces = bytewise(tokenizer, "é漢")
    runner.script = lambda tokens, position: pieces[position] if position < len(pieces) else None
    server = make_server(runner)
    request: dict[str, Any] = {
        "model": "fake", "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 7, "temperature": 0, "logprobs": True, "top_logprobs": 3,
    }  # fmt: skip
    with client_of(server) as client:
        answer = client.chat.completions.create(**request)
        content = answer.choices[0].logprobs.content
        assert len(content) == 7
        assert content[0].token == "bytes:\\xc3"
        raw = bytes(b for token in content for b in token.bytes or [])
        assert raw.decode() == answer.choices[0].message.content
        assert all(len(token.top_logprobs) == 3 for token in content)
        # f32 values survive JSON bit for bit.
        for token in content:
            (exact,) = struct.unpack("<f", struct.pack("<f", token.logprob))
            assert exact == token.logprob
        parts: list[Any] = []
        for chunk in client.chat.completions.create(stream=True, **request):
            if chunk.choices[0].logprobs:
                parts += chunk.choices[0].logprobs.content or []
        assert parts == content
        off = client.chat.completions.create(**{**request, "logprobs": False, "top_logprobs": None})
        assert off.choices[0].logprobs is None
    server.wait_idle()


# ---- seeds and several answers ----


def test_seed_gives_the_same_alone_and_beside_others(client: openai.OpenAI) -> None:
    def ask(prompt: str, seed: int | None) -> str:
        answer = client.completions.create(
            model="fake", prompt=prompt, max_tokens=20, seed=seed, temperature=0.9
        )
        return answer.choices[0].text

    alone = ask("seeded", 7)
    assert ask("seeded", 7) == alone
    assert ask("seeded", 8) != alone
    assert ask("seeded", None) != ask("seeded", None)
    with concurrent.futures.ThreadPoolExecutor(9) as pool:
        crowd = [pool.submit(ask, f"other {i}", None) for i in range(8)]
        assert pool.submit(ask, "seeded", 7).result() == alone
        concurrent.futures.wait(crowd)


def test_several_answers_differ_and_do_not_mix(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {
        "model": "fake", "prompt": ["a", "b"], "n": 3, "seed": 5, "max_tokens": 15,
    }  # fmt: skip
    whole = client.completions.create(**request)
    texts = [choice.text for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == list(range(6))
    assert len(set(texts)) == 6
    assert client.completions.create(**{**request, "n": 1}).choices[0].text == texts[0]
    parts = [""] * 6
    for chunk in client.completions.create(stream=True, **request):
        parts[chunk.choices[0].index] += chunk.choices[0].text
    assert parts == texts
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == 2 and whole.usage.completion_tokens == 90


# ---- what is refused ----

CHAT_HI = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"prompt": "x", "temperature": 2.1}, "temperature", "0.0 to 2.0"),
        ({"prompt": "x", "temperature": -1}, "temperature", "0.0 to 2.0"),
        ({"prompt": "x", "temperature": "hot"}, "temperature", "a number"),
        ({"prompt": "x", "temperature": float("nan")}, "temperature", "0.0 to 2.0"),
        ({"prompt": "x", "top_p": 0}, "top_p", "above 0.0"),
        ({"prompt": "x", "top_p": 1.5}, "top_p", "at most 1.0"),
        ({"prompt": "x", "top_k": -2}, "top_k", "-1 to"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens", "1 to"),
        ({"prompt": "x", "max_tokens": -5}, "max_tokens", "1 to"),
        ({"prompt": "x", "max_tokens": 1.5}, "max_tokens", "an integer"),
        ({"prompt": "x", "max_tokens": True}, "max_tokens", "an integer"),
        ({"prompt": "x", "logprobs": 21}, "logprobs", "0 to 20"),
        ({"prompt": "x", "logprobs": True}, "logprobs", "an integer"),
        ({"prompt": "x", "n": 0}, "n", "1 to 16"),
        ({"prompt": "x", "n": 17}, "n", "1 to 16"),
        ({"prompt": "x", "seed": 2**64}, "seed", "must be"),
        ({"prompt": "x", "stop": 5}, "stop", "a string or a list"),
        ({"prompt": "x", "stop": [""]}, "stop", "empty"),
        ({"prompt": "x", "stop": ["s"] * 17}, "stop", "at most 16"),
        ({"prompt": "x", "stream": "yes"}, "stream", "true or false"),
        ({"prompt": "x", "stream_options": {}}, "stream_options", "stream"),
        ({"prompt": "x", "echo": True}, "echo", "not supported"),
        ({"prompt": "x", "best_of": 2}, "best_of", "not supported"),
        ({"prompt": "x", "frequency_penalty": 0.5}, "frequency_penalty", "not supp"),
        ({"prompt": "x", "logit_bias": {"5": 1}}, "logit_bias", "not supported"),
        ({"prompt": "x", "min_tokens": 9, "max_tokens": 3}, "min_tokens", "max_tokens"),
        ({"prompt": "x", "stop_token_ids": [49152]}, "stop_token_ids", "0 to 49151"),
        ({"prompt": "x", "colour": "red"}, "colour", "unknown parameter"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "must be"),
        ({"prompt": 5}, "prompt", "must be"),
        ({"prompt": [1, 49152]}, "prompt", "0 to 49151"),
        ({"prompt": [-1]}, "prompt", "0 to 49151"),
        ({"prompt": [1, "a"]}, "each item of prompt", "token ids"),
        ({"prompt": "\ud800"}, "prompt", "surrogate"),
        ({"prompt": ["x"] * 65}, "prompt", "at most 64"),
        ({}, "prompt", "required"),
        ({"messages": []}, "messages", "at least one"),
        ({"messages": ["Hi"]}, "messages[0]", "an object"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "null"),
        ({"messages": [{"role": "cat", "content": "x"}]}, "messages[0].role", "'cat'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content",
            "'text'",
        ),
        ({**CHAT_HI, "top_logprobs": 21}, "top_logprobs", "0 to 20"),
        ({**CHAT_HI, "top_logprobs": 2}, "top_logprobs", "logprobs"),
        ({**CHAT_HI, "logprobs": 1}, "logprobs", "true or false"),
        ({**CHAT_HI, "tools": [{"type": "function"}]}, "tools", "not supported"),
        (
            {**CHAT_HI, "response_format": {"type": "json_object"}},
            "response_format",
            "not supported",
        ),
        (
            {**CHAT_HI, "stream": True, "stream_options": {"fast": True}},
            "stream_options.fast",
            "unknown",
        ),
        ({**CHAT_HI, "max_completion_tokens": 0}, "max_completion_tokens", "1 to"),
    ],
)
def test_bad_parameters(
    shared_server: ServerUnderTest, body: dict[str, Any], param: str, words: str
) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    status, answer = post(shared_server, path, json.dumps(body).encode())
    error = answer["error"]
    assert status == 400, answer
    assert error["param"] == param
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "extra",
    [
        {"user": "me"},
        {"frequency_penalty": 0, "presence_penalty": 0.0},
        {"logit_bias": None},
        {"logit_bias": {}},
        {"stop": None, "seed": None, "max_tokens": None},
        {"top_k": -1},
        {"top_k": 10**6},
        {"max_tokens": 4.0},
        {"seed": -5},
    ],
)
def test_neutral_parameters_are_accepted(
    shared_server: ServerUnderTest, extra: dict[str, Any]
) -> None:
    body = {"prompt": "x", "max_tokens": 2, **extra}
    status, answer = post(shared_server, "/v1/completions", json.dumps(body).encode())
    assert status == 200, answer


def test_neutral_chat_parameters_are_accepted(shared_server: ServerUnderTest) -> None:
    body = {
        **CHAT_HI, "max_tokens": 2, "response_format": {"type": "text"}, "tools": [],
        "logprobs": False, "top_logprobs": 0, "tool_choice": "none", "n": 1,
    }  # fmt: skip
    status, answer = post(shared_server, "/v1/chat/completions", json.dumps(body).encode())
    assert status == 200, answer


@pytest.fixture(scope="module")
def shared_server(tokenizer: Tokenizer) -> Iterator[ServerUnderTest]:
    server = ServerUnderTest(TextModel(tokenizer), FakeRunner(), SchedulerConfig())
    yield server
    server.wait_idle()
    server.close()


def post(
    server: ServerUnderTest,
    path: str,
    body: bytes,
    method: str = "POST",
) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request(method, path, body)
        response = connection.getresponse()
        text = response.read().decode()
        if response.headers["content-type"] != "application/json":
            return response.status, text
        return response.status, json.loads(text)
    finally:
        connection.close()


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b'{"prompt": "x",}', b"\xff\xfe", b"[" * 100_000, b"9" * 5000],
)
def test_malformed_json(shared_server: ServerUnderTest, body: bytes) -> None:
    status, answer = post(shared_server, "/v1/completions", body)
    assert status == 400
    assert "JSON" in answer["error"]["message"]


def test_body_that_is_no_object(shared_server: ServerUnderTest) -> None:
    status, answer = post(shared_server, "/v1/completions", b"[1]")
    assert status == 400 and "must be an object" in answer["error"]["message"]


def test_unknown_model_path_and_method(shared_server: ServerUnderTest) -> None:
    body = json.dumps({"model": "gpt-9", "prompt": "x"}).encode()
    status, answer = post(shared_server, "/v1/completions", body)
    assert status == 404 and answer["error"]["code"] == "model_not_found"
    assert "gpt-9" in answer["error"]["message"]
    status, answer = post(shared_server, "/v1/nothing", b"{}")
    assert status == 404 and "/v1/nothing" in answer["error"]["message"]
    status, answer = post(shared_server, "/v1/completions", b"", "GET")
    assert status == 405 and "POST" in answer["error"]["message"]


def test_body_size_limit(make_server: MakeServer) -> None:
    server = make_server(max_body_bytes=1000)
    status, answer = post(server, "/v1/completions", b" " * 1001)
    assert status == 413 and "1000" in answer["error"]["message"]
    # Without a length up front, the limit holds just the same.
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as raw:
        raw.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n3e9\r\n" + b" " * 1001
        )
        assert raw.recv(12) == b"HTTP/1.1 413"
    ok = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    assert post(server, "/v1/completions", ok)[0] == 200
    server.wait_idle()


def test_a_client_that_sends_it_all_first_reads_the_413(make_server: MakeServer) -> None:
    server = make_server(max_body_bytes=1000)
    # More than the sockets' buffers hold.
    status, answer = post(server, "/v1/completions", b" " * (32 << 20))
    assert status == 413 and "1000" in answer["error"]["message"]


def test_a_text_that_cannot_fit_is_refused_unread(
    make_server: MakeServer, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server(max_model_len=64)
    monkeypatch.delattr(Tokenizer, "encode")
    body = json.dumps({"prompt": ["x", "y" * 100_000]}).encode()
    status, answer = post(server, "/v1/completions", body)
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
    assert "64 tokens" in answer["error"]["message"]


def test_what_can_never_fit_is_refused_with_the_limit(
    make_server: MakeServer, tokenizer: Tokenizer
) -> None:
    # 4 usable blocks of 16 hold 64 tokens, less than max_model_len.
    server = make_server(FakeRunner(num_blocks=5), max_model_len=100)
    with client_of(server) as client:
        for body in ([5] * 64, [5] * 8193):
            with pytest.raises(openai.BadRequestError) as caught:
                client.completions.create(model="fake", prompt=body)
            assert caught.value.code == "context_length_exceeded"
            assert "64 tokens" in str(caught.value)
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="fake", prompt=[5] * 60, max_tokens=5)
        assert caught.value.param == "max_tokens"
        assert "64 tokens" in str(caught.value)
        exact = client.completions.create(model="fake", prompt=[5] * 60, max_tokens=4)
        assert exact.usage is not None and exact.usage.completion_tokens == 4
        # Without max_tokens, the answer ends where the context does.
        short = client.completions.create(model="fake", prompt=[5] * 60)
        assert short.usage is not None and short.usage.completion_tokens == 4
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(
                model="fake", messages=[{"role": "user", "content": "word " * 100}]
            )
        assert caught.value.param == "messages"
    server.wait_idle()


def test_chat_template_error_is_a_400_with_its_message(
    make_server: MakeServer,
) -> None:
    from vtpu.serving.chat_template import ChatTemplate

    server = make_server()
    server.text.template = ChatTemplate("{{ raise_exception('roles must alternate') }}", "", "")
    with client_of(server) as client:
        with pytest.raises(openai.BadRequestError, match="roles must alternate"):
            client.chat.completions.create(
                model="fake", messages=[{"role": "user", "content": "Hi"}]
            )
        server.text.template = None
        with pytest.raises(openai.BadRequestError, match="no chat template"):
            client.chat.completions.create(
                model="fake", messages=[{"role": "user", "content": "Hi"}]
            )
    server.wait_idle()


# ---- load, failure, departure ----


class Gate:
    """Holds the runner before a step until it is opened."""

    def __init__(self, runner: FakeRunner) -> None:
        self.entered = threading.Semaphore(0)
        self._open = threading.Semaphore(0)
        self._always = threading.Event()
        runner.before_step = self._wait

    def _wait(self, plan: StepPlan) -> None:
        self.entered.release()
        if not self._always.is_set():
            assert self._open.acquire(timeout=60)

    def step(self) -> None:
        self._open.release()

    def open(self) -> None:
        self._always.set()
        self._open.release()


def test_many_concurrent_streams_under_block_pressure(
    make_server: MakeServer, tokenizer: Tokenizer
) -> None:
    runner = FakeRunner(num_blocks=24)
    gate = Gate(runner)
    server = make_server(runner, SchedulerConfig(8, 64), max_model_len=300)
    prompts = [f"Request number {i}: " + "go " * (i * 5 % 40) for i in range(24)]

    def ask(prompt: str) -> str:
        return streamed(api, model="fake", prompt=prompt, max_tokens=60, temperature=0)[0]

    with client_of(server) as api, concurrent.futures.ThreadPoolExecutor(24) as pool:
        answers = pool.map(ask, prompts)
        # The first step waits for all to arrive: else they might come one by one,
        # and never be short of blocks.
        assert gate.entered.acquire(timeout=60)
        engine = server.frontend.engine
        scheduler = engine.scheduler
        assert scheduler is not None
        begun = len(scheduler.running) + len(scheduler.waiting)
        eventually(lambda: begun + len(engine._inbox) == len(prompts))
        gate.open()
        texts = list(answers)
    for prompt, text in zip(prompts, texts, strict=True):
        ids = oracle(tokenizer.encode(prompt), 60, SamplingParams(0.0))
        assert text == tokenizer.decode(ids)
    server.wait_idle()
    assert scheduler.num_preemptions > 0


def test_full_queue_is_429(make_server: MakeServer) -> None:
    runner = FakeRunner()
    gate = Gate(runner)
    server = make_server(runner, SchedulerConfig(1, 64), max_waiting=2)
    body = json.dumps({"prompt": "x", "max_tokens": 2}).encode()
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        first = pool.submit(post, server, "/v1/completions", body)
        assert gate.entered.acquire(timeout=60)
        # The first runs; two more may wait.
        two = json.dumps({"prompt": ["x", "y"], "max_tokens": 2}).encode()
        waiting = pool.submit(post, server, "/v1/completions", two)
        eventually(lambda: server.frontend.engine.num_waiting == 2)
        status, answer = post(server, "/v1/completions", body)
        assert status == 429
        assert answer["error"]["type"] == "rate_limit_error"
        assert post(server, "/health", b"", "GET")[0] == 200
        gate.open()
        assert first.result()[0] == 200 and waiting.result()[0] == 200
    assert post(server, "/v1/completions", body)[0] == 200
    server.wait_idle()


def test_more_sequences_than_the_queue_holds_is_400(make_server: MakeServer) -> None:
    server = make_server(max_waiting=2)
    body = json.dumps({"prompt": "x", "n": 3}).encode()
    status, answer = post(server, "/v1/completions", body)
    assert status == 400 and "at most 2" in answer["error"]["message"]


def test_a_failed_step_ends_its_requests_and_nothing_else(
    make_server: MakeServer,
) -> None:
    runner = FakeRunner()
    fault = RuntimeError("queue 0: page fault at 0xdead000")
    outcomes: Iterator[BaseException | None] = iter([fault])  # of the steps to come

    def before_step(plan: StepPlan) -> None:
        if error := next(outcomes, None):
            raise error

    runner.before_step = before_step
    server = make_server(runner)
    with client_of(server) as client:
        with pytest.raises(openai.InternalServerError, match="page fault"):
            client.completions.create(model="fake", prompt="x")
        assert post(server, "/health", b"", "GET")[0] == 200
        good = client.completions.create(model="fake", prompt="x", temperature=0)
        again = client.completions.create(model="fake", prompt="x", temperature=0)
        assert good.choices[0].text == again.choices[0].text
        # In the middle of a stream it is an error event.
        outcomes = iter([*[None] * 20, TimeoutError("hang")])
        seen = ""
        with pytest.raises(openai.APIError, match="hang"):
            for chunk in client.completions.create(
                model="fake",
                prompt="x",
                max_tokens=400,
                stream=True,
                extra_body={"ignore_eos": True},
            ):
                seen += chunk.choices[0].text
        assert seen
    server.wait_idle()


def test_a_runner_that_answers_nonsense_fails_the_step(
    make_server: MakeServer,
) -> None:
    runner = FakeRunner()
    bad = [49152]
    runner.script = lambda tokens, position: bad[0] if bad else None
    server = make_server(runner)
    with client_of(server) as client:
        with pytest.raises(openai.InternalServerError, match="49152"):
            client.completions.create(model="fake", prompt="x")
        bad.clear()
        client.completions.create(model="fake", prompt="x")
    server.wait_idle()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_blocks(make_server: MakeServer, stream: bool) -> None:
    runner = FakeRunner(num_blocks=1025)
    gate = Gate(runner)
    server = make_server(runner)
    body = json.dumps(
        {"prompt": "x", "max_tokens": 8000, "stream": stream, "ignore_eos": True}
    ).encode()
    raw = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
    raw.sendall(head % len(body) + body)
    assert gate.entered.acquire(timeout=60)
    gate.step()
    assert gate.entered.acquire(timeout=60)
    if stream:
        assert raw.recv(15) == b"HTTP/1.1 200 OK"
    raw.close()
    # The runner stands still: only the departure can put an abort in the inbox.
    eventually(lambda: bool(server.frontend.engine._inbox))
    gate.open()
    server.wait_idle()
    # The step that was under way is the last one.
    assert len(runner.plans) == 2


def test_a_stop_string_ends_the_sequence_in_the_engine(
    make_server: MakeServer, tokenizer: Tokenizer
) -> None:
    runner = answering(tokenizer, {"go": bytewise(tokenizer, "X" * 500)})
    gate = Gate(runner)
    server = make_server(runner)
    body = json.dumps({"prompt": "go", "max_tokens": 500, "stop": "XX"}).encode()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post, server, "/v1/completions", body)
        for _ in range(2):
            assert gate.entered.acquire(timeout=60)
            gate.step()
        # A third step, if the engine began one before it was told, stands still;
        # yet the answer is complete.
        status, value = answer.result()
    assert status == 200 and value["choices"][0]["text"] == ""
    assert value["usage"]["completion_tokens"] == 2
    gate.open()
    server.wait_idle()
    assert len(runner.plans) in (2, 3)


def test_a_client_that_leaves_the_queue(make_server: MakeServer) -> None:
    runner = FakeRunner()
    gate = Gate(runner)
    server = make_server(runner, SchedulerConfig(1, 64))
    body = json.dumps({"prompt": "x", "max_tokens": 3}).encode()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(post, server, "/v1/completions", body)
        assert gate.entered.acquire(timeout=60)
        raw = socket.create_connection(("127.0.0.1", server.port), timeout=60)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
        raw.sendall(head % len(body) + body)
        eventually(lambda: server.frontend.engine.num_waiting == 1)
        raw.close()
        eventually(lambda: len(server.frontend.engine._inbox) >= 2)
        gate.open()
        assert first.result()[0] == 200
    server.wait_idle()
    assert len(runner.plans) == 3, "the one that left was never computed"


def test_shutdown_ends_open_requests_with_an_error(make_server: MakeServer) -> None:
    runner = FakeRunner()
    gate = Gate(runner)
    server = make_server(runner)
    body = json.dumps({"prompt": "x", "max_tokens": 900}).encode()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pending = pool.submit(post, server, "/v1/completions", body)
        assert gate.entered.acquire(timeout=60)
        server.call(server.frontend.close)
        gate.open()
        status, answer = pending.result()
    assert status == 500 and "shutting down" in answer["error"]["message"]
    assert post(server, "/v1/completions", body)[0] == 503


def test_a_dead_engine_says_so(make_server: MakeServer) -> None:
    runner = FakeRunner()
    server = make_server(runner)
    scheduler = server.frontend.engine.scheduler
    assert scheduler is not None

    def broken_schedule() -> None:
        raise RuntimeError("a bug in the scheduler")

    scheduler.schedule = broken_schedule  # type: ignore[method-assign]
    body = json.dumps({"prompt": "x"}).encode()
    status, answer = post(server, "/v1/completions", body)
    assert status == 500 and "a bug in the scheduler" in answer["error"]["message"]
    status, answer = post(server, "/health", b"", "GET")
    assert status == 503 and answer == {"status": "dead"}
    assert post(server, "/v1/completions", body)[0] == 503


# ---- health and metrics ----


def test_health_is_503_until_ready(make_server: MakeServer) -> None:
    runner = FakeRunner()
    loaded = threading.Event()

    def load() -> FakeRunner:
        assert loaded.wait(60)
        return runner

    server = make_server(runner, make_runner=load, wait_ready=False)
    assert post(server, "/health", b"", "GET") == (503, {"status": "loading"})
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    assert post(server, "/v1/completions", body)[0] == 503
    assert post(server, "/v1/models", b"", "GET")[0] == 200
    loaded.set()
    eventually(lambda: post(server, "/health", b"", "GET")[0] == 200)
    assert post(server, "/v1/completions", body)[0] == 200
    server.wait_idle()


def test_metrics(server: ServerUnderTest) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    def read() -> dict[str, float]:
        status, text = post(server, "/metrics", b"", "GET")
        assert status == 200
        values: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            assert family.documentation
            for sample in family.samples:
                labels = dict(sample.labels)
                assert labels.pop("model_name") == "fake"
                key = ",".join([sample.name, *labels.values()])
                values[key] = sample.value
        return values

    before = read()
    for body in (
        {"prompt": [5] * 10, "max_tokens": 7},
        {"prompt": [5] * 3, "max_tokens": 1},
    ):
        assert post(server, "/v1/completions", json.dumps(body).encode())[0] == 200
    server.wait_idle()
    after = read()
    assert before["vllm:generation_tokens_total"] == 0
    assert after["vllm:generation_tokens_total"] == 8
    assert after["vllm:prompt_tokens_total"] == 13
    assert after["vllm:request_success_total,length"] == 2
    assert after["vllm:num_requests_running"] == 0
    assert after["vllm:num_requests_waiting"] == 0
    assert after["vllm:kv_cache_usage_perc"] == 0
    assert after["vllm:num_preemptions_total"] == 0
    assert after["vllm:prefix_cache_queries_total"] == 0
    assert after["vllm:prefix_cache_hits_total"] == 0
    counts = {
        "time_to_first_token": 2,
        "inter_token_latency": 6,
        "e2e_request_latency": 2,
        "request_queue_time": 2,
        "request_prefill_time": 2,
        "request_decode_time": 2,
    }
    for name, count in counts.items():
        assert after[f"vllm:{name}_seconds_count"] == count
        assert after[f"vllm:{name}_seconds_bucket,+Inf"] == count

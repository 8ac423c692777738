# SPDX-License-Identifier: MIT
"""The real API over the real device, with the official client."""

from __future__ import annotations

import http.client
import json
import time

import openai
import pytest

from .conftest import Served

pytestmark = pytest.mark.guest
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def test_an_answer_makes_sense(served: Served) -> None:
    answer = served.client.chat.completions.create(
        model=served.model, messages=QUESTION, max_tokens=24, temperature=0
    )
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_streamed_text_is_the_unstreamed_text(served: Served) -> None:
    options = {
        "model": served.model,
        "messages": QUESTION,
        "max_tokens": 32,
        "seed": 7,
        "temperature": 0.8,
    }
    whole = served.client.chat.completions.create(**options)
    pieces = [
        chunk.choices[0].delta.content or ""
        for chunk in served.client.chat.completions.create(**options, stream=True)
        if chunk.choices
    ]
    assert len(pieces) > 2
    assert "".join(pieces) == whole.choices[0].message.content


def test_completion_with_logprobs(served: Served) -> None:
    answer = served.client.completions.create(
        model=served.model, prompt="Two plus two is", max_tokens=8, temperature=0, logprobs=20
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens and logprobs.token_logprobs
    assert "".join(logprobs.tokens) == answer.choices[0].text
    for best, chosen in zip(logprobs.top_logprobs or [], logprobs.token_logprobs, strict=True):
        assert len(best) >= 19  # two tokens may share their text
        assert max(best.values()) == chosen  # greedy


def test_stop_string_ends_the_text_before_it(served: Served) -> None:
    options = {"model": served.model, "prompt": "1, 2, 3, 4,", "max_tokens": 30, "temperature": 0}
    full = served.client.completions.create(**options).choices[0].text
    stopped = served.client.completions.create(**options, stop=[" 7"]).choices[0]
    assert " 7" in full
    assert stopped.text == full.split(" 7")[0]
    assert stopped.finish_reason == "stop"


def test_models_and_health(served: Served) -> None:
    names = [model.id for model in served.client.models.list()]
    assert len(names) == 1 and "SmolLM2" in names[0]


def test_a_long_context_compiles_nothing_and_answers(served: Served) -> None:
    prompt = [1000 + i % 30000 for i in range(3000)]
    answer = served.client.completions.create(
        model=served.model,
        prompt=prompt,
        max_tokens=4,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3000, 4)


def test_a_client_that_leaves_frees_its_blocks(served: Served) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    body = {
        "model": served.model,
        "prompt": "Count:",
        "max_tokens": 4000,
        "stream": True,
        "ignore_eos": True,
    }
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    response = connection.getresponse()
    assert response.readline().startswith(b"data: ")
    assert served.metric("vllm:kv_cache_usage_perc") > 0
    response.close()
    connection.close()
    served.settle(timeout=60)  # 4000 tokens would take longer than that


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"prompt": [1] * 9000}, 400, "8192"),
        ({"prompt": [10**6]}, 400, "prompt"),
        ({"max_tokens": -1}, 400, "max_tokens"),
        ({"temperature": -1}, 400, "temperature"),
        ({"top_p": 0}, 400, "top_p"),
        ({"top_k": -5}, 400, "top_k"),
        ({"logprobs": 21}, 400, "20"),
        ({"sharpness": 1}, 400, "sharpness"),
        ({"model": "gpt-4"}, 404, "gpt-4"),
    ],
)
def test_bad_parameters_name_the_limit(
    served: Served, change: dict[str, object], status: int, words: str
) -> None:
    body = {"model": served.model, "prompt": "Hi", "max_tokens": 1} | change
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    response = connection.getresponse()
    error = json.loads(response.read())["error"]
    connection.close()
    assert response.status == status
    assert words in error["message"] or words == error["param"]


def test_malformed_json(served: Served) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    connection.request("POST", "/v1/completions", b"{", {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.status == 400
    assert "JSON" in json.loads(response.read())["error"]["message"]
    connection.close()


def test_a_hang_is_an_error_and_the_next_request_is_right(served: Served) -> None:
    options = {"model": served.model, "prompt": "The sea is", "max_tokens": 8, "temperature": 0}
    before = served.client.completions.create(**options).choices[0].text
    served.inject("inject-hang", True)
    started = time.monotonic()
    with pytest.raises(openai.APIStatusError) as caught:
        served.client.completions.create(**options)
    assert caught.value.status_code == 500
    assert "hung" in str(caught.value).lower() or "time" in str(caught.value).lower(), started
    served.settle()
    after = served.client.completions.create(**options).choices[0].text
    assert after == before

# SPDX-License-Identifier: MIT
"""Request bodies, checked: every parameter known, typed and in range.

One table an endpoint says what each parameter may be. Whatever is not in the
table, or outside its range, is refused with a 400 that names the parameter and
the limit: a parameter that is silently ignored is worse than one refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vtpu.serving.errors import APIError, bad_request
from vtpu.serving.step_plan import MAX_LOGPROBS

MAX_STOP_STRINGS = 16
MAX_CHOICES = 16
MAX_PROMPTS = 64
MAX_TEMPERATURE = 2.0
COMPLETION_DEFAULT_MAX_TOKENS = 16

_ROLES = ("system", "developer", "user", "assistant", "tool")

Prompt = str | list[int]
Check = Callable[[str, Any], Any]


@dataclass(slots=True)
class GenerationParams:
    """A checked request, the same for both endpoints.

    prompts: for completions; each is text or token ids.
    messages: for chat.
    max_tokens: None means as many as fit, or default_max_tokens if that is less.
    logprobs: None means none; otherwise how many alternatives a token, 0..20.
    """

    model: str | None = None
    prompts: list[Prompt] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    max_tokens: int | None = None
    default_max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    n: int = 1
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    logprobs: int | None = None
    stream: bool = False
    include_usage: bool = False


# ---- checks of one value; each returns it in canonical form ----


def _integer(low: int, high: int) -> Check:
    def check(name: str, value: Any) -> int:
        # bool is an int in Python, but not in JSON; 16.0 is an integer in JSON.
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise bad_request(f"{name} must be an integer, got {_kind(value)}", name)
        if not low <= value <= high:
            raise bad_request(f"{name} is {value}, must be {low} to {high}", name)
        return value

    return check


def _number(low: float, high: float, above: bool = False) -> Check:
    def check(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise bad_request(f"{name} must be a number, got {_kind(value)}", name)
        if not low <= value <= high or (above and value == low):
            limit = f"above {low} and at most {high}" if above else f"{low} to {high}"
            raise bad_request(f"{name} is {value}, must be {limit}", name)
        return float(value)

    return check


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise bad_request(f"{name} must be true or false, got {_kind(value)}", name)
    return value


def _string(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise bad_request(f"{name} must be a string, got {_kind(value)}", name)
    return value


def _anything(name: str, value: Any) -> Any:
    return value


def _only(*neutral: Any) -> Check:
    """For parameters that exist but are not supported: their no-effect values."""

    def check(name: str, value: Any) -> None:
        if not any(type(value) is type(n) and value == n for n in neutral):
            accepted = " or ".join(map(repr, neutral))
            raise bad_request(f"{name} is not supported (only {accepted} is accepted)", name)

    return check


def _stop(name: str, value: Any) -> list[str]:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(s, str) for s in strings):
        raise bad_request(f"{name} must be a string or a list of strings", name)
    if len(strings) > MAX_STOP_STRINGS:
        raise bad_request(
            f"{name} has {len(strings)} strings, at most {MAX_STOP_STRINGS} are allowed",
            name,
        )
    if "" in strings:
        raise bad_request(f"{name} must not contain an empty string", name)
    return strings


def _token_ids(name: str, value: Any) -> list[int]:
    if not isinstance(value, list) or not all(type(t) is int for t in value):
        raise bad_request(f"{name} must be a list of token ids", name)
    return value


def _prompts(name: str, value: Any) -> list[Prompt]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise bad_request(f"{name} must be a string, a list of token ids, or a list of these", name)
    if all(type(token) is int for token in value):
        return [value]
    if len(value) > MAX_PROMPTS:
        raise bad_request(
            f"{name} has {len(value)} prompts, at most {MAX_PROMPTS} are allowed", name
        )
    for prompt in value:
        if not isinstance(prompt, str):
            _token_ids(f"each item of {name}", prompt)
    return value


def _messages(name: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise bad_request(f"{name} must be a list of at least one message", name)
    return [_message(f"{name}[{i}]", message) for i, message in enumerate(value)]


def _message(name: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise bad_request(f"{name} must be an object, got {_kind(message)}", name)
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        raise bad_request(
            f"{name}.role is {role!r}, must be one of {', '.join(_ROLES)}",
            f"{name}.role",
        )
    if message.get("tool_calls") or message.get("function_call"):
        raise bad_request(f"{name}.tool_calls is not supported", f"{name}.tool_calls")
    if isinstance(content, list):
        content = "".join(_text_part(f"{name}.content", part) for part in content)
    elif not isinstance(content, str):
        raise bad_request(
            f"{name}.content must be a string or a list of text parts, got {_kind(content)}",
            f"{name}.content",
        )
    # "developer" is the newer name of the same thing; templates know the older.
    role = "system" if role == "developer" else role
    return {"role": role, "content": content}


def _text_part(name: str, part: Any) -> str:
    if isinstance(part, dict) and part.get("type") == "text":
        text = part.get("text")
        if isinstance(text, str):
            return text
    raise bad_request(f"{name}: only parts of type 'text' are supported", name)


def _stream_options(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise bad_request(f"{name} must be an object, got {_kind(value)}", name)
    options = {"include_usage": _boolean, "include_obfuscation": _only(False)}
    return _checked(value, options, f"{name}.")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")


# ---- the tables ----

_COMMON: dict[str, Check] = {
    "model": _string,
    "max_tokens": _integer(1, 2**31 - 1),
    "min_tokens": _integer(0, 2**31 - 1),
    "temperature": _number(0.0, MAX_TEMPERATURE),
    "top_p": _number(0.0, 1.0, above=True),
    "top_k": _integer(-1, 2**31 - 1),
    "seed": _integer(-(2**63), 2**64 - 1),
    "n": _integer(1, MAX_CHOICES),
    "stop": _stop,
    "stop_token_ids": _token_ids,
    "ignore_eos": _boolean,
    "stream": _boolean,
    "stream_options": _stream_options,
    "user": _string,
    "frequency_penalty": _only(0, 0.0),
    "presence_penalty": _only(0, 0.0),
    "repetition_penalty": _only(1, 1.0),
    "logit_bias": _only({}),
}

_COMPLETION: dict[str, Check] = {
    **_COMMON,
    "prompt": _prompts,
    "logprobs": _integer(0, MAX_LOGPROBS),
    "echo": _only(False),
    "suffix": _only(""),
    "best_of": _only(1),
}

_CHAT: dict[str, Check] = {
    **_COMMON,
    "messages": _messages,
    "max_completion_tokens": _integer(1, 2**31 - 1),
    "logprobs": _boolean,
    "top_logprobs": _integer(0, MAX_LOGPROBS),
    "response_format": _only({"type": "text"}),
    "tools": _only([]),
    "tool_choice": _only("none", "auto"),
    "parallel_tool_calls": _only(True, False),
    "functions": _only([]),
    "function_call": _only("none", "auto"),
    "modalities": _only(["text"]),
    "metadata": _anything,
    "store": _only(False),
    "service_tier": _only("auto", "default"),
    "safety_identifier": _string,
    "prompt_cache_key": _string,
}


def _checked(body: Any, table: Mapping[str, Check], prefix: str = "") -> dict[str, Any]:
    if not isinstance(body, dict):
        raise bad_request(f"the request body must be an object, got {_kind(body)}")
    checked = {}
    for key, value in body.items():
        name = prefix + key
        check = table.get(key)
        if check is None:
            raise APIError(400, f"unknown parameter: {name!r}", name, code="unknown_parameter")
        if value is not None:  # null is how clients say "the default"
            checked[key] = check(name, value)
    return checked


def parse_completion(body: Any) -> GenerationParams:
    """Check a /v1/completions body. Raises APIError 400."""
    values = _checked(body, _COMPLETION)
    if "prompt" not in values:
        raise bad_request("prompt is required", "prompt")
    params = _common(values)
    params.prompts = values["prompt"]
    params.logprobs = values.get("logprobs")
    params.max_tokens = values.get("max_tokens")
    params.default_max_tokens = COMPLETION_DEFAULT_MAX_TOKENS
    return _consistent(params)


def parse_chat(body: Any) -> GenerationParams:
    """Check a /v1/chat/completions body. Raises APIError 400."""
    values = _checked(body, _CHAT)
    if "messages" not in values:
        raise bad_request("messages is required", "messages")
    params = _common(values)
    params.messages = values["messages"]
    if values.get("logprobs"):
        params.logprobs = values.get("top_logprobs", 0)
    elif values.get("top_logprobs"):
        raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
    params.max_tokens = values.get("max_completion_tokens", values.get("max_tokens"))
    return _consistent(params)


def _common(values: dict[str, Any]) -> GenerationParams:
    options = values.get("stream_options")
    stream = values.get("stream", False)
    if options is not None and not stream:
        raise bad_request("stream_options needs stream to be true", "stream_options")
    top_k = values.get("top_k", 0)
    return GenerationParams(
        model=values.get("model"),
        min_tokens=values.get("min_tokens", 0),
        temperature=values.get("temperature", 1.0),
        top_p=values.get("top_p", 1.0),
        top_k=max(top_k, 0),  # -1 is vLLM's way to say "all"
        seed=values.get("seed"),
        n=values.get("n", 1),
        stop=values.get("stop", []),
        stop_token_ids=values.get("stop_token_ids", []),
        ignore_eos=values.get("ignore_eos", False),
        stream=stream,
        include_usage=bool(options and options.get("include_usage")),
    )


def _consistent(params: GenerationParams) -> GenerationParams:
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise bad_request(
            f"min_tokens is {params.min_tokens}, more than max_tokens ({params.max_tokens})",
            "min_tokens",
        )
    return params

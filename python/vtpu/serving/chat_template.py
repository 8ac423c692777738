# SPDX-License-Identifier: MIT
"""Chat messages to prompt text, with the model file's own Jinja template."""

from __future__ import annotations

from typing import Any


class ChatTemplateError(ValueError):
    """The template refused the messages, or is not valid Jinja (HTTP 400)."""


class ChatTemplate:
    """A compiled template. Importing Jinja waits until one is made.

    The template comes from a file that a stranger may have written, so it runs in
    Jinja's sandbox and sees nothing but the messages and the given tokens.
    """

    def __init__(self, source: str, bos: str, eos: str) -> None:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise_exception
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ChatTemplateError(f"the chat template is not valid: {error}") from error
        self._tokens = {"bos_token": bos, "eos_token": eos}

    def render(self, messages: list[dict[str, Any]]) -> str:
        """The prompt, ending where the assistant's answer begins."""
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, **self._tokens
            )
        except ChatTemplateError:
            raise
        except Exception as error:
            # Whatever a template does wrong, it did with this request's messages.
            raise ChatTemplateError(
                f"the chat template failed: {type(error).__name__}: {error}"
            ) from error


def _raise_exception(message: str) -> None:
    raise ChatTemplateError(message)

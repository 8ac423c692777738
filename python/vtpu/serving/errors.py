# SPDX-License-Identifier: MIT
"""Errors that become an OpenAI error object."""

from __future__ import annotations

from typing import Any


class APIError(Exception):
    """An answer other than 200.

    param names the offending request parameter; code is OpenAI's machine-readable
    reason, where it has one.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        kind: str | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers
        if kind is None:
            kind = "server_error" if status >= 500 else "invalid_request_error"
        self.kind = kind

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


def bad_request(message: str, param: str | None = None) -> APIError:
    return APIError(400, message, param)


def unavailable(message: str) -> APIError:
    return APIError(503, message, headers=((b"retry-after", b"1"),))


def overloaded(message: str) -> APIError:
    return APIError(
        429,
        message,
        code="rate_limit_exceeded",
        kind="rate_limit_error",
        headers=((b"retry-after", b"1"),),
    )

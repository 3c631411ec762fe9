"""HTTPError: a refused request."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from postlude.checks import USER_ERRORS

ANTHROPIC_TYPES = {  # of errors, by status
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class HTTPError(Exception):
    """A status and a sentence for the client, OpenAI's `code` for it, and seconds that it should wait."""

    def __init__(
        self, status: int, sentence: str, code: str | None = None, *, retry_after: float | None = None
    ) -> None:
        super().__init__(sentence)
        self.status, self.code, self.retry_after = status, code, retry_after

    @property
    def headers(self) -> dict[str, str]:
        headers = {} if self.retry_after is None else {"retry-after": f"{self.retry_after:g}"}
        return headers | ({"www-authenticate": "Bearer"} if self.status == 401 else {})


@contextlib.contextmanager
def bad_request_on_error() -> Iterator[None]:
    """Turns the user's errors into status 400."""
    try:
        yield
    except USER_ERRORS as error:
        raise HTTPError(400, str(error)) from error


def error_body(error: HTTPError) -> dict[str, Any]:
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": None, "code": error.code}}


def anthropic_error_body(error: HTTPError) -> dict[str, Any]:
    kind = ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}

"""Why a request gets no answer, in the form that OpenAI's clients read. Knows no routes."""

from collections.abc import Mapping
from typing import Any

from spd_lightning.errors import shortened

LONGEST = 1000
"""Characters of an error's field: what a client has sent is not sent back by the megabyte."""


class Refusal(Exception):
    """A request that is not answered, or not to its end.

    Attributes:
        status: of the HTTP response.
        headers: of the HTTP response.

    Args:
        status: of the HTTP response.
        message: what is wrong, and the way out.
        kind: OpenAI's `type` of the error.
        param: the field of the request that is to blame.
        code: a word for programs.
        headers: of the HTTP response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The error object."""
        fields = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": {name: None if value is None else shown(value) for name, value in fields.items()}}


def shown(text: str) -> str:
    """A text, its middle left out if it is long, without halves of surrogate pairs: JSON can hold them, UTF-8 cannot."""
    return shortened(text, LONGEST).encode("utf-8", "backslashreplace").decode()


def shutting_down() -> Refusal:
    """The server ends."""
    return Refusal(503, "the server is shutting down: ask it again later", "server_error", code="shutting_down")


def queue_full(limit: int) -> Refusal:
    """Too many requests wait."""
    message = (
        f"{limit} requests wait already, and answers are made one after the other: try again later, or start the "
        "server with a larger --max_queue"
    )
    return Refusal(429, message, "rate_limit_error", code="queue_full", headers={"Retry-After": "1"})


def too_late(seconds: float, where: str) -> Refusal:
    """The time of a request is over."""
    message = (
        f"no answer within {seconds:g} s; the request was still {where}: ask for fewer tokens, or start the server "
        "with a larger --request_timeout"
    )
    return Refusal(504, message, "timeout_error", code="request_timeout")


def failed(message: str) -> Refusal:
    """The decoder has raised an error."""
    return Refusal(500, f"the decoder has failed: {message}", "server_error", code="decoder_failed")

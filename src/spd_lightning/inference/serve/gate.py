"""What stands before all routes: the API key, the size of bodies, and the count of responses. Knows no routes."""

import asyncio
import hmac
from typing import Any

from starlette.responses import JSONResponse

from spd_lightning.inference.serve.metrics import ServeMetrics
from spd_lightning.inference.serve.refusal import Refusal

MAX_BODY = 4 * 2**20
"""Bytes of a request's body."""

MAX_READ = 16 * MAX_BODY
"""Bytes of a larger one that are read and thrown away: a client hears of the refusal when it has sent all."""


class Gate:
    """An ASGI application around another one.

    A body is read here, whole and within a time, so that nobody who is not to be answered makes the server work.

    Args:
        app: what is behind the gate.
        paths: known ones; all others are counted together.
        api_key: that requests below `/v1` must bring; none to let all in.
        timeout: seconds in which a body must be here.
        metrics: count responses.
    """

    def __init__(
        self, app: Any, paths: frozenset[str], api_key: str | None, timeout: float, metrics: ServeMetrics
    ) -> None:
        self.app = app
        self.paths = paths
        self.expected = None if api_key is None else f"Bearer {api_key}".encode()
        self.timeout = timeout
        self.metrics = metrics

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self.paths else "other"

        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start":
                self.metrics.count_response(path, message["status"])
            await send(message)

        try:
            self._check_key(scope)
            body = await self._read(receive)
        except Refusal as refusal:
            response = JSONResponse(refusal.body(), refusal.status, refusal.headers)
            await response(scope, receive, counted)
            return
        if body is None:  # the client has gone
            return
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Any:
            return messages.pop() if messages else await receive()

        await self.app(scope, replay, counted)

    def _check_key(self, scope: Any) -> None:
        if self.expected is None or not scope["path"].startswith("/v1"):
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        if not hmac.compare_digest(given, self.expected):
            what = "a wrong API key" if given else "no API key"
            message = f"the request brings {what}: send `Authorization: Bearer KEY` with the server's"
            raise Refusal(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    async def _read(self, receive: Any) -> bytes | None:
        body, size, is_complete = bytearray(), 0, False
        try:
            async with asyncio.timeout(self.timeout):
                while not is_complete and size <= MAX_READ:
                    message = await receive()
                    if message["type"] != "http.request":
                        return None
                    part = message.get("body", b"")
                    size += len(part)
                    if size <= MAX_BODY:
                        body += part
                    is_complete = not message.get("more_body", False)
        except TimeoutError:
            message = f"the body was not here within {self.timeout:g} s"
            raise Refusal(
                408, message, "timeout_error", code="request_timeout", headers={"Connection": "close"}
            ) from None
        if size > MAX_BODY:
            close = {"Connection": "close"}
            raise Refusal(413, f"a body has at most {MAX_BODY} bytes", code="body_too_large", headers=close)
        return bytes(body)

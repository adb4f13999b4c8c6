"""A request as its handler sees it: events as they come, a deadline, and what is done when the client goes.

Lives in the event loop of the HTTP server; its job, in the decoder's thread.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from starlette.responses import Response

from spd_lightning.inference.sampling import SamplingParams
from spd_lightning.inference.serve.answers import Answer
from spd_lightning.inference.serve.engine import End, Engine, Event, Job, Piece
from spd_lightning.inference.serve.refusal import Refusal, too_late


class Ticket:
    """A job in the queue; made in the event loop.

    Args:
        engine: takes the job.
        prompt: token ids.
        params: how tokens are drawn.
        num_top: as for `Job`.
        timeout: seconds that the request may take.

    Raises:
        Refusal: if the engine takes none.
    """

    def __init__(
        self, engine: Engine, prompt: Sequence[int], params: SamplingParams, num_top: int | None, timeout: float
    ) -> None:
        self.engine = engine
        self.timeout = timeout
        loop = asyncio.get_running_loop()
        self.deadline = loop.time() + timeout
        self._events: asyncio.Queue[Event] = asyncio.Queue()

        def emit(event: Event) -> None:
            if not loop.is_closed():  # a prefill may take longer than the server waits at its end
                loop.call_soon_threadsafe(self._events.put_nowait, event)

        self.job = Job(prompt, params, emit, num_top)
        engine.submit(self.job)

    async def next(self) -> Piece | End:
        """The next event.

        Raises:
            Refusal: if the answer ends without its end.
        """
        try:
            async with asyncio.timeout_at(self.deadline):
                event = await self._events.get()
        except TimeoutError:
            where = "in the queue" if self.job.state == "waiting" else "being answered"
            self.engine.cancel(self.job)
            raise too_late(self.timeout, where) from None
        if isinstance(event, Refusal):
            raise event
        return event

    @asynccontextmanager
    async def watched(self, receive: Any) -> AsyncIterator[None]:
        """Within, the job is cancelled when the client goes, and when an error or a cancelled task ends the wait."""
        watch = asyncio.create_task(self._wait_for_disconnect(receive))
        try:
            yield
        except BaseException:
            self.engine.cancel(self.job)
            raise
        finally:
            watch.cancel()

    async def _wait_for_disconnect(self, receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.engine.cancel(self.job)
        self._events.put_nowait(Refusal(499, "the client has gone", "server_error", code="cancelled"))


class EventStream(Response):
    """A streamed answer as server-sent events; an error after the first of them becomes an event.

    Args:
        ticket: of the request.
        head: the first event, which has come already.
        answer: makes chunks.
        has_usage: whether a chunk with counts is wanted.
    """

    media_type = "text/event-stream"

    def __init__(self, ticket: Ticket, head: Piece | End, answer: Answer, has_usage: bool) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.ticket = ticket
        self.head = head
        self.answer = answer
        self.has_usage = has_usage

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

        async def write(data: str) -> None:  # ASCII: some readers end a line at U+2028
            await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})

        try:
            # A reader who does not read is given up as well.
            async with self.ticket.watched(receive), asyncio.timeout_at(self.ticket.deadline + 1):
                async for chunk in self._chunks():
                    await write(json.dumps(chunk))
                await write("[DONE]")
        except TimeoutError:
            return
        except Refusal as refusal:
            await write(json.dumps(refusal.body()))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _chunks(self) -> AsyncIterator[dict[str, Any]]:
        usage = {"usage": None} if self.has_usage else {}
        for chunk in self.answer.first():
            yield chunk | usage
        event = self.head
        while isinstance(event, Piece):
            yield self.answer.chunk(event) | usage
            event = await self.ticket.next()
        yield self.answer.last(event) | usage
        if self.has_usage:
            yield self.answer.usage_chunk(event)


async def whole_answer(ticket: Ticket, answer: Answer, receive: Any) -> dict[str, Any]:
    """The object of an answer when it is complete.

    Raises:
        Refusal: if it does not come to its end.
    """
    pieces: list[Piece] = []
    async with ticket.watched(receive):
        while isinstance(event := await ticket.next(), Piece):
            pieces.append(event)
    return answer.whole(pieces, event)

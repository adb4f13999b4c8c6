"""The HTTP server's thread, and how a signal ends everything. Knows no routes and no decoder."""

import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from spd_lightning.inference.serve.engine import Engine

SECONDS_TO_SAY_IT = 3
"""How much longer than the decoder the server waits, so that those whose answers were ended hear of it."""


def bind(host: str, port: int) -> socket.socket:
    """A socket at an address, not listening yet; port 0 is any free one.

    Raises:
        ValueError: if the address cannot be had.
    """
    if not 0 <= port < 2**16:
        raise ValueError(f"port={port}: a number from 0 to 65535 is needed; 0 takes a free one")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ValueError(f"cannot serve on {host}:{port} ({error}): choose another --host or --port") from error
    return listener


class HttpServer:
    """uvicorn in a thread of its own, so that the main thread, which hears of signals, has the decoder.

    Args:
        app: the ASGI application.
        listener: a bound socket.
        grace: seconds that running requests have at the end.
    """

    def __init__(self, app: Any, listener: socket.socket, grace: float) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=int(grace) + SECONDS_TO_SAY_IT,
        )
        self.server = uvicorn.Server(config)
        self.listener = listener
        self.patience = grace + 2 * SECONDS_TO_SAY_IT
        self._thread = threading.Thread(target=self.server.run, args=([listener],), daemon=True)

    def start(self) -> None:
        """Returns when connections are taken."""
        self._thread.start()
        while not self.server.started:
            if not self._thread.is_alive():
                raise RuntimeError("the HTTP server has not started; what it raised is above")
            time.sleep(0.005)

    def stop(self) -> None:
        """Takes no more connections, and ends when the open ones have had their answers. Returns at once."""
        self.server.should_exit = True

    def join(self) -> None:
        """Stops, and returns when it has ended."""
        self.stop()
        self._thread.join(self.patience)


@contextmanager
def stopped_by_signals(engine: Engine, server: HttpServer, grace: float) -> Iterator[None]:
    """Within, SIGTERM and Ctrl-C end the service in good order, and a second one without grace."""
    num_signals = 0

    def stop(*_: object) -> None:
        nonlocal num_signals
        num_signals += 1
        engine.stop(grace if num_signals == 1 else 0.0)
        server.stop()

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""A decoder behind HTTP until a signal comes. Knows both; knows no arguments."""

import socket
import time
from dataclasses import dataclass
from pathlib import Path

from spd_lightning.inference.decoder import PipelineDecoder
from spd_lightning.inference.sampling import VerifyMode
from spd_lightning.inference.serve.app import Service, make_app
from spd_lightning.inference.serve.engine import Engine
from spd_lightning.inference.serve.metrics import ServeMetrics
from spd_lightning.inference.serve.prompts import PromptReader
from spd_lightning.inference.serve.server import HttpServer, stopped_by_signals
from spd_lightning.inference.serve.token_texts import TokenTexts
from spd_lightning.modules.tokenizer import load_tokenizer


@dataclass(frozen=True)
class ServeSettings:
    """How to serve.

    Attributes:
        model: the name that requests give; the target's own when absent.
        api_key: that requests must bring, if any. Shown nowhere.
        max_queue: requests that may wait.
        request_timeout: seconds that a request may take.
        shutdown_grace: seconds that the running request has when the service ends.
        max_new_tokens: of an answer where a chat request says nothing.
        verify: how sampled drafts are judged.
        is_plain: decode without the drafter.
    """

    model: str | None
    api_key: str | None
    max_queue: int
    request_timeout: float
    shutdown_grace: float
    max_new_tokens: int
    verify: VerifyMode
    is_plain: bool = False

    def __post_init__(self) -> None:
        for name, least in (("max_queue", 0), ("max_new_tokens", 1), ("shutdown_grace", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}: at least {least} is needed")
        if not self.request_timeout > 0:
            raise ValueError(f"request_timeout={self.request_timeout}: a number of seconds above 0 is needed")


def serve(decoder: PipelineDecoder, listener: socket.socket, settings: ServeSettings) -> None:
    """Serves until SIGTERM or Ctrl-C. The calling thread, which must be the main one, decodes."""
    metrics = ServeMetrics()
    num_tokens = len(decoder.tokenizer)
    start = decoder.start_autoregressive if settings.is_plain else decoder.start
    engine = Engine(start, num_tokens, settings.max_queue, metrics, decoder.check)
    tokenizer = load_tokenizer(decoder.target_name)  # each thread has its own
    service = Service(
        engine,
        PromptReader(tokenizer, decoder.eos_ids, decoder.max_length, settings.max_new_tokens),
        TokenTexts(load_tokenizer(decoder.target_name)),
        metrics,
        settings.model or model_name(decoder.target_name),
        int(time.time()),
        settings.request_timeout,
        settings.verify,
        settings.api_key,
    )
    server = HttpServer(make_app(service), listener, settings.shutdown_grace)
    with stopped_by_signals(engine, server, settings.shutdown_grace):
        try:
            server.start()
            host, port = listener.getsockname()[:2]
            print(f"serving {service.model} on http://{f'[{host}]' if ':' in host else host}:{port}/v1", flush=True)
            engine.run()
        finally:
            server.join()


def model_name(target: str) -> str:
    """A hub id as it is; of a folder its last part."""
    path = Path(target).expanduser()
    return path.resolve().name if path.is_dir() else target

"""A server in this process for a real tiny decoder, and a decode that goes on only when it is told to."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import AutoModelForCausalLM

from spd_lightning.inference.decoder import PipelineDecoder
from spd_lightning.inference.serve.app import Service, make_app
from spd_lightning.inference.serve.engine import Engine
from spd_lightning.inference.serve.metrics import ServeMetrics
from spd_lightning.inference.serve.prompts import PromptReader
from spd_lightning.inference.serve.server import HttpServer, bind
from spd_lightning.inference.serve.token_texts import TokenTexts
from spd_lightning.modules.tokenizer import load_tokenizer
from tests.inference.folders import save_folders

MODEL = "tiny"
END_OF_TURN = 258
MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT = {"model": MODEL, "messages": MESSAGES, "max_tokens": 12, "temperature": 0}


def save_endless_folders(root: Path) -> tuple[str, str]:
    """A drafter of two stages, and a target that hardly ever ends a turn."""
    drafter, target = save_folders(root, "qwen3_5", 2)
    model = AutoModelForCausalLM.from_pretrained(target)
    with torch.no_grad():
        model.lm_head.weight[END_OF_TURN] = 0.0  # of hundreds of other logits, one is above 0
    model.save_pretrained(target)
    return drafter, target


class Brake:
    """Before each token, decodes wait until they may go on."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.free.set()
        self.tokens = threading.Semaphore(0)
        self.num_begun = self.num_closed = 0

    def around(self, start: Callable[..., Any]) -> Callable[..., Any]:
        def started(*args: Any) -> Any:
            run = start(*args)
            self.num_begun += 1
            run._committed = self._braked(run._committed)
            return run

        return started

    def _braked(self, committed: Any) -> Iterator[int]:
        try:
            for token in committed:
                while not self.free.is_set() and not self.tokens.acquire(timeout=0.005):
                    pass
                yield token
        except GeneratorExit:
            self.num_closed += 1
            committed.close()
            raise


@dataclass
class Live:
    """A running server.

    Attributes:
        url: without the path.
        decoder: what answers, for what is expected while nothing is asked.
        engine: what is served.
        brake: on all decodes.
        metrics: of the server.
    """

    url: str
    decoder: PipelineDecoder
    engine: Engine
    brake: Brake
    metrics: ServeMetrics

    def client(self, **headers: str) -> httpx.Client:
        # Reading certificates, which nobody needs here, would take longer than most answers.
        return httpx.Client(base_url=self.url, headers=headers, trust_env=False, verify=False, timeout=30.0)

    def ask(self, path: str, **body: Any) -> httpx.Response:
        with self.client() as client:
            return client.post(path, json=body)

    def chat(self, **changes: Any) -> httpx.Response:
        return self.ask("/v1/chat/completions", **CHAT | changes)

    def value(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    def until(self, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not reached():
            assert time.monotonic() < deadline, "it did not come to that"
            time.sleep(0.005)


@contextmanager
def served(decoder: PipelineDecoder, max_queue: int = 8, **changes: Any) -> Iterator[Live]:
    """A server until the end of the block; `changes` of `Service`."""
    brake, metrics = Brake(), ServeMetrics()
    engine = Engine(brake.around(decoder.start), len(decoder.tokenizer), max_queue, metrics)
    tokenizer = load_tokenizer(decoder.target_name)
    reader = PromptReader(tokenizer, decoder.eos_ids, decoder.max_length, 32)
    service = replace(
        Service(engine, reader, TokenTexts(load_tokenizer(decoder.target_name)), metrics, MODEL, 0, timeout=30.0),
        **changes,
    )
    listener = bind("127.0.0.1", 0)
    server = HttpServer(make_app(service), listener, 1.0)
    worker = threading.Thread(target=engine.run)
    port = listener.getsockname()[1]
    server.start()
    worker.start()
    try:
        yield Live(f"http://127.0.0.1:{port}", decoder, engine, brake, metrics)
    finally:
        brake.free.set()
        engine.stop(0.0)
        worker.join(20)
        server.join()
        assert not worker.is_alive()

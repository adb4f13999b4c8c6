"""A server under load: `serve_stress.py --drafter DRAFTER [--out FILE.json]`.

Starts `spd-infer serve`, asks for answers one after the other, then from many clients at once of whom some leave early
and some send nonsense, and stops the server by SIGTERM with an answer under way. Every text is compared with what
`PipelineDecoder.generate` gives for the same request, and the server's memory before and after is reported.

Fails (exit code 1) if a text is wrong, a malformed body is not refused, or the server does not end with exit code 0.
"""

import argparse
import json
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from spd_lightning.inference.decoder import PipelineDecoder
from spd_lightning.inference.sampling import SamplingParams

WORDS = "Count add the of two red apples in Paris why name sky blue é 東京 three".split()
MALFORMED = (b"{", b"[]", b"\xff", b'{"model": "m"}', b'{"model": "m", "messages": [{"role": "user", "content": 1}]}')
LARGEST_GROWTH = 32.0
"""MiB by which the server's memory may grow between the first tenth of the requests and the end."""


def make_questions(count: int, seed: int) -> list[tuple[list[dict[str, str]], SamplingParams]]:
    """Messages, and how their answers are drawn: every other one greedily."""
    draw, questions = random.Random(seed), []
    for number in range(count):
        text = " ".join(draw.choices(WORDS, k=draw.randint(2, 12)))
        params = SamplingParams(
            draw.randint(1, 24), draw.choice((0.7, 1.0)) if number % 2 else 0.0, draw.choice((0, 20)), 1.0,
            draw.randrange(2**40), stop=("e",) if number % 5 == 0 else (),
        )  # fmt: skip
        questions.append(([{"role": "user", "content": text}], params))
    return questions


def body_of(messages: Any, params: SamplingParams, stream: bool) -> dict[str, Any]:
    """The request for an answer."""
    return {
        "model": "m", "messages": messages, "max_tokens": params.max_new_tokens, "temperature": params.temperature,
        "top_k": params.top_k, "seed": params.seed, "stop": list(params.stop), "stream": stream,
    }  # fmt: skip


class Server:
    """`spd-infer serve` in a process of its own."""

    def __init__(self, drafter: str, args: list[str]) -> None:
        command = ["serve", "--drafter", drafter, "--port", "0", "--served_model_name", "m", "--shutdown_grace", "60"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "spd_lightning.inference.cli", *command, *args], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"on (\S+)/v1", line)
        if found is None:
            raise SystemExit(f"the server has not started: {line!r}")
        self.url = found[1]

    def client(self) -> httpx.Client:
        """A client with a connection of its own."""
        return httpx.Client(base_url=self.url, trust_env=False, timeout=600.0)

    def metric(self, name: str) -> float:
        """The value of one series."""
        with self.client() as client:
            found = re.search(rf"^{re.escape(name)} (\S+)$", client.get("/metrics").text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    def memory(self) -> float:
        """Resident MiB."""
        return self.metric("process_resident_memory_bytes") / 2**20


def asked_text(client: httpx.Client, body: dict[str, Any], leave_after: int | None = None) -> str | None:
    """The text of an answer; none if the client leaves after so many events of its stream."""
    if not body["stream"]:
        response = client.post("/v1/chat/completions", json=body)
        response.raise_for_status()
        return response.json()["choices"][0]["message"]["content"]
    text, num_events = "", 0
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line or line == "data: [DONE]":
                continue
            text += json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content", "")
            num_events += 1
            if num_events == leave_after:
                return None
    return text


def ask_one_after_the_other(server: Server, questions: Any, expected: list[str]) -> dict[str, Any]:
    """Wrong texts and memory over many requests of one client."""
    wrong, memory, began = [], [], time.perf_counter()
    with server.client() as client:
        for number, (question, text) in enumerate(zip(questions, expected, strict=True)):
            if number % max(1, len(questions) // 10) == 0:
                memory.append(round(server.memory(), 1))
            if asked_text(client, body_of(*question, stream=number % 3 == 0)) != text:
                wrong.append(number)
    memory.append(round(server.memory(), 1))
    return {"requests": len(questions), "wrong": wrong, "memory_mib": memory, "seconds": time.perf_counter() - began}


def ask_at_once(server: Server, questions: Any, expected: list[str], rounds: int) -> dict[str, Any]:
    """Clients at once, some of whom leave, among others who send nonsense."""
    counts = {"answered": 0, "left": 0, "refused": 0, "wrong": 0, "not_refused": 0}
    lock = threading.Lock()

    def client_of(number: int) -> None:
        draw = random.Random(number)
        for _ in range(rounds):
            index = draw.randrange(len(questions))
            messages, params = questions[index]
            with server.client() as client:
                response = client.post("/v1/chat/completions", content=draw.choice(MALFORMED))
                leaves = draw.randint(1, 3) if draw.random() < 0.4 else None
                body = body_of(messages, params, stream=leaves is not None or draw.random() < 0.5)
                text = asked_text(client, body, leaves)
            with lock:
                counts["refused" if response.status_code == 400 else "not_refused"] += 1
                counts["left" if text is None else "answered"] += 1
                counts["wrong"] += text not in (None, expected[index])

    began = time.perf_counter()
    num_clients = 20
    with ThreadPoolExecutor(num_clients) as pool:
        list(pool.map(client_of, range(num_clients)))
    return {"clients": num_clients, "rounds": rounds, **counts, "seconds": time.perf_counter() - began}


def stop_with_one_under_way(server: Server, decoder: PipelineDecoder) -> dict[str, Any]:
    """SIGTERM while an answer is made."""
    messages, params = [{"role": "user", "content": "Go on"}], SamplingParams(120, 0.0, ignore_eos=False)
    texts: list[str | None] = []
    with server.client() as client:
        thread = threading.Thread(target=lambda: texts.append(asked_text(client, body_of(messages, params, False))))
        thread.start()
        while not server.metric("spd_queue_running"):
            time.sleep(0.005)
        began = time.perf_counter()
        server.process.send_signal(signal.SIGTERM)
        code = server.process.wait(120)
        thread.join(10)
    is_right = texts == [decoder.generate(messages, params).text]
    return {"exit_code": code, "answer_is_right": is_right, "seconds": time.perf_counter() - began}


def main() -> None:
    """Runs all and prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3, help="requests of each of the 20 clients")
    parser.add_argument("--max_length", type=int, default=512)
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()

    decoder = PipelineDecoder.from_pretrained(given.drafter, max_length=given.max_length)
    questions = make_questions(given.requests, seed=1)
    expected = [decoder.generate(*question).text for question in questions]
    server = Server(given.drafter, ["--max_length", str(given.max_length)])
    try:
        alone = ask_one_after_the_other(server, questions, expected)
        before = server.memory()
        together = ask_at_once(server, questions, expected, given.rounds)
        while server.metric("spd_queue_running"):
            time.sleep(0.05)
        growth = server.memory() - alone["memory_mib"][1]
        counts = {
            name: server.metric(f'spd_answers_total{{outcome="{name}"}}')
            for name in ("length", "stop", "eos", "cancelled")
        }
        memory = {
            "before_mib": round(before, 1),
            "after_mib": round(server.memory(), 1),
            "growth_mib": round(growth, 1),
        }
        end = stop_with_one_under_way(server, decoder)
    finally:
        if server.process.poll() is None:
            server.process.kill()
    cpu = resource.getrusage(resource.RUSAGE_CHILDREN)
    report = {"alone": alone, "together": together, "memory": memory, "answers": counts, "end": end}
    report["server_cpu_seconds"] = cpu.ru_utime + cpu.ru_stime
    text = json.dumps(report, indent=1)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n", encoding="utf-8")
    is_good = not alone["wrong"] and not together["wrong"] and not together["not_refused"] and growth < LARGEST_GROWTH
    raise SystemExit(0 if is_good and end["exit_code"] == 0 and end["answer_is_right"] else 1)


if __name__ == "__main__":
    main()

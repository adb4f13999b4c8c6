"""`spd-infer serve` as users start it: OpenAI's client, signals with an answer under way, ranks, and mistakes."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from spd_lightning.inference.cli import main
from spd_lightning.inference.sampling import SamplingParams
from spd_lightning.inference.serve.command import is_local
from spd_lightning.inference.serve.service import model_name
from tests.inference.serve.live import MESSAGES

LIMIT = 240.0
"""Seconds after which a server hangs; its imports alone take many on a machine that does other things as well."""
KEY = "a-secret-key"

pytestmark = pytest.mark.timeout(600)


class Process:
    """A server's process.

    Attributes:
        url: where it serves.
    """

    def __init__(self, folder: Path, drafter: str, *args: str) -> None:
        self.out, self.errors = folder / "out.txt", folder / "err.txt"
        threads = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "GLOO_SOCKET_IFNAME": "lo", "SPD_API_KEY": KEY}
        with self.out.open("wb") as out, self.errors.open("wb") as errors:
            command = ["serve", "--drafter", drafter, "--port", "0", "--max_length", "192", *args]
            self.process = subprocess.Popen(
                [sys.executable, "-m", "spd_lightning.inference.cli", *command],
                env=os.environ | threads,
                stdout=out,
                stderr=errors,
                start_new_session=True,
            )
        deadline = time.monotonic() + LIMIT
        while not (found := re.search(r"^serving target on (\S+)/v1$", self.out.read_text(), re.MULTILINE)):
            assert time.monotonic() < deadline and self.process.poll() is None, self.errors.read_text()
            time.sleep(0.05)
        self.url = found[1]

    def client(self, **changes: Any) -> openai.OpenAI:
        http_client = openai.DefaultHttpxClient(trust_env=False, verify=False)
        fields: dict[str, Any] = {"base_url": f"{self.url}/v1", "api_key": KEY, "max_retries": 0, "timeout": 60.0}
        return openai.OpenAI(http_client=http_client, **fields | changes)

    def metric(self, name: str) -> float:
        page = httpx.get(f"{self.url}/metrics", trust_env=False, verify=False).text
        found = re.search(rf"^{re.escape(name)} (\S+)$", page, re.MULTILINE)
        return float(found[1]) if found else 0.0

    def until(self, name: str, least: float) -> None:
        deadline = time.monotonic() + 60
        while self.metric(name) < least:
            assert time.monotonic() < deadline, f"{name} has not come to {least}"
            time.sleep(0.05)

    def said(self) -> list[str]:
        """Lines on stderr, the libraries' notes left out."""
        lines = self.errors.read_text().splitlines()
        return [line for line in lines if line.strip() and not line.startswith(("[transformers]", "Loading weights"))]


@contextmanager
def started(folder: Path, drafter: str, *args: str) -> Iterator[Process]:
    server = Process(folder, drafter, *args)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            os.killpg(server.process.pid, signal.SIGKILL)
            server.process.wait()


def long_answer(client: openai.OpenAI, max_tokens: int) -> tuple[threading.Thread, list[Any]]:
    """A greedy answer in a thread of its own; how it ended."""
    ended: list[Any] = []

    def ask() -> None:
        try:
            fields: dict[str, Any] = {"model": "target", "messages": MESSAGES, "temperature": 0}
            ended.append(client.chat.completions.create(**fields, max_tokens=max_tokens))
        except openai.APIError as error:
            ended.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    return thread, ended


def test_openais_client_gets_the_answers_of_generate_and_sigterm_lets_one_under_way_end(
    folders, decoder, tmp_path: Path
) -> None:
    with started(tmp_path, folders[0], "--shutdown_grace", "60") as server:
        client = server.client()
        assert [model.id for model in client.models.list()] == ["target"]
        for params in (SamplingParams(10), SamplingParams(10, 1.0, top_p=0.9, seed=3)):
            expected = decoder.generate(MESSAGES, params)
            fields: dict[str, Any] = {"model": "target", "temperature": params.temperature, "top_p": params.top_p}
            fields |= {"seed": params.seed, "max_tokens": 10}
            answer = client.chat.completions.create(messages=MESSAGES, **fields, logprobs=True, top_logprobs=2)
            assert answer.choices[0].message.content == expected.text
            assert answer.usage is not None and answer.usage.completion_tokens == len(expected.token_ids)
            assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.content is not None
            assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
            chunks = list(client.chat.completions.create(messages=MESSAGES, **fields, stream=True))
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.text
            ids = decoder.checked(MESSAGES, params)[0]
            texts = client.completions.create(prompt=ids, **fields, stream=True)
            assert "".join(chunk.choices[0].text for chunk in texts) == expected.text
        with pytest.raises(openai.BadRequestError, match="n=2 is not supported"):
            client.chat.completions.create(model="target", messages=MESSAGES, n=2)
        with pytest.raises(openai.AuthenticationError):
            server.client(api_key="another").models.list()
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="other", messages=MESSAGES)

        with client.chat.completions.create(model="target", messages=MESSAGES, max_tokens=160, stream=True) as stream:
            next(iter(stream))  # and the client goes
        server.until('spd_answers_total{outcome="cancelled"}', 1)

        thread, ended = long_answer(client, 40)
        server.until("spd_queue_running", 1)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(LIMIT) == 0
        thread.join(20)
        assert ended[0].choices[0].message.content == decoder.generate(MESSAGES, SamplingParams(40)).text
        assert server.said() == [] and KEY not in server.out.read_text()
        with pytest.raises(openai.APIConnectionError):
            client.models.list()


def test_ranks_answer_as_one_process_and_all_end_on_sigterm(folders, decoder, tmp_path: Path) -> None:
    """Of what is under way the grace here leaves nothing."""
    expected = decoder.generate(MESSAGES, SamplingParams(10)).text
    with started(tmp_path, folders[0], "--runtime", "distributed", "--shutdown_grace", "0") as server:
        client = server.client()
        fields: dict[str, Any] = {"model": "target", "messages": MESSAGES, "temperature": 0}
        with client.chat.completions.create(**fields, max_tokens=160, stream=True) as stream:
            next(iter(stream))
        # Behind an answer that was cancelled on all ranks.
        answer = client.chat.completions.create(**fields, max_tokens=10, logprobs=True, top_logprobs=2).choices[0]
        assert answer.message.content == expected and answer.logprobs is not None
        scored = answer.logprobs.content or []
        assert bytes(byte for token in scored for byte in token.bytes or ()).decode(errors="replace") == expected
        # Greedy: each token is the likeliest.
        assert all(len(token.top_logprobs) == 2 and token.logprob == token.top_logprobs[0].logprob for token in scored)
        server.until('spd_answers_total{outcome="cancelled"}', 1)
        thread, ended = long_answer(client, 160)
        server.until("spd_queue_running", 1)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(LIMIT) == 0, server.said()
        thread.join(20)
        assert isinstance(ended[0], openai.InternalServerError) and ended[0].code == "shutting_down"
        assert server.said() == []
        with pytest.raises(ProcessLookupError):  # none of its processes is left
            os.killpg(server.process.pid, 0)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--max_queue", "-1"], "max_queue=-1"),
        (["--request_timeout", "0"], "request_timeout=0.0"),
        (["--shutdown_grace", "-1"], "shutdown_grace=-1.0"),
        (["--runtime", "virtual"], "runtime='virtual'"),
        (["--host", "no.such.host.invalid"], "cannot serve on no.such.host.invalid:8000"),
        (["--port", "70000"], "port=70000"),
        (["--drafter", "/no/such/drafter", "--port", "0"], "/no/such/drafter"),
    ],
)
def test_mistakes_are_one_line(args: list[str], message: str, folders, capsys) -> None:
    assert message in the_line(["--drafter", folders[0], *args], capsys)


def the_line(args: list[str], capsys) -> str:
    with pytest.raises(SystemExit) as raised:
        main(["serve", *args])
    printed = capsys.readouterr()
    assert (raised.value.code, printed.out) == (2, "")
    [line] = printed.err.splitlines()
    return line


def test_a_missing_package_is_named_with_the_way_to_get_it(folders, capsys, monkeypatch) -> None:
    find = importlib_find(missing="uvicorn")
    monkeypatch.setattr("spd_lightning.inference.serve.command.importlib.util.find_spec", find)
    line = the_line(["--drafter", folders[0]], capsys)
    assert line == "spd-infer: error: serve needs uvicorn, not installed: pip install -c constraints.txt -e '.[serve]'"


def importlib_find(missing: str) -> Any:
    return lambda name: None if name == missing else object()


def test_a_server_that_others_can_reach_without_a_key_is_warned_of(folders, capsys, monkeypatch) -> None:
    monkeypatch.setattr("spd_lightning.inference.serve.service.serve", lambda *_: None)
    monkeypatch.delenv("SPD_API_KEY", raising=False)
    args = ["serve", "--drafter", folders[0], "--port", "0", "--max_length", "32", "--host"]
    for host, key, is_warned in (
        ("0.0.0.0", [], True),
        ("127.0.0.1", [], False),
        ("0.0.0.0", ["--api_key", KEY], False),
    ):
        main([*args, host, *key])
        said = capsys.readouterr().err
        assert ("warning: everybody who can reach 0.0.0.0:0" in said) == is_warned and KEY not in said


def test_local_addresses_are_known() -> None:
    assert [is_local(host) for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost")] == [True] * 4
    assert [is_local(host) for host in ("0.0.0.0", "::", "10.0.0.1", "example.org")] == [False] * 4


def test_a_models_name_is_the_hub_id_or_the_folders_last_part(tmp_path: Path) -> None:
    assert (model_name("owner/name"), model_name(f"{tmp_path}/")) == ("owner/name", tmp_path.name)

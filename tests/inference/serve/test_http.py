"""The endpoint over HTTP: answers are those of `generate`, and every fault has its status and OpenAI's error."""

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from spd_lightning.inference.sampling import SamplingParams
from spd_lightning.inference.serve.prompts import PromptReader
from tests.inference.serve.live import CHAT, MESSAGES, MODEL, Live, served

CHATS, TEXTS = "/v1/chat/completions", "/v1/completions"
AS_JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def kept(decoder) -> Iterator[Live]:
    """A server that every test leaves as it was."""
    with served(decoder) as live:
        yield live


def events_of(response: httpx.Response) -> list[Any]:
    """The data of a stream's events."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    return [data if data == "[DONE]" else json.loads(data) for data in (line[6:] for line in lines)]


def error_of(response: httpx.Response) -> tuple[int, str | None, str]:
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return response.status_code, error["code"], error["message"]


@pytest.mark.parametrize(
    "params",
    [SamplingParams(8), SamplingParams(8, 1.0, 20, 0.9, seed=5), SamplingParams(14, stop=("bX", "M'"))],
    ids=["greedy", "sampled", "stopped"],
)
def test_an_answer_is_that_of_generate_whole_and_streamed(params: SamplingParams, kept: Live) -> None:
    fields = {"max_tokens": params.max_new_tokens, "temperature": params.temperature, "stop": list(params.stop)}
    fields |= {"top_k": params.top_k, "top_p": params.top_p, "seed": params.seed}
    expected = kept.decoder.generate(MESSAGES, params)
    whole = kept.chat(**fields).json()
    [choice] = whole["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected.text, "refusal": None}
    assert choice["finish_reason"] == ("stop" if expected.finish_reason == "stop" else "length")
    num_prompt = len(kept.decoder.checked(MESSAGES, params)[0])
    usage = {"prompt_tokens": num_prompt, "completion_tokens": len(expected.token_ids)}
    usage["total_tokens"] = sum(usage.values())
    assert whole["usage"] == usage and whole["spd"]["cycles"] == expected.stats.num_cycles
    assert whole["spd"].get("seed") == params.seed

    *chunks, done = events_of(kept.chat(**fields, stream=True, stream_options={"include_usage": True}))
    assert done == "[DONE]" and {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == usage
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert deltas[0] == {"role": "assistant", "content": ""} and deltas[-1] == {}
    assert "".join(delta["content"] for delta in deltas[:-1]) == expected.text
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]]
    assert reasons == [None] * (len(reasons) - 1) + [choice["finish_reason"]]


def test_a_completion_continues_a_text_or_ids(kept: Live) -> None:
    ids = kept.decoder.tokenizer("Once")["input_ids"]
    expected = kept.decoder.generate(ids, SamplingParams(5)).text
    for prompt in ("Once", ["Once"], ids):
        body = kept.ask(TEXTS, model=MODEL, prompt=prompt, temperature=0, max_tokens=5).json()
        assert (body["object"], body["choices"][0]["text"]) == ("text_completion", expected)
    events = events_of(kept.ask(TEXTS, model=MODEL, prompt="Once", temperature=0, max_tokens=5, stream=True))
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == expected


@pytest.mark.parametrize("stop", [[], ["bX", "M'"]], ids=["whole", "stopped"])
def test_scores_are_of_the_tokens_of_the_text_and_no_others(stop: list[str], kept: Live) -> None:
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "stop": stop, "max_tokens": 14}
    body = kept.chat(**fields).json()["choices"][0]
    expected = kept.decoder.generate(MESSAGES, SamplingParams(14, stop=tuple(stop)))
    content = body["logprobs"]["content"]
    data = b"".join(bytes(token["bytes"]) for token in content)
    assert data.decode(errors="replace") == expected.text and len(content) == len(expected.token_ids)
    for token in content:  # greedy: the likeliest token is the one that was taken
        assert token["logprob"] == token["top_logprobs"][0]["logprob"] > token["top_logprobs"][1]["logprob"]

    streamed, text = [], b""
    for event in events_of(kept.chat(**fields, stream=True))[:-1]:
        choice = event["choices"][0]
        text += choice["delta"].get("content", "").encode()
        if choice["logprobs"]:
            streamed += choice["logprobs"]["content"]
            shown = b"".join(bytes(token["bytes"]) for token in streamed).decode(errors="replace")
            assert text.decode().startswith(shown), "a token was scored before its text was shown"
    assert streamed == content


def test_scores_of_completions_are_lists(kept: Live) -> None:
    body = kept.ask(TEXTS, model=MODEL, prompt="Once", temperature=0, logprobs=2, max_tokens=9).json()["choices"][0]
    scores = body["logprobs"]
    assert {len(scores[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")} == {9}
    assert [max(top.values()) for top in scores["top_logprobs"]] == scores["token_logprobs"]
    assert scores["text_offset"] == sorted(scores["text_offset"]) and scores["text_offset"][0] == 0


MALFORMED = [
    b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 50_000, b'{"model": "tiny"}', b'{"model": "tiny", "messages": "Hi"}',
    b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"\\ud800": 1, "model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}',
    b'{"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "n": 2}',
    b'{"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": ' + b"9" * 5000 + b"}",
    b'{"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 100000}',
    b'{"model": "tiny", "messages": [{"role": "user", "content": "' + b"x" * 500 + b'"}]}',
]  # fmt: skip


@pytest.mark.parametrize("body", MALFORMED, ids=range(len(MALFORMED)))
def test_a_malformed_body_is_refused_and_begins_nothing(body: bytes, kept: Live) -> None:
    begun = kept.brake.num_begun
    with kept.client(**AS_JSON) as client:
        for content in (body, body):
            status, _, message = error_of(client.post(CHATS, content=content))
            assert status == 400 and message
    assert kept.brake.num_begun == begun


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ('"x\\ud800": 1', "the body: Input should be a valid string, unable to parse raw data as a unicode string"),
        ('"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]',
         "messages.0.content.0.type: Input should be 'text'"),
        ('"messages": [{"role": "user", "content": null}]',
         "messages.0.content: Input should be a valid string; or: Input should be a valid list"),
        ('"messages": [{"role": "user", "content": "\\ud800"}]',
         "messages.0.content: a text that is not valid Unicode (half of a surrogate pair); or: "
         "Input should be a valid list"),
    ],
    ids=["key", "image", "null", "surrogate"],
)  # fmt: skip
def test_a_fault_is_told_where_it_is(field: str, message: str, kept: Live) -> None:
    body = f'{{"model": "tiny", "messages": [{{"role": "user", "content": "Hi"}}], {field}}}'
    with kept.client(**AS_JSON) as client:
        assert error_of(client.post(CHATS, content=body)) == (400, None, message)


def test_what_a_client_sent_is_not_sent_back_by_the_megabyte(kept: Live) -> None:
    for changes in ({"n": ["x" * 10**6]}, {"model": "x" * 10**6}, {"x" * 10**6: 1}):
        assert len(kept.chat(**changes).content) < 4000


def test_a_prompt_that_takes_long_to_read_keeps_nobody_else_waiting(decoder) -> None:
    reader, is_read = PromptReader(decoder.tokenizer, decoder.eos_ids, decoder.max_length, 32), threading.Event()
    read, begun = reader.read, threading.Event()

    def slowly(request: Any) -> Any:
        begun.set()
        assert is_read.wait(20)
        return read(request)

    reader.read = slowly
    with served(decoder, reader=reader) as live:
        thread, results = in_thread(live.chat)
        assert begun.wait(20)
        with live.client() as client:
            try:
                assert client.get("/health", timeout=5.0).status_code == 200
            finally:
                is_read.set()
        thread.join(20)
        assert results[0].status_code == 200


def test_other_faults_have_openais_form_too(kept: Live) -> None:
    with kept.client() as client:
        assert error_of(client.get("/nothing"))[0] == 404
        assert error_of(client.get(CHATS))[0] == 405
        assert error_of(client.get("/v1/models/other"))[:2] == (404, "model_not_found")
        named = client.post(CHATS, content=json.dumps(CHAT | {"model": "\ud800"}), headers=AS_JSON)
        assert error_of(named)[:2] == (404, "model_not_found")
        assert error_of(client.post(CHATS, data={"model": MODEL}))[0] == 400
        assert error_of(client.post(CHATS, content=b"x" * (4 * 2**20 + 1)))[:2] == (413, "body_too_large")
        assert error_of(client.post(CHATS, content=b"x" * (8 * 2**20)))[:2] == (413, "body_too_large")
        assert error_of(client.post(CHATS, content=b" " * 2**20))[0] == 400
        fault = client.post(CHATS, json=CHAT | {"unheard_of": 1}).json()["error"]
        assert (fault["message"], fault["param"]) == (
            "Unrecognized request argument supplied: unheard_of",
            "unheard_of",
        )


def test_models_health_and_metrics(kept: Live) -> None:
    kept.chat()
    with kept.client() as client:
        [card] = client.get("/v1/models").json()["data"]
        assert card["id"] == MODEL and client.get(f"/v1/models/{MODEL}").json() == card
        assert client.get("/health").json() == {"status": "ok"}
        page = client.get("/metrics").text
        paths = {line.split('"')[1] for line in page.splitlines() if line.startswith("spd_http_responses_total{")}
        assert CHATS in paths and paths <= {CHATS, TEXTS, "/v1/models", "/health", "/metrics", "other"}
    for name in ("acceptance_ratio", "tokens_per_cycle", "queue_waiting", "queue_seconds_bucket", "cycles_total"):
        assert f"\nspd_{name}" in page, name
    assert kept.value("spd_tokens_per_cycle") == pytest.approx(
        kept.value("spd_committed_tokens_total") / kept.value("spd_cycles_total")
    )


def test_a_key_opens_what_is_below_v1_and_is_shown_nowhere(decoder, capfd) -> None:
    with served(decoder, api_key="sésame") as live:
        for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": "sésame".encode()}):
            with live.client(**headers) as client:
                for response in (client.post(CHATS, json=CHAT), client.get("/v1/models")):
                    status, code, message = error_of(response)
                    assert (status, code) == (401, "invalid_api_key") and "sésame" not in message
                assert client.get("/health").status_code == client.get("/metrics").status_code == 200
        with live.client(Authorization="Bearer sésame".encode()) as client:
            assert client.post(CHATS, json=CHAT).status_code == 200
    assert live.brake.num_begun == 1 and "sésame" not in "".join(capfd.readouterr())


def in_thread(work: Any) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    return thread, results


def test_those_who_wait_are_answered_in_turn_and_one_too_many_is_refused(decoder, greedy_text: str) -> None:
    with served(decoder, max_queue=1) as live:
        live.brake.free.clear()
        first, one = in_thread(live.chat)
        live.until(lambda: live.value("spd_queue_running") == 1)
        second, two = in_thread(lambda: live.chat(stream=True))
        live.until(lambda: live.value("spd_queue_waiting") == 1)
        response = live.chat()
        assert error_of(response)[:2] == (429, "queue_full") and response.headers["retry-after"] == "1"
        live.brake.free.set()
        first.join(20)
        second.join(20)
        assert one[0].json()["choices"][0]["message"]["content"] == greedy_text
        text = "".join(event["choices"][0]["delta"].get("content", "") for event in events_of(two[0])[:-1])
        assert text == greedy_text


def test_a_request_that_takes_too_long_is_told_so_where_it_stands(decoder) -> None:
    with served(decoder, timeout=0.4) as live:
        live.brake.free.clear()
        running, one = in_thread(live.chat)
        live.until(lambda: live.value("spd_queue_running") == 1)
        queued = live.chat(stream=True)
        running.join(20)
        assert error_of(one[0])[:2] == error_of(queued)[:2] == (504, "request_timeout")
        assert "being answered" in error_of(one[0])[2] and "in the queue" in error_of(queued)[2]
        live.brake.tokens.release()
        live.until(lambda: live.brake.num_closed == 1)
        assert live.value("spd_queue_waiting") == 0 and live.brake.num_begun == 1


def test_a_stream_that_takes_too_long_ends_with_an_error_and_frees_the_decoder(decoder) -> None:
    expected = decoder.generate(MESSAGES, SamplingParams(4)).text
    with served(decoder, timeout=6.0) as live:
        live.brake.free.clear()
        live.brake.tokens.release(3)
        *chunks, last = events_of(live.chat(stream=True))
        assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
        assert last["error"]["code"] == "request_timeout"
        live.brake.free.set()
        assert live.chat(max_tokens=4).json()["choices"][0]["message"]["content"] == expected
        assert live.brake.num_closed == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("place", ["running", "waiting"])
def test_a_client_that_goes_frees_the_decoder_and_the_next_answer_is_clean(
    place: str, stream: bool, live: Live, greedy_text: str
) -> None:
    body = json.dumps(CHAT | {"stream": stream, "max_tokens": 150}).encode()
    head = f"POST {CHATS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    live.brake.free.clear()
    if place == "waiting":
        first, results = in_thread(live.chat)
        live.until(lambda: live.value("spd_queue_running") == 1)
    with socket.create_connection(("127.0.0.1", int(live.url.rsplit(":", 1)[1]))) as connection:
        connection.sendall(head.encode() + body)
        live.until(lambda: live.value(f"spd_queue_{place}") == 1)
        if place == "running":
            live.brake.tokens.release(3)
            live.until(lambda: live.brake.tokens._value == 0)
    if place == "waiting":
        live.until(lambda: live.value("spd_queue_waiting") == 0)
        live.brake.free.set()
        first.join(20)
        assert results[0].status_code == 200 and live.brake.num_begun == 1
    else:
        live.until(lambda: next(iter(live.engine._open)).is_cancelled)
        live.brake.tokens.release()
        live.until(lambda: live.brake.num_closed == 1)
        live.brake.free.set()
    text = live.chat().json()["choices"][0]["message"]["content"]
    assert text == greedy_text


def test_a_body_that_does_not_come_is_given_up(decoder) -> None:
    with served(decoder, timeout=0.3) as live:
        with socket.create_connection(("127.0.0.1", int(live.url.rsplit(":", 1)[1]))) as connection:
            connection.sendall(f"POST {CHATS} HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n".encode())
            assert connection.recv(100).startswith(b"HTTP/1.1 408")

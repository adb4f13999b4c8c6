"""What requests may say, and what is refused."""

from typing import Any

import pytest
from pydantic import ValidationError

from spd_lightning.inference.serve.protocol import NEUTRAL, ChatRequest, CompletionRequest
from spd_lightning.inference.serve.refusal import Refusal

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "Hi"}


def request_with(name: str, value: Any) -> ChatRequest | CompletionRequest:
    """A request of the kind that has the field."""
    if name in ChatRequest.model_fields:
        return ChatRequest.model_validate(CHAT | {name: value})
    return CompletionRequest.model_validate(COMPLETION | {name: value})


@pytest.mark.parametrize("name", NEUTRAL)
def test_fields_that_change_nothing_are_taken_and_all_other_values_refused(name: str) -> None:
    for value in (None, *NEUTRAL[name]):
        request_with(name, value).refuse_unsupported()
    for value in (2, True, "x", ["x"], {"x": 1}):
        with pytest.raises(Refusal, match=name) as refused:
            request_with(name, value).refuse_unsupported()
        assert (refused.value.status, refused.value.param) == (400, name)
        assert refused.value.body()["error"].keys() == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 2.1}, {"temperature": -0.1}, {"temperature": float("nan")}, {"temperature": "1"},
        {"top_p": 0}, {"top_p": 1.01}, {"top_k": -1}, {"max_tokens": 0}, {"max_tokens": 1.5}, {"max_tokens": True},
        {"top_logprobs": 21}, {"stop": 3}, {"stop": ["\ud800"]}, {"stream": 1}, {"messages": []}, {"unheard_of": None},
        {"messages": [{"role": "tool", "content": "x"}]}, {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": None}]}, {"messages": [{"role": "user", "content": "\udc00"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused(changes: dict[str, Any]) -> None:
    ChatRequest.model_validate(CHAT).refuse_unsupported()
    with pytest.raises(ValidationError):
        ChatRequest.model_validate(CHAT | changes)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "x"}]}]}, "messages.0.tool_calls"),
    ],
)
def test_combinations_that_cannot_be_are_refused(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(Refusal) as refused:
        ChatRequest.model_validate(CHAT | changes).refuse_unsupported()
    assert refused.value.param == param


def test_echoed_messages_with_empty_fields_are_taken() -> None:
    echoed = {"role": "assistant", "content": "Hello", "refusal": None, "annotations": [], "tool_calls": None}
    ChatRequest.model_validate(CHAT | {"messages": [*CHAT["messages"], echoed]}).refuse_unsupported()


def test_defaults_of_sampling_are_openais_and_a_seed_is_drawn() -> None:
    params = ChatRequest.model_validate(CHAT).params(7, "rejection")
    assert (params.max_new_tokens, params.temperature, params.top_k, params.top_p) == (7, 1.0, 0, 1.0)
    assert params.stop == () and params.seed is not None
    assert ChatRequest.model_validate(CHAT).params(7, "rejection").seed != params.seed


def test_what_is_given_decides_how_tokens_are_drawn() -> None:
    given = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "seed": 4, "stop": ["a", "b"]}
    params = ChatRequest.model_validate(CHAT | given).params(7, "coupled")
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.5, 0.9, 3, 4)
    assert (params.stop, params.verify) == (("a", "b"), "coupled")
    assert CompletionRequest.model_validate(COMPLETION | {"stop": "ab"}).params(1, "rejection").stop == ("ab",)


@pytest.mark.parametrize(
    ("changes", "param"), [({"seed": -1}, "seed"), ({"seed": 2**63}, "seed"), ({"stop": ""}, "stop")]
)
def test_values_that_no_decode_takes_are_the_clients_fault(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(Refusal) as refused:
        ChatRequest.model_validate(CHAT | changes).params(7, "rejection")
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize(
    ("changes", "num_top"), [({}, None), ({"logprobs": False}, None), ({"logprobs": True}, 0),
                             ({"logprobs": True, "top_logprobs": 5}, 5)],
)  # fmt: skip
def test_chat_asks_for_scores_by_two_fields(changes: dict[str, Any], num_top: int | None) -> None:
    assert ChatRequest.model_validate(CHAT | changes).num_top == num_top
    assert CompletionRequest.model_validate(COMPLETION | {"logprobs": 0}).num_top == 0

"""Requests to token ids: the same prompt as everywhere else, and what does not fit."""

from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from spd_lightning.inference.sampling import SamplingParams
from spd_lightning.inference.serve.prompts import PromptReader
from spd_lightning.inference.serve.protocol import ChatMessage, ChatRequest, CompletionRequest
from spd_lightning.inference.serve.refusal import Refusal
from spd_lightning.modules.tiny_target import byte_tokenizer

END, PIECES = 258, [{"type": "text", "text": "H"}, {"type": "text", "text": "é"}]


@pytest.fixture(scope="module")
def reader() -> PromptReader:
    return PromptReader(byte_tokenizer(), [END], 64, 32)


def messages(*turns: dict[str, Any]) -> list[ChatMessage]:
    return [ChatMessage.model_validate(turn) for turn in turns]


def test_a_conversation_becomes_the_prompt_that_generate_decodes(decoder) -> None:
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hé"}]
    reader = PromptReader(decoder.tokenizer, decoder.eos_ids, 192, 32)
    expected, _ = decoder.checked(turns, SamplingParams(4))
    assert reader.of_messages(messages(*turns)) == expected
    turns[0]["role"] = "developer"
    assert reader.of_messages(messages(*turns)) == expected
    assert reader.of_messages(messages(turns[0], {"role": "user", "content": PIECES})) == expected


def test_a_template_that_refuses_the_turns_is_the_clients_fault() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no such turn') }}"
    with pytest.raises(Refusal, match="no such turn"):
        PromptReader(tokenizer, [END], 64, 32).of_messages(messages({"role": "user", "content": "Hi"}))


def test_a_text_begins_as_in_training_and_ids_are_taken_as_they_are(reader: PromptReader) -> None:
    assert reader.of_prompt("Hi") == reader.of_prompt(["Hi"]) == reader.tokenizer("Hi")["input_ids"]
    assert reader.of_prompt([3, 4]) == reader.of_prompt([[3, 4]]) == [3, 4]
    tokenizer = byte_tokenizer()
    special = [("<|im_start|>", 257), ("<|im_end|>", END)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=special
    )
    assert PromptReader(tokenizer, [END], 64, 32).of_prompt("Hi") == [257, *reader.of_prompt("Hi")]


@pytest.mark.parametrize("prompt", ["", [], [[]], [""], ["a", "b"], [[1], [2]], [259], [-1], [True, 400]])
def test_prompts_that_are_none_are_refused(prompt: Any, reader: PromptReader) -> None:
    with pytest.raises(Refusal) as refused:
        reader.of_prompt(prompt)
    assert (refused.value.status, refused.value.param) == (400, "prompt")


def test_an_answer_has_the_tokens_asked_for_or_what_fits(reader: PromptReader) -> None:
    def limit(num_prompt: int, **fields: Any) -> int:
        body = {"model": "m", "prompt": [1] * num_prompt} | fields
        return reader.read(CompletionRequest.model_validate(body))[1]

    assert [limit(4), limit(50), limit(63)] == [16, 14, 1]  # OpenAI's 16 where nothing is said
    assert limit(60, max_tokens=4) == 4
    for wrong in ({"num_prompt": 60, "max_tokens": 5}, {"num_prompt": 64}, {"num_prompt": 80, "max_tokens": 1}):
        with pytest.raises(Refusal, match="do not fit") as refused:
            limit(**wrong)
        assert refused.value.code == "context_length_exceeded"


def test_a_chat_answer_has_the_servers_limit_where_nothing_is_said(reader: PromptReader) -> None:
    chat: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": ""}]}
    assert reader.read(ChatRequest.model_validate(chat))[1] == 32
    assert reader.read(ChatRequest.model_validate(chat | {"max_completion_tokens": 5}))[1] == 5

"""Requests to token ids, by the rule of training and `spd-infer generate`. Has a tokenizer and a thread to itself."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from typing import Any

from jinja2.exceptions import TemplateError

from spd_lightning.inference.serve.protocol import AnswerRequest, ChatMessage, ChatRequest, CompletionRequest
from spd_lightning.inference.serve.refusal import Refusal
from spd_lightning.modules.tokenizer import render_prompt, token_ids


class PromptReader:
    """Makes prompts of requests.

    Args:
        tokenizer: the target's; no other thread may use it meanwhile.
        eos_ids: tokens that end an answer.
        max_length: of prompt and answer together.
        default_new_tokens: limit of an answer where a chat request names none.
    """

    def __init__(self, tokenizer: Any, eos_ids: Sequence[int], max_length: int, default_new_tokens: int) -> None:
        self.tokenizer = tokenizer
        self.eos_ids = tuple(eos_ids)
        self.max_length = max_length
        self.default_new_tokens = default_new_tokens
        self._thread = ThreadPoolExecutor(1, "prompts")

    async def read_aside(self, request: AnswerRequest) -> tuple[list[int], int]:
        """`read` in a thread, in the order of the calls: a prompt of megabytes takes seconds, and streams go on."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.read, request)

    def read(self, request: AnswerRequest) -> tuple[list[int], int]:
        """Prompt, and how many tokens the answer may have.

        Raises:
            Refusal: if there is no such prompt, or both do not fit.
        """
        if isinstance(request, ChatRequest):
            ids = self.of_messages(request.messages)
        else:
            assert isinstance(request, CompletionRequest)
            ids = self.of_prompt(request.prompt)
        room, wanted = self.max_length - len(ids), request.wanted_tokens
        if room < 1 or (wanted is not None and wanted > room):
            raise Refusal(
                400,
                f"a prompt of {len(ids)} tokens and {wanted or 1} new ones do not fit into the {self.max_length} tokens "
                "that this server holds: shorten one of them, or start it with a larger --max_length",
                param="messages" if isinstance(request, ChatRequest) else "prompt",
                code="context_length_exceeded",
            )
        return ids, min(room, request.default_new_tokens or self.default_new_tokens) if wanted is None else wanted

    def of_messages(self, messages: Sequence[ChatMessage]) -> list[int]:
        """A conversation by the chat template, thinking off."""
        turns = [{"role": role_of(message), "content": content_of(message)} for message in messages]
        try:
            return token_ids(self.tokenizer, render_prompt(self.tokenizer, turns))
        except (TemplateError, ValueError) as error:
            raise Refusal(400, f"the chat template refuses these messages: {error}", param="messages") from error

    def of_prompt(self, prompt: str | list[str] | list[int] | list[list[int]]) -> list[int]:
        """A text or token ids; a list of several prompts is refused."""
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise Refusal(400, f"{len(prompt)} prompts in one request: send one request for each", param="prompt")
            prompt = prompt[0]  # pyright: ignore[reportAssignmentType]
        ids = self._of_text(prompt) if isinstance(prompt, str) else prompt
        if not ids:
            raise Refusal(400, "the prompt is empty: at least one token is needed", param="prompt")
        if strange := [token for token in ids if not 0 <= int(token) < len(self.tokenizer)]:  # pyright: ignore[reportArgumentType]
            raise Refusal(
                400, f"token id {strange[0]} is not one of the tokenizer's {len(self.tokenizer)}", param="prompt"
            )
        return ids  # pyright: ignore[reportReturnType]

    def _of_text(self, text: str) -> list[int]:
        """As plain text is trained on: behind the tokenizer's beginning-of-sequence token, if it has one."""
        leading = takewhile(lambda token: token not in self.eos_ids, self.tokenizer("", verbose=False)["input_ids"])
        ids = token_ids(self.tokenizer, text)
        return [*leading, *ids] if ids else []


def role_of(message: ChatMessage) -> str:
    """The role for the template: a developer's message is a system message."""
    return "system" if message.role == "developer" else message.role


def content_of(message: ChatMessage) -> str:
    """The text of a message, its parts joined."""
    if isinstance(message.content, str):
        return message.content
    return "".join(part.text for part in message.content)

"""Transformers' own `generate` as a baseline and a second opinion. Knows the target as a whole; no stages."""

from collections.abc import Callable, Generator, Mapping, Sequence
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spd_lightning.inference.answer import Run
from spd_lightning.inference.sampling import SamplingParams
from spd_lightning.modules.target import FrozenTarget

if TYPE_CHECKING:
    from spd_lightning.inference.decoder import PipelineDecoder


class TokenQueue:
    """Hands the tokens of a `generate` from its thread to another; a streamer in its terms."""

    def __init__(self) -> None:
        self.tokens: SimpleQueue[int | BaseException | None] = SimpleQueue()
        self.is_prompt = True

    def put(self, value: Tensor) -> None:
        """Is given the prompt first, then each token as it comes."""
        if not self.is_prompt:
            self.tokens.put(int(value))
        self.is_prompt = False

    def end(self) -> None:
        """Is called after the last token."""
        self.tokens.put(None)


def generate_starter(
    decoder: "PipelineDecoder", whole: Callable[[], FrozenTarget]
) -> Callable[[Sequence[Mapping[str, str]], SamplingParams], Run]:
    """How to begin an answer by `generate`; its sampling draws from torch's generator, seeded for each answer.

    Args:
        decoder: whose tokenizer and limits hold.
        whole: loads the whole target, in the decoder's dtype and on its device, when the first answer is begun.
    """

    def start(messages: Sequence[Mapping[str, str]], params: SamplingParams) -> Run:
        ids, params = decoder.checked(messages, params)
        target, stop = whole(), decoder.stop_condition(params)
        eos_ids = () if params.ignore_eos else decoder.eos_ids

        def generate(queue: TokenQueue) -> None:
            try:
                if not params.is_greedy:
                    torch.manual_seed(params.seed or 0)
                prompt = torch.tensor([ids], device=target.head_weight.device)
                law = (params.temperature, params.top_k, params.top_p)
                how = (params.max_new_tokens, not params.is_greedy, *law)
                target.generate(prompt, torch.ones_like(prompt), *how, eos_token_ids=eos_ids, streamer=queue)
            except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
                queue.tokens.put(error)

        def committed() -> Generator[int]:
            queue = TokenQueue()
            thread = Thread(target=generate, args=(queue,), daemon=True)
            thread.start()
            try:
                while (token := queue.tokens.get()) is not None:
                    if isinstance(token, BaseException):
                        raise token
                    ended = stop.push(token)
                    yield token
                    if ended is not None:
                        return
            finally:
                thread.join()

        return Run(ids, committed(), stop, None)

    return start

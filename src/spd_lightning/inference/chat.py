"""A conversation in a terminal: turns, commands and Ctrl-C. Knows no arguments, no models and no ranks."""

import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from threading import Event
from typing import Any, Protocol, runtime_checkable

from spd_lightning.inference.decoder import DecodeResult
from spd_lightning.inference.sampling import SamplingParams

HELP = """\
/reset        forget the conversation; the system message stays
/system TEXT  replace the system message; without TEXT there is none
/seed N       make the seeds of the coming answers from N
/exit         end, as does Ctrl-D
Ctrl-C stops an answer; its text so far stays in the conversation. At the prompt it ends the conversation.
Each sampled answer has its own seed, made of the given one and the number of the turn."""


@runtime_checkable
class ChatDecoder(Protocol):
    """Answers messages as `PipelineDecoder` does, with a `Run`: its `texts`, `result` and `close` are used."""

    def start(self, prompt: Sequence[Mapping[str, str]], params: SamplingParams) -> Any: ...


def converse(
    decoder: ChatDecoder,
    params: SamplingParams,
    system: str | None = None,
    read: Callable[[str], str] = input,
    write: Callable[[str], None] = lambda text: print(text, end="", flush=True),
    note: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
) -> None:
    """Answers line after line until `/exit`, the end of the input, or Ctrl-C at the prompt.

    Call it in the main thread: it alone hears of Ctrl-C. An answer that cannot be given (`ValueError`, as when the
    conversation no longer fits the caches) becomes one line of note, and its question is taken back.

    Args:
        decoder: what answers.
        params: of every answer; where they sample, the seed changes from turn to turn (`turn_seed`).
        system: the system message at the beginning.
        read: shows its argument and returns a line; raises `EOFError` or `KeyboardInterrupt`, as `input` does.
        write: takes the increments of the answers.
        note: takes everything else, by lines.
    """
    if not params.is_greedy:
        params = params.seeded()
        note(f"seed {params.seed}; each answer has its own, made of this and the number of the turn")
    note("/help lists the commands")
    conversation = Conversation(decoder, params, system, write, note)
    try:
        while (line := read("> ").strip()) not in ("/exit", "/quit"):
            if line.startswith("/"):
                conversation.obey(*line.split(maxsplit=1))
            elif line:
                conversation.answer(line)
    except (EOFError, KeyboardInterrupt):
        write("\n")


def turn_seed(seed: int, turn: int) -> int:
    """The seed of the answer of one turn, counted from 1, so that a conversation can be had again."""
    return int.from_bytes(blake2b(f"{seed} turn {turn}".encode(), digest_size=6).digest(), "little")


@dataclass
class Conversation:
    """The turns so far, and how to go on; see `converse`."""

    decoder: ChatDecoder
    params: SamplingParams
    system: str | None
    write: Callable[[str], None]
    note: Callable[[str], None]
    messages: list[dict[str, str]] = field(default_factory=list)

    def obey(self, command: str, argument: str = "") -> None:
        """Does what a line with a slash says."""
        match command:
            case "/help":
                self.note(HELP)
            case "/reset":
                self.messages.clear()
            case "/system":
                self.system = argument
            case "/seed":
                try:
                    self.params = replace(self.params, seed=int(argument))
                except ValueError as error:
                    self.note(f"/seed {argument}: {error}")
            case _:
                self.note(f"{command} is no command; /help lists them")

    def answer(self, question: str) -> None:
        """Adds a question and its answer; neither, if it cannot be answered."""
        asked = [*self.messages, {"role": "user", "content": question}]
        try:
            text = self._shown(asked)
        except ValueError as error:
            self.note(f"{error} (the last message is taken back)")
        else:
            self.messages = [*asked, {"role": "assistant", "content": text}]

    def _shown(self, asked: list[dict[str, str]]) -> str:
        """The answer's text, which has been written as it came."""
        text, seed, turn = "", self.params.seed, (len(asked) + 1) // 2
        params = replace(self.params, seed=None if seed is None else turn_seed(seed, turn))
        leading = [{"role": "system", "content": self.system}] if self.system else []
        with held_interrupts() as is_interrupted:
            answer = self.decoder.start([*leading, *asked], params)
            for increment in answer.texts():
                text += increment
                self.write(increment)
                if is_interrupted():
                    answer.close()
                    self.write("\n")
                    self.note("stopped; the text so far stays in the conversation")
                    return text
            result = answer.result()
        self.write("\n")
        self.note(figures(result) + ("" if params.is_greedy else f", seed {params.seed}"))
        return result.text


def figures(result: DecodeResult) -> str:
    """The counts of an answer in a short line; `-` where there was no cycle."""
    stats = result.stats
    assert stats is not None, "a pipelined answer has counts"
    speed = stats.num_committed / result.seconds if result.seconds else None
    ratios = [(stats.alpha, "tokens per cycle"), (stats.acceptance, "accepted"), (speed, "tokens/s")]
    shown = [f"{'-' if ratio is None else format(ratio, '.2f')} {name}" for ratio, name in ratios]
    return ", ".join([f"{len(result.token_ids)} tokens", *shown])


@contextmanager
def held_interrupts() -> Iterator[Callable[[], bool]]:
    """Within, Ctrl-C is only remembered, so that no cycle is left half done; yields whether there was one."""
    interrupted = Event()
    before = signal.signal(signal.SIGINT, lambda *_: interrupted.set())
    try:
        yield interrupted.is_set
    finally:
        signal.signal(signal.SIGINT, before)

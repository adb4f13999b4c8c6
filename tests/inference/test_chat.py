"""A terminal conversation: what the decoder is asked, what is remembered, and what Ctrl-C does."""

import signal
from collections.abc import Callable, Iterator

import pytest
import torch

from spd_lightning.inference.chat import HELP, converse, turn_seed
from spd_lightning.inference.decoder import DecodeResult, PipelineDecoder
from spd_lightning.inference.sampling import SamplingParams
from spd_lightning.inference.stats import DecodeStats, Judgement
from spd_lightning.modules.checkpoint import drafter_record, save_drafter
from spd_lightning.modules.draft_vocab import DraftVocab
from spd_lightning.modules.features import FeatureLayout
from spd_lightning.modules.target import read_target_shape
from spd_lightning.modules.tiny_target import save_tiny_target
from spd_lightning.modules.tokenizer import load_tokenizer, tokenizer_record
from tests.modules.conftest import make_drafter

GREEDY, SAMPLED = SamplingParams(16), SamplingParams(16, 1.0, seed=3)


def press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


class FakeAnswer:
    def __init__(self, increments: list[str], before: Callable[[int], None]) -> None:
        self.increments, self.before = increments, before
        self.num_given, self.closed = 0, False

    def texts(self) -> Iterator[str]:
        for increment in self.increments:
            assert not self.closed
            self.num_given += 1
            self.before(self.num_given)
            yield increment

    def result(self) -> DecodeResult:
        assert not self.closed and self.num_given == len(self.increments)
        verdicts = [Judgement(position, 1, position != 2) for position in range(4)]
        return DecodeResult([1, 2, 3, 4, 5], "".join(self.increments), "eos", DecodeStats(4, 4, 10, verdicts), 2.0)

    def close(self) -> None:
        self.closed = True


class FakeDecoder:
    """Echoes in three increments; refuses more than `limit` messages."""

    def __init__(self, limit: int = 99, before: Callable[[int], None] = lambda number: None) -> None:
        self.limit, self.before = limit, before
        self.asked: list[list[dict[str, str]]] = []
        self.params: list[SamplingParams] = []
        self.answers: list[FakeAnswer] = []

    def start(self, prompt, params) -> FakeAnswer:
        if len(prompt) > self.limit:
            raise ValueError(f"a prompt of {len(prompt)} messages is too long")
        self.asked.append([dict(message) for message in prompt])
        self.params.append(params)
        self.answers.append(FakeAnswer(["re", ": ", prompt[-1]["content"]], self.before))
        return self.answers[-1]

    def contents(self) -> list[list[str]]:
        return [[message["content"] for message in messages] for messages in self.asked]


class Terminal:
    """Types lines, then Ctrl-D; a function among the lines is called instead."""

    def __init__(self, *lines: str | Callable[[], None]) -> None:
        self.lines = list(lines)
        self.written, self.notes = "", []

    def read(self, prompt: str) -> str:
        if not self.lines:
            raise EOFError
        line = self.lines.pop(0)
        if isinstance(line, str):
            return line
        line()
        raise AssertionError("nothing was typed")

    def write(self, text: str) -> None:
        self.written += text

    def note(self, line: str) -> None:
        self.notes.append(line)


def talk(decoder, *lines, params: SamplingParams = GREEDY, system: str | None = None) -> Terminal:
    terminal = Terminal(*lines)
    converse(decoder, params, system, terminal.read, terminal.write, terminal.note)
    return terminal


@pytest.fixture(autouse=True)
def _handler_is_restored() -> Iterator[None]:
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it would be ignored
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, inherited)


def test_every_question_comes_with_what_was_said_before() -> None:
    decoder = FakeDecoder()
    terminal = talk(decoder, "one", "", "  two ", system="be brief")
    assert decoder.asked[0] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "one"}]
    assert decoder.contents()[1] == ["be brief", "one", "re: one", "two"]
    assert [message["role"] for message in decoder.asked[1]] == ["system", "user", "assistant", "user"]
    assert terminal.written == "re: one\nre: two\n\n"  # Ctrl-D leaves the line, too
    assert terminal.notes[1:] == ["5 tokens, 0.40 tokens per cycle, 0.75 accepted, 2.00 tokens/s"] * 2


def test_commands_change_the_conversation_and_are_no_part_of_it() -> None:
    decoder = FakeDecoder()
    talk(decoder, "one", "/reset", "two", "/system be kind", "three", "/system", "four", "/exit", "five")
    assert decoder.contents() == [
        ["one"],
        ["two"],
        ["be kind", "two", "re: two", "three"],
        ["two", "re: two", "three", "re: three", "four"],
    ]


def test_help_and_mistakes_are_notes() -> None:
    decoder = FakeDecoder()
    notes = talk(decoder, "/help", "/hlep me", "/", "/seed", "/seed two", "/seed -1", params=SAMPLED).notes
    assert notes[2] == HELP
    assert notes[3:5] == ["/hlep is no command; /help lists them", "/ is no command; /help lists them"]
    assert [note.split(":")[0] for note in notes[5:]] == ["/seed ", "/seed two", "/seed -1"]
    assert "an integer from 0" in notes[7] and not decoder.asked


def test_each_sampled_answer_has_a_seed_made_of_the_given_one_and_its_turn() -> None:
    decoder = FakeDecoder()
    terminal = talk(decoder, "one", "two", "/reset", "one", "/seed 4", "two", params=SAMPLED)
    seeds = [params.seed for params in decoder.params]
    assert seeds == [turn_seed(3, 1), turn_seed(3, 2), turn_seed(3, 1), turn_seed(4, 2)]
    assert len({3, 4, turn_seed(2, 3), turn_seed(4, 1), *seeds}) == 7
    assert terminal.notes[0].startswith("seed 3; each answer has its own")
    assert terminal.notes[2].endswith(f"tokens/s, seed {seeds[0]}")


def test_a_conversation_without_a_seed_says_which_one_it_drew() -> None:
    decoder = FakeDecoder()
    note = talk(decoder, "one", params=SamplingParams(16, 1.0)).notes[0]
    assert decoder.params[0].seed == turn_seed(int(note.split(";")[0].removeprefix("seed ")), 1)
    talk(decoder, "one")
    assert decoder.params[1].seed is None  # greedy


def test_ctrl_c_stops_an_answer_between_two_increments_and_its_text_stays() -> None:
    """The signal comes in the middle of the second increment, which is finished."""
    decoder = FakeDecoder(before=lambda number: press_ctrl_c() if number == 2 and len(decoder.answers) == 1 else None)
    terminal = talk(decoder, "one", "two")
    assert [answer.closed for answer in decoder.answers] == [True, False] and decoder.answers[0].num_given == 2
    assert terminal.written == "re: \nre: two\n\n"
    assert terminal.notes[1] == "stopped; the text so far stays in the conversation"
    assert decoder.contents()[1] == ["one", "re: ", "two"]


def test_ctrl_c_at_the_prompt_ends_the_conversation() -> None:
    decoder = FakeDecoder()
    talk(decoder, "one", press_ctrl_c, "two")
    assert decoder.contents() == [["one"]]


def test_a_question_that_does_not_fit_is_taken_back_and_nothing_else() -> None:
    decoder = FakeDecoder(limit=3)
    terminal = talk(decoder, "one", "two", "three", "/reset", "four")
    assert decoder.contents() == [["one"], ["one", "re: one", "two"], ["four"]]
    assert terminal.notes[3] == "a prompt of 5 messages is too long (the last message is taken back)"

    decoder = FakeDecoder(limit=3)
    terminal = talk(decoder, "/system short", "one", "two", "/system", "three")
    assert decoder.contents() == [["short", "one"], ["one", "re: one", "three"]]


def test_an_error_of_the_decoder_is_not_swallowed_and_leaves_the_handler_as_it_was() -> None:
    def fail(number: int) -> None:
        raise RuntimeError("stage 2 has died")

    with pytest.raises(RuntimeError, match="stage 2"):
        talk(FakeDecoder(before=fail), "one")


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> PipelineDecoder:
    root = tmp_path_factory.mktemp("chat")
    target = str(save_tiny_target(root / "target", "llama", 4))
    drafter = make_drafter(FeatureLayout.build(4, 2), torch.float32)
    record = drafter_record(
        drafter.config,
        target_name=target,
        target=read_target_shape(target),
        tokenizer=tokenizer_record(load_tokenizer(target), [258]),
        draft_vocab=DraftVocab(tuple(drafter.draft_token_ids.tolist())),
        metrics={},
    )
    save_drafter(root / "drafter", drafter.state_dict(), record)
    return PipelineDecoder.from_pretrained(str(root / "drafter"), max_length=192)


def test_a_real_decoder_gives_the_answers_that_it_gives_alone(decoder: PipelineDecoder) -> None:
    first = talk(decoder, "Hi", "What is 2 + 2?", params=SAMPLED)
    messages, texts = [], ""
    for turn, question in enumerate(("Hi", "What is 2 + 2?"), start=1):
        messages.append({"role": "user", "content": question})
        text = decoder.generate(messages, SamplingParams(16, 1.0, seed=turn_seed(3, turn))).text
        messages.append({"role": "assistant", "content": text})
        texts += text + "\n"
    assert first.written == texts + "\n" and len(texts) > 8
    assert talk(decoder, "Hi", "What is 2 + 2?", params=SAMPLED).written == first.written


def test_a_real_decoder_goes_on_after_a_stopped_answer_and_a_full_cache(decoder: PipelineDecoder) -> None:
    class Recorder:
        def start(self, prompt, params):
            asked.append([dict(message) for message in prompt])
            return decoder.start(prompt, params)

    def write_and_press(text: str) -> None:
        write(text)
        if len(asked) == 1:
            press_ctrl_c()

    asked: list[list[dict[str, str]]] = []
    terminal = Terminal("Hi", "Go on", "x" * 200, "And now?")
    write = terminal.write
    converse(Recorder(), SAMPLED, None, terminal.read, write_and_press, terminal.note)
    assert "stopped" in terminal.notes[2] and "do not fit into max_length=192" in terminal.notes[4]
    assert [len(messages) for messages in asked] == [1, 3, 5, 5]

    def answer(turn: int) -> str:
        return decoder.generate(asked[turn], SamplingParams(16, 1.0, seed=turn_seed(3, (1, 2, 3, 3)[turn]))).text

    partial, second = asked[1][1]["content"], asked[3][3]["content"]
    assert answer(0).startswith(partial) and 0 < len(partial) < len(answer(0))
    assert asked[3] == [*asked[1], {"role": "assistant", "content": answer(1)}, {"role": "user", "content": "And now?"}]
    assert terminal.written == f"{partial}\n{second}\n{answer(3)}\n\n"

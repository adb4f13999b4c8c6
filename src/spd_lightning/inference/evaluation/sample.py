"""One measured answer as a line of JSON, and the class of a token by its text. Knows no models and no files."""

import unicodedata
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, TypedDict

from spd_lightning.inference.stats import DecodeStats, Judgement

VERSION = 1
TREE = "spd_tree"
"""The method of a pipeline's drafter with trees in the place of chains."""
TOKEN_CLASSES = ("word start", "word continuation", "digit", "punctuation", "whitespace", "special")
Clock = Literal["wall", "virtual"]
SampleKey = tuple[str, str, int, str, str | None, float]


class FirstDifference(TypedDict):
    """Where an answer leaves the one it should equal.

    Attributes:
        position: in the sequence, prompt included.
        token: of this answer.
        ar_token: of plain decoding.
        margin: between the two best logits of plain decoding there; none where it was not recorded.
    """

    position: int
    token: int
    ar_token: int
    margin: float | None


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One answer of one method, with what its figures are made of.

    Attributes:
        task: benchmark, such as `gsm8k`.
        question_id: within the task.
        category: of the question, by the benchmark.
        turn: of the question, from 0.
        method: `ar` and `generate` are baselines; `spd`, `spd_tree`, `ppsd` and `eagle3` have a drafter.
        drafter: its label; none for a baseline.
        temperature: 0 is greedy.
        seed: of the draws; none where nothing is drawn.
        num_stages: `n`; none where there is no pipeline.
        num_layers: `L`, of the target.
        num_spec_layers: `L_s`, of the drafter.
        schedule: `pre_step` or `post_step`; none where there is no pipeline.
        prompt_tokens: length of the prompt.
        token_ids: of the answer, the prefill's token included.
        text: of the answer.
        finish_reason: `eos`, `length` or `stop`.
        num_committed: `N`: tokens committed in the decode phase, without the prefill's own.
        num_cycles: `K`, for EAGLE-3 rounds; 0 for a baseline.
        judgements: (position in the sequence, fill at which it was drafted, accepted) of every judged draft, or of
            every judged level of a tree: accepted if one of its candidates was.
        token_classes: `token_class` of every judged draft's committed token, in the order of `judgements`.
        prefill_seconds: until the prefill's token was there.
        decode_seconds: from then on.
        identical_to_ar: whether plain decoding gave the same tokens; none without an answer to compare with.
        first_difference: where it did not.
        is_correct: by the task's own score; none where it was not scored.
        draft_length: `k` of EAGLE-3; none for all others.
        num_devices: that worked on this answer.
        clock: of the seconds: `virtual` where one device did the work of several and a clock per rank was advanced.
    """

    task: str
    question_id: str
    category: str
    turn: int
    method: str
    drafter: str | None
    temperature: float
    seed: int | None
    num_stages: int | None
    num_layers: int
    num_spec_layers: int | None
    schedule: str | None
    prompt_tokens: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    num_committed: int
    num_cycles: int
    judgements: tuple[tuple[int, int, bool], ...]
    token_classes: tuple[str, ...]
    prefill_seconds: float
    decode_seconds: float
    identical_to_ar: bool | None
    first_difference: FirstDifference | None
    is_correct: bool | None
    draft_length: int | None = None
    num_devices: int = 1
    clock: Clock = "wall"

    def __post_init__(self) -> None:
        if len(self.token_classes) != len(self.judgements):
            raise ValueError(
                f"{self.key}: {len(self.judgements)} judgements but {len(self.token_classes)} token classes: "
                "each judged draft has one"
            )

    @property
    def prompt(self) -> tuple[str, str, int]:
        """What was asked: task, question and turn."""
        return self.task, self.question_id, self.turn

    @property
    def key(self) -> SampleKey:
        """What identifies this answer in a folder, so that a resumed run does not make it again."""
        return *self.prompt, self.method, self.drafter, self.temperature

    @property
    def stats(self) -> DecodeStats:
        """The counts of the decode; without a pipeline as if of one stage, so that `S0` is tokens per round."""
        judgements = [Judgement(*judgement) for judgement in self.judgements]
        return DecodeStats(self.num_stages or 1, self.num_committed, self.num_cycles, judgements)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict that `from_json` takes back."""
        return {"version": VERSION} | asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Sample":
        """The sample that `to_json` wrote.

        Raises:
            ValueError: for another version, or missing or unknown keys.
        """
        if (version := values.get("version")) != VERSION:
            raise ValueError(f"a sample of version {version!r}; this release reads version {VERSION}: use a new folder")
        given = {key: value for key, value in values.items() if key != "version"}
        if different := sorted(given.keys() ^ {field.name for field in fields(cls)}):
            raise ValueError(f"a sample with missing or unknown keys: {different}")
        given["token_ids"] = tuple(given["token_ids"])
        given["token_classes"] = tuple(given["token_classes"])
        given["judgements"] = tuple((position, fill, accepted) for position, fill, accepted in given["judgements"])
        return cls(**given)


def token_class(text: str) -> str:
    """One of `TOKEN_CLASSES` for one token's text, as a byte-level tokenizer decodes it with special tokens shown.

    A token with a letter is a word's start unless it begins with a letter or an apostrophe: the space, bracket or dot
    in front belongs to it. A part of a character (U+FFFD) continues a word. Else digits count before punctuation.
    """
    if not text or (text[0] == "<" and text[-1] == ">" and any(char.isalpha() for char in text)):
        return "special"
    kinds = [_kind(char) for char in text]
    if "letter" in kinds:
        return "word continuation" if kinds[0] == "letter" or text[0] in "'’" else "word start"
    return next((kind for kind in ("digit", "punctuation") if kind in kinds), "whitespace")


def _kind(char: str) -> str:
    if char.isspace():
        return "whitespace"
    if char == "\ufffd":
        return "letter"
    return {"L": "letter", "M": "letter", "N": "digit"}.get(unicodedata.category(char)[0], "punctuation")

"""`PipelineDecoder`: a drafter folder and its target as one object that decodes. Knows files and text; no ranks."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spd_lightning.inference.autoregressive import decode_autoregressively
from spd_lightning.inference.coordinator import decode
from spd_lightning.inference.drafting import DraftSession
from spd_lightning.inference.runtime.local import LocalPipeline
from spd_lightning.inference.sampling import SamplingParams
from spd_lightning.inference.stage import Stage
from spd_lightning.inference.stage_loading import load_stage
from spd_lightning.inference.stats import DecodeStats
from spd_lightning.inference.stopping import StopCondition
from spd_lightning.inference.verify import make_proposer, make_verifier
from spd_lightning.modules.checkpoint import Drafter, load_drafter
from spd_lightning.modules.target import TargetDtype, TargetShape, read_target_shape
from spd_lightning.modules.target_files import read_generation_config
from spd_lightning.modules.tokenizer import (
    eos_token_ids,
    load_tokenizer,
    render_prompt,
    token_ids,
    tokenizer_fingerprint,
)

Messages = Sequence[Mapping[str, str]]
GREEDY = SamplingParams()


@dataclass(frozen=True)
class DecodeResult:
    """One answer.

    Attributes:
        token_ids: what was committed, up to and with an end-of-sequence token, up to and without a stop string.
        text: the answer's text.
        finish_reason: `eos`, `length` or `stop`.
        stats: counts of the decode phase; none for plain decoding.
        seconds: wall clock of the decode phase, without the prefill.
    """

    token_ids: list[int]
    text: str
    finish_reason: str
    stats: DecodeStats | None
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """The result as `spd-infer generate --json` prints it."""
        stats = self.stats
        counts = (
            {}
            if stats is None
            else {
                "num_committed": stats.num_committed,
                "num_cycles": stats.num_cycles,
                "num_judged": stats.num_judged,
                "num_accepted": stats.num_accepted,
                "alpha": stats.alpha,
                "p": stats.acceptance,
                "s0": stats.speedup,
            }
        )
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            **counts,
            "seconds": self.seconds,
            "finish_reason": self.finish_reason,
        }


class PipelineDecoder:
    """Decodes with all stages and the drafter in this process; see `from_pretrained`."""

    def __init__(
        self,
        stages: Sequence[Stage],
        drafter: Drafter,
        session: DraftSession,
        tokenizer: Any,
        eos_ids: Sequence[int],
        max_length: int,
    ) -> None:
        self.stages = stages
        self.drafter = drafter
        self.session = session
        self.tokenizer = tokenizer
        self.eos_ids = tuple(eos_ids)
        self.max_length = max_length
        self.num_stages = drafter.module.config.num_stages

    @classmethod
    def from_pretrained(
        cls,
        drafter: str,
        target: str | None = None,
        dtype: TargetDtype = "auto",
        device: str = "cpu",
        max_length: int = 4096,
    ) -> "PipelineDecoder":
        """Loads a drafter folder and the target that it was trained for.

        Args:
            drafter: a drafter folder.
            target: folder or hub id of the target; the drafter names it when absent.
            dtype: of the target and the drafter; `auto` keeps the target checkpoint's.
            device: where everything runs.
            max_length: longest sequence, prompt and answer together; the caches are allocated for it now.

        Raises:
            ValueError: if either cannot be loaded, or they do not belong together.
        """
        given = load_drafter(drafter)
        name = target or given.record["target"]["name"]
        check_target(given, name, read_target_shape(name))
        tokenizer = load_tokenizer(name)
        if tokenizer_fingerprint(tokenizer) != given.record["tokenizer"]["hash"]:
            raise ValueError(f"the drafter {drafter} was trained with another tokenizer than that of {name!r}")
        layout = given.module.layout
        ends, last = layout.stage_ends, layout.num_stages
        capacity = max_length + last  # the tokens in flight beyond the last committed one
        stages = [
            Stage(
                load_stage(name, ends[number - 1], ends[number], number == 1, number == last, dtype, device),
                number,
                last,
                ends[number - 1],
                layout.anchors,
                capacity,
            )
            for number in range(1, last + 1)
        ]
        embedding = stages[0].modules.embedding
        assert embedding is not None
        given.module.to(device=device, dtype=embedding.weight.dtype)
        session = DraftSession(given.module, embedding, capacity)
        eos_ids = eos_token_ids(tokenizer, read_generation_config(name))
        return cls(stages, given, session, tokenizer, eos_ids, max_length)

    def generate(self, prompt: Sequence[int] | Messages, params: SamplingParams = GREEDY) -> DecodeResult:
        """Decodes an answer.

        Args:
            prompt: token ids, or messages that the chat template renders (thinking off).
            params: greedy decoding of at most 512 tokens unless given.

        Raises:
            ValueError: if prompt and answer do not fit into `max_length`.
        """
        return self.start(prompt, params).result()

    def stream(self, prompt: Sequence[int] | Messages, params: SamplingParams = GREEDY) -> Iterator[str]:
        """Yields the answer's text as it is committed: whole characters, nothing that a stop string may cut."""
        yield from self.start(prompt, params).texts()

    def start(self, prompt: Sequence[int] | Messages, params: SamplingParams = GREEDY) -> "Run":
        """An answer to iterate over, with its statistics at hand; errors as `generate`."""
        ids, params = self._checked(prompt, params)
        token_ids_of_draft = self.drafter.module.draft_token_ids
        verifier = make_verifier(params, len(self.tokenizer), token_ids_of_draft)
        pipeline = LocalPipeline(self.stages, self.session, make_proposer(params, token_ids_of_draft), verifier)
        stop, stats = self._stop(params), DecodeStats(self.num_stages)
        return Run(decode(pipeline, self.num_stages, ids, stop, stats), stop, stats)

    def start_autoregressive(self, prompt: Sequence[int] | Messages, params: SamplingParams = GREEDY) -> "Run":
        """The same answer by plain decoding with the same stages: the baseline."""
        ids, params = self._checked(prompt, params)
        stop = self._stop(params)
        verifier = make_verifier(params, len(self.tokenizer))
        return Run(decode_autoregressively(self.stages, verifier, ids, stop), stop, None)

    def _stop(self, params: SamplingParams) -> StopCondition:
        eos = () if params.ignore_eos else self.eos_ids
        return StopCondition(eos, params.max_new_tokens, params.stop, self.tokenizer)

    def _checked(self, prompt: Sequence[int] | Messages, params: SamplingParams) -> tuple[list[int], SamplingParams]:
        if prompt and isinstance(prompt[0], Mapping):
            messages: Any = prompt
            ids = token_ids(self.tokenizer, render_prompt(self.tokenizer, messages))
        else:
            ids = [int(token) for token in prompt]  # pyright: ignore[reportArgumentType]
        if not ids:
            raise ValueError("the prompt is empty: at least one token is needed")
        if len(ids) + params.max_new_tokens > self.max_length:
            raise ValueError(
                f"a prompt of {len(ids)} tokens and max_new_tokens={params.max_new_tokens} do not fit into "
                f"max_length={self.max_length}: shorten one of them or raise max_length"
            )
        return ids, params if params.is_greedy else params.seeded()


class Run:
    """An answer as it is decoded; `tokens` or `texts` drives it, once."""

    def __init__(self, committed: Iterator[int], stop: StopCondition, stats: DecodeStats | None) -> None:
        self.committed = committed
        self.stop = stop
        self.stats = stats
        self.token_ids: list[int] = []
        self.began = self.seconds = 0.0

    def tokens(self) -> Iterator[int]:
        """Committed token ids; the clock runs from the prefill's token on."""
        for token in self.committed:
            now = time.perf_counter()
            if not self.token_ids:
                self.began = now
            self.seconds = now - self.began
            self.token_ids.append(token)
            yield token

    def texts(self) -> Iterator[str]:
        """Increments of the text."""
        shown = 0
        for _ in self.tokens():
            text = self.stop.text.text
            if len(text) > shown:
                yield text[shown:]
                shown = len(text)

    def result(self) -> DecodeResult:
        """Decodes what is left and returns what came out."""
        for _ in self.tokens():
            pass
        end = self.stop.end
        assert end is not None, "the decode has not ended"
        return DecodeResult(self.token_ids[: end.num_kept], end.text, end.reason, self.stats, self.seconds)


def check_target(drafter: Drafter, name: str, shape: TargetShape) -> None:
    """Refuses a target that the drafter was not trained for; another quantisation or dtype of it is fine.

    Raises:
        ValueError: naming what differs.
    """
    trained = drafter.record["target"]
    wrong = [
        f"{key} {getattr(shape, key)!r} instead of {trained[key]!r}"
        for key in ("family", "num_layers", "hidden_size", "vocab_size")
        if getattr(shape, key) != trained[key]
    ]
    if wrong:
        raise ValueError(
            f"target {name!r} is not the one that the drafter was trained for ({trained['name']!r}): {', '.join(wrong)}"
        )

"""`PipelineDecoder`: a drafter folder and its target as one object that decodes. Knows files and text; no ranks."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from spd_lightning.inference.answer import DecodeResult, Run
from spd_lightning.inference.compatibility import RuntimeName, check_method, check_schedule, check_target
from spd_lightning.inference.eagle.runtime import EagleRuntime
from spd_lightning.inference.runtime.cluster import DistributedRuntime
from spd_lightning.inference.runtime.interface import Method, Runtime
from spd_lightning.inference.runtime.local import LocalRuntime
from spd_lightning.inference.runtime.virtual import Link, VirtualRuntime
from spd_lightning.inference.sampling import SamplingParams
from spd_lightning.inference.stats import DecodeStats
from spd_lightning.inference.stopping import StopCondition
from spd_lightning.inference.token_scores import TokenScores
from spd_lightning.inference.tree.schedule import TreeShape
from spd_lightning.modules.checkpoint import Drafter, load_drafter
from spd_lightning.modules.eagle.eagle_config import Eagle3Config
from spd_lightning.modules.eagle.eagle_drafter import Eagle3Drafter
from spd_lightning.modules.features import Schedule
from spd_lightning.modules.target import TargetDtype
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


class PipelineDecoder:
    """Decodes one answer at a time, in this process or as one rank of several; see `from_pretrained`.

    Over several ranks every process holds such an object. The lead decodes; all others call `follow`:

        with PipelineDecoder.from_pretrained(drafter, runtime="distributed") as decoder:
            if decoder.is_lead:
                print(decoder.generate(messages).text)
            else:
                decoder.follow()

    Args:
        runtime: what does the work.
        drafter: the drafter and its record.
        target_name: folder or hub id of the target.
        tokenizer: the target's.
        eos_ids: tokens that end an answer.
        max_length: longest sequence, prompt and answer together.
    """

    def __init__(
        self,
        runtime: Runtime,
        drafter: Drafter,
        target_name: str,
        tokenizer: Any,
        eos_ids: Sequence[int],
        max_length: int,
    ) -> None:
        self.runtime = runtime
        self.drafter = drafter
        self.target_name = target_name
        self.tokenizer = tokenizer
        self.eos_ids = tuple(eos_ids)
        self.max_length = max_length
        config = drafter.module.config
        self.num_stages = 1 if isinstance(config, Eagle3Config) else config.num_stages
        self.shape = runtime.shape
        self._current: Run | None = None

    @classmethod
    def from_pretrained(
        cls,
        drafter: str,
        target: str | None = None,
        runtime: RuntimeName = "local",
        dtype: TargetDtype = "auto",
        device: str = "cpu",
        max_length: int = 4096,
        timeout: float = 120.0,
        link: Link | None = None,
        schedule: Schedule | None = None,
        draft_length: int | None = None,
        shape: TreeShape | None = None,
    ) -> "PipelineDecoder":
        """Loads a drafter folder and the target that it was trained for.

        An EAGLE-3 drafter decodes in rounds on one device (`EagleRuntime`); all others in a pipeline.

        Args:
            drafter: a drafter folder.
            target: folder or hub id of the target; the drafter names it when absent.
            runtime: `local` runs everything in this process. `distributed` makes this process one of `n + 1` that
                torchrun or srun has started, and loads what this rank needs only. `virtual` is `local` with a clock
                per rank, advanced as if each had a device of its own.
            dtype: of the target and the drafter; `auto` keeps the target checkpoint's.
            device: where everything runs: `cpu` or `cuda`.
            max_length: longest sequence, prompt and answer together; the caches are allocated for it now.
            timeout: seconds after which a rank that does not answer is given up.
            link: between the ranks of the virtual runtime.
            schedule: the drafter's own, or absent; another is an error.
            draft_length: `k`, the drafts of a round, 7 when absent; of EAGLE-3 drafters only.
            shape: of the draft trees to decode with; chains when absent.

        Raises:
            ValueError: if either cannot be loaded, they do not belong together, the ranks are not `n + 1`, or something
                is asked for that the drafter's method does not have.
            RankFailure: if another rank fails.
        """
        given = load_drafter(drafter, torch.float64 if dtype == "float64" else torch.float32)
        check_schedule(given, schedule)
        check_method(given, runtime, draft_length, shape)
        name = check_target(given, target)
        tokenizer = load_tokenizer(name)
        if tokenizer_fingerprint(tokenizer) != given.record["tokenizer"]["hash"]:
            raise ValueError(f"the drafter {drafter} was trained with another tokenizer than that of {name!r}")
        eos_ids = eos_token_ids(tokenizer, read_generation_config(name))
        if isinstance(given.module, Eagle3Drafter):
            rounds = EagleRuntime.load(given.module, name, len(tokenizer), max_length, draft_length, dtype, device)
            return cls(rounds, given, name, tokenizer, eos_ids, max_length)
        # What is in flight behind the last committed token.
        capacity = max_length + given.module.config.num_stages * (1 if shape is None else shape.refill_width)
        what = (given.module, name, len(tokenizer), capacity)
        match runtime:
            case "local":
                loaded = LocalRuntime.load(*what, dtype, device, shape)
            case "virtual":
                loaded = VirtualRuntime.load(*what, dtype, device, shape)
                assert isinstance(loaded, VirtualRuntime)
                loaded.use_link(link or Link())
            case "distributed":
                loaded = DistributedRuntime.load(*what, dtype, device, timeout, shape)
        return cls(loaded, given, name, tokenizer, eos_ids, max_length)

    @property
    def is_lead(self) -> bool:
        """Whether this process may ask for answers."""
        return self.runtime.is_lead

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
        run = self.start(prompt, params)
        try:
            yield from run.texts()
        finally:
            run.close()

    def start(
        self,
        prompt: Sequence[int] | Messages,
        params: SamplingParams = GREEDY,
        scores: TokenScores | None = None,
    ) -> Run:
        """An answer to iterate over, with its statistics at hand; errors as `generate`. Cancels the one before.

        Decodes with trees, if this was loaded with their shape. `scores` takes the log-probability of each committed
        token.
        """
        return self._start("pipelined" if self.shape is None else "tree", prompt, params, scores)

    def start_chain(
        self,
        prompt: Sequence[int] | Messages,
        params: SamplingParams = GREEDY,
        scores: TokenScores | None = None,
    ) -> Run:
        """The same answer without trees, whatever this was loaded for."""
        return self._start("pipelined", prompt, params, scores)

    def start_autoregressive(
        self,
        prompt: Sequence[int] | Messages,
        params: SamplingParams = GREEDY,
        scores: TokenScores | None = None,
    ) -> Run:
        """The same answer by plain decoding with the same stages: the baseline."""
        return self._start("plain", prompt, params, scores)

    def follow(self) -> None:
        """On ranks other than the lead: does their part of every answer, until the lead closes.

        Raises:
            RankFailure: if another rank fails.
        """
        self.runtime.follow(self.stop_condition)

    def check(self) -> None:
        """On the lead, while nothing is decoded: raises `RankFailure` if another rank is lost."""
        self.runtime.check()

    def close(self) -> None:
        """On the lead: cancels what is being decoded and lets the other ranks end."""
        if self.is_lead:
            if self._current is not None:
                self._current.close()
            self.runtime.close()

    def __enter__(self) -> "PipelineDecoder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(
        self, method: Method, prompt: Sequence[int] | Messages, params: SamplingParams, scores: TokenScores | None
    ) -> Run:
        ids, params = self.checked(prompt, params)
        if self._current is not None:
            self._current.close()
        stop, stats = self.stop_condition(params), DecodeStats(self.num_stages)
        tokens = self.runtime.decode(method, ids, params, stop, stats, scores)
        if method == "plain":
            self._current = Run(ids, tokens, stop, None)
        else:
            self._current = Run(ids, tokens, stop, stats, self.runtime.clock)
        return self._current

    def stop_condition(self, params: SamplingParams) -> StopCondition:
        """When an answer ends."""
        eos = () if params.ignore_eos else self.eos_ids
        return StopCondition(eos, params.max_new_tokens, params.stop, self.tokenizer)

    def checked(self, prompt: Sequence[int] | Messages, params: SamplingParams) -> tuple[list[int], SamplingParams]:
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

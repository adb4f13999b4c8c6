"""Questions through a decoder, method by method: one sample each. Knows no arguments, no files but the journal."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from spd_lightning.inference.answer import Run
from spd_lightning.inference.decoder import PipelineDecoder
from spd_lightning.inference.eagle.runtime import EagleRuntime
from spd_lightning.inference.evaluation.journal import SampleJournal
from spd_lightning.inference.evaluation.margin import top2_margin
from spd_lightning.inference.evaluation.sample import TREE, Clock, FirstDifference, Sample, SampleKey, token_class
from spd_lightning.inference.evaluation.tasks import Question
from spd_lightning.inference.sampling import SamplingParams
from spd_lightning.modules.drafter_config import DrafterConfig

BASELINES = ("ar", "compiled", "generate")
PIPELINES = ("spd", "spd_post", "ppsd")
"""Their stages run one token after the other, so greedy they give what `ar` does, bit for bit."""
SEVERAL_A_FORWARD = (TREE, "eagle3")
"""These verify several tokens a forward: greedy they may differ from `ar` where the two best tokens are as good as equal."""
DRAFTED = (*PIPELINES, *SEVERAL_A_FORWARD)
"""Methods that have a drafter; all but `spd_tree` are as its configuration names them."""
METHODS = (*BASELINES, *DRAFTED)
WHOLE_TARGET_METHODS = {"compiled", "generate"}
"""Baselines that run the whole target in one process, beside the stages."""
Score = Callable[[Question, str], bool | None]
Start = Callable[[Sequence[Mapping[str, str]], SamplingParams], Run]


@dataclass(frozen=True)
class Method:
    """One way to answer.

    Attributes:
        name: as samples have it.
        drafter: label; none for a baseline.
        start: begins an answer.
        num_devices: that work on it.
        clock: of its seconds.
        prepare: readies it before its first answer; `ValueError` if it cannot work here.
    """

    name: str
    drafter: str | None
    start: Start
    num_devices: int = 1
    clock: Clock = "wall"
    prepare: Callable[[], object] = lambda: None


class Evaluation:
    """All methods of one decoder on questions, each answer once.

    Args:
        decoder: of one drafter.
        methods: in the order in which they answer a prompt, plain decoding first.
        params: of every answer but for temperature and seed.
        temperatures: each question is answered at each.
        all_turns: whether the later turns of a question are asked, too.
        journal: has what is done, and takes what is made.
        score: whether an answer is right, or none where the task has no score.
    """

    def __init__(
        self,
        decoder: PipelineDecoder,
        methods: Sequence[Method],
        params: SamplingParams,
        temperatures: Sequence[float],
        all_turns: bool,
        journal: SampleJournal,
        score: Score,
    ) -> None:
        self.decoder = decoder
        self.methods = methods
        self.params = params
        self.temperatures = temperatures
        self.all_turns = all_turns
        self.journal = journal
        self.score = score
        self.skipped: list[dict[str, str]] = []
        self._classes: dict[int, str] = {}
        self._revised: list[Sample] = []

    def run(self, questions: Sequence[Question]) -> Iterator[Sample]:
        """Answers what has not been answered yet; a question that cannot be is skipped with its reason.

        What is there already is compared with plain decoding and scored, if that was not done when it was made.

        Raises:
            ValueError: if a method cannot work here at all.
        """
        for method in self.methods:
            if any(key not in self.journal.samples for key in self._keys(questions, method)):
                method.prepare()
        for question in questions:
            for temperature in self.temperatures:
                try:
                    yield from self._answers(question, temperature)
                except ValueError as error:
                    item = {"task": question.task, "question_id": question.question_id, "error": str(error)}
                    if item not in self.skipped:  # at another temperature, too
                        self.skipped.append(item)
        self.journal.update(self._revised)

    def _keys(self, questions: Sequence[Question], method: "Method") -> Iterator[SampleKey]:
        for question in questions:
            for turn in range(len(question.turns) if self.all_turns else 1):
                for temperature in self.temperatures:
                    yield question.task, question.question_id, turn, method.name, method.drafter, temperature

    def count(self, questions: Sequence[Question]) -> int:
        """How many answers `run` gives, those that are there already included."""
        return sum(1 for method in self.methods for _ in self._keys(questions, method))

    def _answers(self, question: Question, temperature: float) -> Iterator[Sample]:
        params = replace(self.params, temperature=temperature)
        if not params.is_greedy:
            params = replace(params, seed=question_seed(self.params.seed or 0, question))
        histories: dict[Method, list[dict[str, str]]] = {method: [] for method in self.methods}
        for turn, text in enumerate(question.turns if self.all_turns else question.turns[:1]):
            plain: Sample | None = None
            plainly_asked: list[dict[str, str]] = []
            for method in self.methods:
                history = histories[method]
                history.append({"role": "user", "content": text})
                key = (question.task, question.question_id, turn, method.name, method.drafter, temperature)
                sample = self.journal.samples.get(key)
                # A later turn has the method's own earlier answers in its prompt.
                comparable = plain if plainly_asked == history else None
                if sample is None:
                    sample = self.journal.add(self._answer(question, turn, method, history, params, comparable))
                else:
                    sample = self._revise(question, sample, history, params, comparable)
                if method.name == "ar":
                    plain, plainly_asked = sample, list(history)
                history.append({"role": "assistant", "content": sample.text})
                yield sample

    def _answer(
        self,
        question: Question,
        turn: int,
        method: Method,
        history: Sequence[Mapping[str, str]],
        params: SamplingParams,
        plain: Sample | None,
    ) -> Sample:
        """Decodes one answer and compares it with plain decoding's, where the two must or may be equal."""
        run = method.start(list(history), params)
        result = run.result()
        stats, config = result.stats, self.decoder.drafter.module.config
        has_drafter = method.drafter is not None
        pipeline = config if has_drafter and isinstance(config, DrafterConfig) else None
        runtime = self.decoder.runtime
        judgements = () if stats is None else tuple((j.position, j.fill, j.accepted) for j in stats.judgements)
        token_ids, start = tuple(run.token_ids), len(run.prompt)
        compared = plain is not None and is_comparable(method.name, params)
        difference = self._difference(plain, token_ids, run.prompt, params) if compared and plain is not None else None
        return Sample(
            task=question.task,
            question_id=question.question_id,
            category=question.category,
            turn=turn,
            method=method.name,
            drafter=method.drafter,
            temperature=params.temperature,
            seed=None if params.is_greedy else params.seed,
            num_stages=None if pipeline is None else pipeline.num_stages,
            num_layers=config.num_layers,
            num_spec_layers=config.num_spec_layers if has_drafter else None,
            schedule=None if pipeline is None else pipeline.schedule,
            prompt_tokens=start,
            token_ids=token_ids,
            text=result.text,
            finish_reason=result.finish_reason,
            num_committed=len(token_ids) - 1 if stats is None else stats.num_committed,
            num_cycles=0 if stats is None else stats.num_cycles,
            judgements=judgements,
            token_classes=tuple(self._class(token_ids[position - start]) for position, _, _ in judgements),
            prefill_seconds=run.prefill_seconds,
            decode_seconds=result.seconds,
            identical_to_ar=difference is None if compared else None,
            first_difference=difference,
            is_correct=self.score(question, result.text),
            draft_length=runtime.draft_length if has_drafter and isinstance(runtime, EagleRuntime) else None,
            num_devices=method.num_devices,
            clock=method.clock,
        )

    def _revise(
        self,
        question: Question,
        sample: Sample,
        history: Sequence[Mapping[str, str]],
        params: SamplingParams,
        plain: Sample | None,
    ) -> Sample:
        """A sample of an earlier run with the comparison and the score that can be had now."""
        changes: dict[str, Any] = {}
        if sample.identical_to_ar is None and plain is not None and is_comparable(sample.method, params):
            prompt, _ = self.decoder.checked(list(history), params)
            difference = self._difference(plain, sample.token_ids, tuple(prompt), params)
            changes |= {"identical_to_ar": difference is None, "first_difference": difference}
        if sample.is_correct is None and (is_correct := self.score(question, sample.text)) is not None:
            changes["is_correct"] = is_correct
        if not changes:
            return sample
        self._revised.append(replace(sample, **changes))
        return self._revised[-1]

    def _difference(
        self, plain: Sample, token_ids: tuple[int, ...], prompt: tuple[int, ...], params: SamplingParams
    ) -> FirstDifference | None:
        if plain.token_ids == token_ids:
            return None
        pairs = zip((*token_ids, -1), (*plain.token_ids, -1), strict=False)
        index = next(index for index, (ours, theirs) in enumerate(pairs) if ours != theirs)
        ours, theirs = ((*ids, -1)[index] for ids in (token_ids, plain.token_ids))
        margin = top2_margin(self.decoder, prompt, index + 1) if params.is_greedy else None
        return FirstDifference(position=len(prompt) + index, token=ours, ar_token=theirs, margin=margin)

    def _class(self, token_id: int) -> str:
        if token_id not in self._classes:
            self._classes[token_id] = token_class(self.decoder.tokenizer.decode([token_id]))
        return self._classes[token_id]


def is_comparable(method: str, params: SamplingParams) -> bool:
    """Whether an answer of this method must or may have plain decoding's tokens: greedy ones, and coupled stages'."""
    return method != "ar" and (params.is_greedy or (params.verify == "coupled" and method not in WHOLE_TARGET_METHODS))


def question_seed(seed: int, question: Question) -> int:
    """Each question's own seed, the same for every method, so that answers can be made again one by one."""
    key = f"{seed} {question.task} {question.question_id}".encode()
    return int.from_bytes(blake2b(key, digest_size=6).digest(), "little")

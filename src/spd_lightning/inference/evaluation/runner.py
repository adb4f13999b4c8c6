"""Questions through a decoder, method by method: one sample each. Knows no arguments, no files but the journal."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from spd_lightning.inference.answer import Run
from spd_lightning.inference.decoder import PipelineDecoder
from spd_lightning.inference.evaluation.journal import SampleJournal
from spd_lightning.inference.evaluation.margin import top2_margin
from spd_lightning.inference.evaluation.sample import Clock, FirstDifference, Sample, token_class
from spd_lightning.inference.evaluation.tasks import Question
from spd_lightning.inference.sampling import SamplingParams

BASELINES = ("ar", "compiled", "generate")
DRAFTED = ("spd", "spd_post", "ppsd")
"""Methods that have a drafter, as its configuration names them; pipelines all, so greedy they give what `ar` does."""
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
    """

    name: str
    drafter: str | None
    start: Start
    num_devices: int = 1
    clock: Clock = "wall"


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

    def run(self, questions: Sequence[Question]) -> Iterator[Sample]:
        """Answers what has not been answered yet; a question that cannot be is skipped with its reason."""
        for question in questions:
            for temperature in self.temperatures:
                try:
                    yield from self._answers(question, temperature)
                except ValueError as error:
                    item = {"task": question.task, "question_id": question.question_id, "error": str(error)}
                    if item not in self.skipped:  # at another temperature, too
                        self.skipped.append(item)

    def count(self, questions: Sequence[Question]) -> int:
        """How many answers `run` gives, those that are there already included."""
        turns = sum(len(question.turns) if self.all_turns else 1 for question in questions)
        return turns * len(self.temperatures) * len(self.methods)

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
                if sample is None:
                    # A later turn has the method's own earlier answers in its prompt.
                    comparable = plain if plainly_asked == history else None
                    sample = self.journal.add(self._answer(question, turn, method, history, params, comparable))
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
        judgements = () if stats is None else tuple((j.position, j.fill, j.accepted) for j in stats.judgements)
        token_ids, start = tuple(run.token_ids), len(run.prompt)
        same_law = params.is_greedy or (params.verify == "coupled" and method.name not in WHOLE_TARGET_METHODS)
        compared = plain is not None and method.name != "ar" and same_law
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
            num_stages=config.num_stages if has_drafter else None,
            num_layers=config.layout.num_layers,
            num_spec_layers=config.num_spec_layers if has_drafter else None,
            schedule=config.schedule if has_drafter else None,
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
            num_devices=method.num_devices,
            clock=method.clock,
        )

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


def question_seed(seed: int, question: Question) -> int:
    """Each question's own seed, the same for every method, so that answers can be made again one by one."""
    key = f"{seed} {question.task} {question.question_id}".encode()
    return int.from_bytes(blake2b(key, digest_size=6).digest(), "little")

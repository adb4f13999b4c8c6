"""`spd-infer eval`: drafters on benchmarks, beside baselines, as tables, a page and W&B. Knows arguments and files."""

import json
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace
from tqdm import tqdm

from spd_lightning.files import write_whole
from spd_lightning.inference.arguments import add_decoding_arguments, opened_decoder, run_on_ranks, sampling_params
from spd_lightning.inference.evaluation.machine import machine
from spd_lightning.inference.profile import NOTES, profile_by_fill
from spd_lightning.modules.hub import WEIGHTS_FILE, locate_drafter

if TYPE_CHECKING:
    from spd_lightning.inference.decoder import PipelineDecoder
    from spd_lightning.inference.evaluation.journal import SampleJournal
    from spd_lightning.inference.evaluation.tasks import Question

METHODS_HELP = (
    "ar, compiled, generate (Transformers') and, of the drafters, spd, spd_post, ppsd, eagle3, and spd_tree, which drafts "
    "trees; ar and those of the drafters, without trees, unless given"
)
TASKS = ["mt_bench", "gsm8k", "humaneval"]
SUMMARY_FILE, TABLE_FILE, REPORT_FILE = "summary.json", "summary.md", "report.html"


def add_eval_arguments(parser: ArgumentParser) -> None:
    """The arguments of `spd-infer eval`."""
    add = parser.add_argument
    add("--drafter", type=str, nargs="+", required=True, help="drafter folders, all for one target")
    add("--out", type=Path, required=True, help="folder of the results; a run that was stopped goes on from it")
    add("--tasks", type=str, nargs="+", default=None, help=f"of {', '.join(TASKS)}; all, unless questions are given")
    add("--task_dir", type=Path | None, default=None, help="folder of the tasks' files; the hub when absent")
    add("--questions", type=Path | None, default=None, help="JSON lines of your own questions")
    add("--num_prompts", type=int, default=80, help="of each task, the first ones")
    add("--turns", type=str, choices=["first", "all"], default="first", help="of questions that have several")
    add("--methods", type=str, nargs="+", default=None, help=METHODS_HELP)
    add("--check_lossless", type=bool, default=False, help="exit with 3 if a greedy answer is not plain decoding's")
    add("--execute_code", type=bool, default=False, help="score HumanEval by running what the model wrote, confined")
    add("--wandb_project", type=str | None, default=None, help="log tables and figures to this W&B project")
    add_decoding_arguments(parser, several_temperatures=True)


def run_eval(given: Namespace, args: Sequence[str]) -> None:
    """Evaluates."""
    from spd_lightning.inference.evaluation.tasks import load_questions

    methods, drafters = check_arguments(given)
    tasks = given.tasks if given.tasks is not None else [] if given.questions else TASKS
    questions = load_questions(tasks, given.task_dir, given.questions, given.num_prompts)
    run_on_ranks(given, args, lambda: evaluate(given, args, methods, drafters, questions))


def check_arguments(given: Namespace) -> tuple[list[str], dict[str, str]]:
    """The methods to compare, and that of each drafter folder; raises `ValueError` for what cannot be evaluated."""
    from spd_lightning.inference.evaluation.methods import (
        chosen_methods,
        drafter_labels,
        drafter_methods,
        tree_shape_of,
    )

    if given.num_prompts < 1:
        raise ValueError(f"num_prompts={given.num_prompts}: at least one is needed")
    labels = drafter_labels(given.drafter)
    if len(set(labels)) < len(labels):
        raise ValueError(f"drafters {given.drafter} cannot be told apart by their folders' names: rename one")
    for temperature in given.temperature:
        sampling_params(given, temperature)
    if given.check_lossless and 0 not in given.temperature:
        raise ValueError("check_lossless compares greedy answers: --temperature needs 0")
    drafters = drafter_methods(given.drafter, given.target, given.runtime)
    if given.draft_length is not None and "eagle3" not in drafters.values():
        raise ValueError(f"draft_length={given.draft_length} is for EAGLE-3 drafters, and none is given: leave it out")
    methods = chosen_methods(given.methods, drafters, given.runtime, given.check_lossless)
    for method in drafters.values():
        tree_shape_of(method, methods, given.tree_width, given.refill_width)
    return methods, drafters


def evaluate(
    given: Namespace,
    args: Sequence[str],
    methods: Sequence[str],
    drafters: Mapping[str, str],
    questions: Sequence["Question"],
) -> None:
    """Answers with every drafter and writes what came out; on ranks other than the lead, helps."""
    from spd_lightning.inference.evaluation.journal import SampleJournal
    from spd_lightning.inference.evaluation.methods import drafter_labels, make_methods, tree_shape_of
    from spd_lightning.inference.evaluation.runner import PIPELINES, Evaluation

    journal: SampleJournal | None = None
    facts: dict[str, list[Any]] = {"skipped": [], "predicted": [], "profiles": []}
    for (folder, method), label in zip(drafters.items(), drafter_labels(list(drafters)), strict=True):
        own = given.clone()
        own.draft_length = given.draft_length if method == "eagle3" else None
        shape = tree_shape_of(method, methods, given.tree_width, given.refill_width)
        own.tree_width, own.refill_width = (None, None) if shape is None else (shape.width, shape.refill_width)
        with opened_decoder(own, folder) as decoder:
            if not decoder.is_lead:
                decoder.follow()
                continue
            if journal is None:
                journal = SampleJournal(given.out, settings(given, decoder, "eagle3" in drafters.values()))
            if shape is not None:
                journal.pin("shape of trees", f"{shape.width} wide, {shape.refill_width} while refilling")
            pin_files(journal, decoder, locate_drafter(folder), label, questions)
            seed = journal.seed(given.seed, lambda: sampling_params(given, 1.0).seed)
            evaluation = Evaluation(
                decoder,
                make_methods(methods, decoder, label, given.runtime, given.dtype),
                replace(sampling_params(given, 1.0), seed=seed),
                given.temperature,
                given.turns == "all",
                journal,
                make_score(given),
            )
            with tqdm(total=evaluation.count(questions), desc=label, unit="answer") as progress:
                for sample in evaluation.run(questions):
                    progress.update()
                    progress.set_postfix_str(f"{sample.task} {sample.method} T={sample.temperature:g}")
            facts["skipped"] += [item for item in evaluation.skipped if item not in facts["skipped"]]
            facts["predicted"] += predictions(given, decoder, label)
            if given.runtime != "distributed" and method in PIPELINES and method in methods:
                facts["profiles"] += profile_of(given, decoder, label, questions)
    if journal is not None:
        try:
            report(given, args, methods, journal, questions, facts)
        finally:
            journal.close()


def pin_files(
    journal: "SampleJournal", decoder: "PipelineDecoder", folder: Path, label: str, questions: Sequence["Question"]
) -> None:
    """Refuses a folder whose answers were made with another target, drafter or questions of the same names."""
    from spd_lightning.inference.evaluation.journal import file_fingerprint
    from spd_lightning.modules.target_files import target_fingerprint

    if (fingerprint := target_fingerprint(decoder.target_name)) is not None:
        journal.pin(f"target {decoder.target_name}", fingerprint)
    journal.pin(f"drafter {label}", file_fingerprint(folder / WEIGHTS_FILE))
    contents = [json.dumps([q.turns, q.reference, q.test], ensure_ascii=False) for q in questions]
    names = [f"{question.task} {question.question_id}" for question in questions]
    journal.pin_questions(list(zip(names, contents, strict=True)))


def settings(given: Namespace, decoder: "PipelineDecoder", in_rounds: bool) -> dict[str, Any]:
    """What all answers of a folder have in common; `in_rounds` if some come from an EAGLE-3 drafter."""
    from spd_lightning.inference.eagle.runtime import DRAFT_LENGTH

    names = ("max_new_tokens", "top_k", "top_p", "seed", "stop", "verify", "runtime", "dtype", "device", "max_length")
    return {
        "target": decoder.target_name,
        **{name: given[name] for name in names},
        "machine": {name: machine()[name] for name in ("processor", "gpus")},
        **({"draft_length": given.draft_length or DRAFT_LENGTH} if in_rounds else {}),
        "link": [given.link_us, given.link_gb_s, given.record_us] if given.runtime == "virtual" else None,
    }


def predictions(given: Namespace, decoder: "PipelineDecoder", label: str) -> list[dict[str, Any]]:
    """What the drafter's validation says of each temperature, where it has measured that."""
    from spd_lightning.inference.evaluation.formulas import predicted_acceptance

    metrics = decoder.drafter.record["provenance"]["metrics"]
    found = {t: predicted_acceptance(metrics, decoder.num_stages, sampling_params(given, t)) for t in given.temperature}
    names = {"method": decoder.drafter.module.config.method, "drafter": label}
    return [names | {"temperature": temperature} | known for temperature, known in found.items() if known is not None]


def profile_of(
    given: Namespace, decoder: "PipelineDecoder", label: str, questions: Sequence["Question"]
) -> list[dict[str, Any]]:
    """The cycle profile of the first question that fits, answered once more, in one process."""
    from spd_lightning.inference.runtime.local import LocalRuntime

    assert isinstance(decoder.runtime, LocalRuntime)
    params = replace(sampling_params(given, given.temperature[0]), max_new_tokens=min(given.max_new_tokens, 64))
    timer = decoder.runtime.start_timing()
    for question in questions:
        with suppress(ValueError):
            decoder.start_chain([{"role": "user", "content": question.turns[0]}], params).result()
        if profiles := profile_by_fill(decoder.runtime.times_of_ranks(timer), has_rest=given.runtime == "local"):
            fills = [profile.to_json() for profile in profiles]
            return [{"title": label, "note": NOTES[given.runtime], "fills": fills}]
    return []


def make_score(given: Namespace) -> Any:
    """Scores answers of GSM8K, and of HumanEval where code may be run."""
    from spd_lightning.inference.evaluation.execution import require_confinement, run_program
    from spd_lightning.inference.evaluation.scoring import humaneval_program, is_gsm8k_correct

    if given.execute_code:
        require_confinement()

    def score(question: "Question", text: str) -> bool | None:
        if question.task == "gsm8k" and question.reference is not None:
            return is_gsm8k_correct(text, question.reference)
        if question.test is not None and given.execute_code:
            return run_program(humaneval_program(question, text)).passed
        return None

    return score


def report(
    given: Namespace,
    args: Sequence[str],
    methods: Sequence[str],
    journal: "SampleJournal",
    questions: Sequence["Question"],
    facts: Mapping[str, Any],
) -> None:
    """Writes summary, table and page, prints the table, logs to W&B, and applies the losslessness gate.

    Of a folder that earlier commands have used, only what this one asks for counts.

    Raises:
        ValueError: if no question could be answered.
    """
    from spd_lightning.inference.evaluation.lossless import check_lossless
    from spd_lightning.inference.evaluation.methods import drafter_labels
    from spd_lightning.inference.evaluation.report import render_report
    from spd_lightning.inference.evaluation.summary import make_summary
    from spd_lightning.inference.evaluation.tables import to_markdown

    asked, labels = {(q.task, q.question_id) for q in questions}, (None, *drafter_labels(given.drafter))
    samples = journal.select(
        lambda sample: (
            sample.prompt[:2] in asked
            and (sample.turn == 0 or given.turns == "all")
            and sample.method in methods
            and sample.drafter in labels
            and sample.temperature in given.temperature
        )
    )
    if not samples:
        raise ValueError(f"no question could be answered; the first: {facts['skipped'][0]['error']}")
    summary = make_summary(
        samples,
        command=shlex.join(["spd-infer", *args]),
        settings={name: value for name, value in journal.settings.items() if name != "questions"},
        machine=machine(),
        versions={name: version(name) for name in ("spd-lightning", "torch", "transformers")},
        **facts,
    )
    table = to_markdown(summary)
    for name, content in (
        (SUMMARY_FILE, json.dumps(summary, indent=1, ensure_ascii=False) + "\n"),
        (TABLE_FILE, table),
        (REPORT_FILE, render_report(summary, samples)),
    ):
        write_whole(given.out / name, content)
    print(table)
    print(f"{given.out / REPORT_FILE} shows this as a page")
    if given.wandb_project is not None:
        log_to_wandb(given, summary)
    if given.check_lossless:
        check_lossless(samples)


def log_to_wandb(given: Namespace, summary: Mapping[str, Any]) -> None:
    """Logs the tables, the figures as the run's summary, and the page."""
    import wandb

    from spd_lightning.inference.evaluation.tables import logged_figures, logged_tables

    with wandb.init(project=given.wandb_project, job_type="eval", config=summary["settings"]) as run:
        for name, (columns, rows) in logged_tables(summary["groups"]).items():
            run.log({name: wandb.Table(columns=list[str | int](columns), data=rows)})  # pyright: ignore[reportArgumentType]
        run.log({"report": wandb.Html(str(given.out / REPORT_FILE), inject=False)})
        run.summary.update(logged_figures(summary["groups"]))
        if run.offline:
            print(f"wandb sync {run.dir.removesuffix('/files')}")

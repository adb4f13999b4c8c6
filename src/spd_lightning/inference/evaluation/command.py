"""`spd-infer eval`: drafters on benchmarks, beside baselines, as tables, a page and W&B. Knows arguments and files."""

import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace
from tqdm import tqdm

from spd_lightning.inference.arguments import add_decoding_arguments, opened_decoder, run_on_ranks, sampling_params
from spd_lightning.inference.profile import NOTES, profile_by_fill
from spd_lightning.modules.checkpoint import WEIGHTS_FILE

if TYPE_CHECKING:
    from spd_lightning.inference.decoder import PipelineDecoder
    from spd_lightning.inference.evaluation.journal import SampleJournal
    from spd_lightning.inference.evaluation.sample import Sample
    from spd_lightning.inference.evaluation.tasks import Question

METHODS_HELP = (
    "ar, compiled, generate (Transformers') and, of the drafters, spd, spd_post, ppsd; ar and those of the drafters, "
    "unless given"
)
TASKS = ["mt_bench", "gsm8k", "humaneval"]
SUMMARY_FILE, TABLE_FILE, REPORT_FILE = "summary.json", "summary.md", "report.html"
NOT_LOSSLESS = 3
"""Exit code of `--check_lossless` when a greedy answer is not plain decoding's."""


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

    methods = check_arguments(given)
    tasks = given.tasks if given.tasks is not None else [] if given.questions else TASKS
    questions = load_questions(tasks, given.task_dir, given.questions, given.num_prompts)
    run_on_ranks(given, args, lambda: evaluate(given, args, methods, questions))


def check_arguments(given: Namespace) -> list[str]:
    """The methods to compare; raises `ValueError` for what cannot be evaluated."""
    from spd_lightning.inference.evaluation.methods import chosen_methods, drafter_labels, drafter_methods

    if given.num_prompts < 1:
        raise ValueError(f"num_prompts={given.num_prompts}: at least one is needed")
    labels = drafter_labels(given.drafter)
    if len(set(labels)) < len(labels):
        raise ValueError(f"drafters {given.drafter} cannot be told apart by their folders' names: rename one")
    for temperature in given.temperature:
        sampling_params(given, temperature)
    return chosen_methods(given.methods, drafter_methods(given.drafter), given.runtime, given.check_lossless)


def evaluate(given: Namespace, args: Sequence[str], methods: Sequence[str], questions: Sequence["Question"]) -> None:
    """Answers with every drafter and writes what came out; on ranks other than the lead, helps."""
    from spd_lightning.inference.evaluation.journal import SampleJournal
    from spd_lightning.inference.evaluation.methods import drafter_labels, make_methods
    from spd_lightning.inference.evaluation.runner import Evaluation

    journal: SampleJournal | None = None
    skipped: list[Mapping[str, str]] = []
    predicted: list[dict[str, Any]] = []
    profiles: list[dict[str, Any]] = []
    for folder, label in zip(given.drafter, drafter_labels(given.drafter), strict=True):
        with opened_decoder(given, folder) as decoder:
            if not decoder.is_lead:
                decoder.follow()
                continue
            if journal is None:
                journal = SampleJournal(given.out, settings(given, decoder))
                if given.questions is not None:
                    journal.pin(f"questions {given.questions.stem}", given.questions)
            journal.pin(f"drafter {label}", Path(folder) / WEIGHTS_FILE)
            evaluation = Evaluation(
                decoder,
                make_methods(methods, decoder, label, given.runtime, given.dtype),
                sampling_params(given, 1.0),
                given.temperature,
                given.turns == "all",
                journal,
                make_score(given),
            )
            with tqdm(total=evaluation.count(questions), desc=label, unit="answer") as progress:
                for sample in evaluation.run(questions):
                    progress.update()
                    progress.set_postfix_str(f"{sample.task} {sample.method} T={sample.temperature:g}")
            skipped += [item for item in evaluation.skipped if item not in skipped]
            predicted += predictions(given, decoder, label)
            if given.runtime != "distributed" and decoder.drafter.module.config.method in methods:
                profiles += profile_of(given, decoder, label, questions)
    if journal is not None:
        report(given, args, journal, questions, skipped=skipped, predicted=predicted, profiles=profiles)


def settings(given: Namespace, decoder: "PipelineDecoder") -> dict[str, Any]:
    """What all answers of a folder have in common."""
    names = ("max_new_tokens", "top_k", "top_p", "seed", "stop", "verify", "runtime", "dtype", "device", "max_length")
    return {
        "target": decoder.target_name,
        **{name: given[name] for name in names},
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
    params = replace(sampling_params(given, given.temperature[0]), max_new_tokens=min(given.max_new_tokens, 64))
    timer = decoder.runtime.start_timing()
    for question in questions:
        with suppress(ValueError):
            decoder.generate([{"role": "user", "content": question.turns[0]}], params)
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
    journal: "SampleJournal",
    questions: Sequence["Question"],
    **facts: Any,
) -> None:
    """Writes summary, table and page, prints the table, logs to W&B, and applies the losslessness gate."""
    from spd_lightning.inference.evaluation.report import render_report
    from spd_lightning.inference.evaluation.summary import make_summary
    from spd_lightning.inference.evaluation.tables import to_markdown

    samples = journal.select((question.task, question.question_id) for question in questions)
    summary = make_summary(
        samples,
        command=shlex.join(["spd-infer", *args]),
        settings=journal.settings,
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
        scratch = given.out / f".{name}.part"
        scratch.write_text(content, encoding="utf-8")
        os.replace(scratch, given.out / name)
    print(table)
    print(f"{given.out / REPORT_FILE} shows this as a page")
    if given.wandb_project is not None:
        log_to_wandb(given, summary)
    if given.check_lossless:
        check_lossless(samples)


def check_lossless(samples: Sequence["Sample"]) -> None:
    """Raises `SystemExit` with code 3 if a greedy answer of a pipeline is not that of plain decoding."""
    greedy = [sample for sample in samples if sample.drafter is not None and sample.temperature == 0]
    different = [sample for sample in greedy if sample.first_difference is not None]
    if not different:
        print(f"lossless: {len(greedy)} of {len(greedy)} greedy answers are those of plain decoding")
        return
    for sample in different:
        first = sample.first_difference
        assert first is not None
        margin = "not recorded" if first["margin"] is None else f"{first['margin']:.3g}"
        print(
            f"{sample.task} {sample.question_id}: position {first['position']}: token {first['token']} instead of "
            f"{first['ar_token']}; margin of the two best logits {margin}",
            file=sys.stderr,
        )
    print(f"NOT lossless: {len(different)} of {len(greedy)} greedy answers differ", file=sys.stderr)
    raise SystemExit(NOT_LOSSLESS)


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": gpus,
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def processor_name() -> str:
    """The CPU's model where the system says so, else its architecture."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


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

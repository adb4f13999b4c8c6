"""`spd-infer plan` from its arguments to what it prints, on folders that hold a config.json only."""

import json

import pytest
from jsonargparse import ArgumentParser

from spd_lightning.inference.planning import measurement
from spd_lightning.inference.planning.command import STAGE_COUNTS, add_plan_arguments, make_report, run_plan
from spd_lightning.modules.checkpoint import drafter_record, save_drafter
from spd_lightning.modules.draft_vocab import DraftVocab
from spd_lightning.modules.features import FeatureLayout
from spd_lightning.modules.target import read_target_shape
from spd_lightning.modules.tiny_target import tiny_config
from tests.modules.conftest import make_drafter


def parse(*args: object):
    parser = ArgumentParser(allow_abbrev=False)
    add_plan_arguments(parser)
    return parser.parse_args([str(arg) for arg in args])


def printed(capsys, *args: object) -> str:
    run_plan(parse(*args))
    return capsys.readouterr().out


@pytest.fixture
def target(tmp_path):
    tiny_config("llama", num_layers=8).save_pretrained(tmp_path / "target")
    return tmp_path / "target"


@pytest.fixture
def drafter(tmp_path, target):
    """A drafter folder of three stages, without its weights: plans need none."""
    layout = FeatureLayout.build(8, 3, stage_layers=[4, 3, 1], anchors=[0, 4, 7], rows="shared")
    module = make_drafter(layout, intermediate_size=40)
    tokenizer = {"hash": "0" * 64, "num_tokens": 259}
    vocab = DraftVocab(tuple(module.draft_token_ids.tolist()))
    record = drafter_record(module.config, str(target), read_target_shape(str(target)), tokenizer, vocab, {})
    folder = tmp_path / "drafter"
    save_drafter(folder, {}, record)
    (folder / "drafter.safetensors").unlink()
    return folder


@pytest.mark.parametrize("name", ["4B", "9B"])
def test_qwen_is_planned_from_its_configuration_alone(capsys, qwen_folder, name):
    text = printed(capsys, "--target", qwen_folder(name))
    assert "ESTIMATED" in text
    assert "longer than a whole stage of the uniform split at n = 8, 12, 16" in " ".join(text.split())
    written = json.loads(printed(capsys, "--target", qwen_folder(name), "--json"))
    assert {plan["num_stages"] for plan in written["plans"]} == set(STAGE_COUNTS)
    best = {
        (plan["num_stages"], plan["split"]): plan["speedup"]
        for plan in sorted(written["plans"], key=lambda p: p["speedup"])
    }
    assert all(best[count, "balanced"] >= best[count, "uniform"] for count in STAGE_COUNTS if count < 16)
    # With 16 stages most cycles refill the pipeline, where the first stages are those that count: the balanced split's
    # are longer. A full cycle is shorter in any case.
    cycles = {
        (plan["num_stages"], plan["split"], plan["num_spec_layers"]): plan["cycle_ms"] for plan in written["plans"]
    }
    assert all(cycles[count, "balanced", 1] <= cycles[count, "uniform", 1] for count in STAGE_COUNTS)
    assert best[8, "balanced"] > 1.08 * best[8, "uniform"]
    assert written["best"]["split"] == "balanced"


def test_devices_bound_the_stages(qwen_folder):
    report = make_report(parse("--target", qwen_folder("4B"), "--devices", 5))
    assert sorted({plan.num_stages for plan in report.plans}) == [2, 3, 4]


def test_assumptions_reach_the_model(target):
    report = make_report(
        parse("--target", target, "--p", 0.5, "--overhead_ms", 2, "--link_ms", 3, "--bandwidth", 7, "--length", 20,
              "--max_length", 99, "--dtype", "bfloat16", "--schedule", "post_step", "--anchors", "[0,2]",
              "--draft_vocab_size", 11)
    )  # fmt: skip
    best = report.best
    prediction = best.prediction
    assert (prediction.p, prediction.overhead_ms, prediction.link_ms, prediction.schedule) == (
        0.5,
        2.0,
        3.0,
        "post_step",
    )
    assert (report.planner.target.length, report.planner.target.num_bytes) == (20, 2)
    assert report.planner.times.bandwidth == 7.0
    assert report.planner.assumed.max_length == 99
    assert best.drafter.layout.anchors == (0, 2)
    assert best.drafter.size.draft_vocab_size == 11
    assert {plan.num_spec_layers for plan in report.plans} == set(range(1, 9))


def test_defaults_follow_the_published_drafters(target, qwen_folder):
    small, large = make_report(parse("--target", target)), make_report(parse("--target", qwen_folder("4B")))
    assert small.best.drafter.size.draft_vocab_size == 264  # all of the target's rows
    assert large.best.drafter.size.draft_vocab_size == 50_000
    assert large.best.drafter.layout.anchors == (0, 8, 16, 24, 31)
    assert (large.planner.assumed.p, large.planner.options.schedule) == (0.8, "pre_step")
    assert large.planner.times.bandwidth == 4000.0


def test_a_drafter_is_planned_with_its_own_split_and_sizes(capsys, drafter, target):
    report = make_report(parse("--drafter", drafter))
    assert report.target_name == str(target)
    own = report.own
    assert own is not None
    assert (own.stage_layers, own.num_spec_layers, own.drafter.layout.anchors) == ((4, 3, 1), 2, (0, 4, 7))
    sizes = {plan.drafter.size.intermediate_size for plan in (own, *report.plans)}
    assert sizes == {40}
    assert {plan.drafter.size.draft_vocab_size for plan in report.plans} == {40}
    assert "drafter's" in printed(capsys, "--drafter", drafter, "--target", target)


def test_measured_plans_say_so(capsys, monkeypatch, target):
    monkeypatch.setattr(measurement, "REPEATS", 2)
    written = json.loads(printed(capsys, "--target", target, "--measure", "--json", "--length", 4, "--devices", 3))
    assert written["times"] == "measured"
    assert "MEASURED on this machine" in written["times_explained"]
    assert written["best"]["cycle_ms"] > 0


def test_flags_stand_alone_or_take_a_value():
    assert (parse("--measure").measure, parse("--measure", "false").measure, parse().measure) == (True, False, False)
    assert (parse("--json").json, parse("--json", "true").json, parse().json) == (True, True, False)


@pytest.mark.parametrize(
    "args, words",
    [
        ([], "give --target, --drafter or both"),
        (["--target", "TARGET", "--devices", 2], "devices=2: two stages and a drafter need 3"),
        (["--target", "TARGET", "--p", 1.5], "p=1.5"),
        (["--target", "TARGET", "--overhead_ms", -1], "overhead_ms=-1"),
        (["--target", "TARGET", "--bandwidth", 0], "bandwidth=0"),
        (["--target", "TARGET", "--measure", "--bandwidth", 7], "bandwidth=7 is for estimates"),
        (["--target", "TARGET", "--length", 0], "length=0: at least one token"),
        (["--target", "TARGET", "--max_length", 0], "max_length=0"),
        (["--target", "TARGET", "--anchors", "[1,2]"], "the first anchor must be 0"),
        (["--target", "TARGET", "--draft_vocab_size", 265], "draft_vocab_size=265: must be 1 to 264"),
        (["--target", "NOWHERE"], "config.json"),
        (["--drafter", "NOWHERE"], "no drafter here"),
        (["--drafter", "DRAFTER", "--schedule", "post_step"], "--schedule is fixed by the drafter"),
        (["--drafter", "DRAFTER", "--anchors", "auto"], "--anchors is fixed by the drafter"),
        (["--drafter", "DRAFTER", "--devices", 3], "devices=3: the drafter .* is for 3 stages, which need 4"),
        (["--drafter", "DRAFTER", "--target", "OTHER"], "is for a target of 8 layers of width 32, but .* has 6"),
    ],
)
def test_mistakes_are_refused_in_one_line(args, words, tmp_path, target, drafter):
    tiny_config("llama", num_layers=6).save_pretrained(tmp_path / "other")
    names = {"TARGET": target, "DRAFTER": drafter, "OTHER": tmp_path / "other", "NOWHERE": tmp_path / "nowhere"}
    with pytest.raises(ValueError, match=words):
        make_report(parse(*(names.get(arg, arg) for arg in args)))


@pytest.mark.parametrize("mistake", [["--anchors", "[0,9]"], ["--p", 2], ["--draft_vocab_size", 0]])
def test_mistakes_are_refused_before_anything_is_timed(monkeypatch, target, mistake):
    monkeypatch.setattr(measurement.MeasuredTimes, "_median_ms", lambda *_: pytest.fail("something was timed"))
    with pytest.raises(ValueError, match=mistake[0].removeprefix("--")):
        make_report(parse("--target", target, "--measure", *mistake))


def test_a_drafter_folder_that_contradicts_itself_is_refused(drafter):
    record = json.loads((drafter / "config.json").read_text())
    (drafter / "config.json").write_text(json.dumps(record | {"schedule": "post_step"}))
    with pytest.raises(ValueError, match="schedule='post_step'"):
        make_report(parse("--drafter", drafter))
    del record["drafter"]["anchors"]
    (drafter / "config.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="incomplete or from another version"):
        make_report(parse("--drafter", drafter))

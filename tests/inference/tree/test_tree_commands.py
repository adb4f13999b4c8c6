"""Trees from the command line: the same tokens as plain decoding, one table beside chains, and the mistakes of users."""

import json
from pathlib import Path

import pytest

from spd_lightning.inference.cli import main
from spd_lightning.inference.evaluation.lossless import check_lossless
from spd_lightning.inference.evaluation.methods import TREE_WIDTH, chosen_methods, tree_shape_of
from spd_lightning.inference.tree.schedule import TreeShape
from tests.inference.evaluation.synthetic import drafted
from tests.inference.folders import save_folders


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_folders(tmp_path_factory.mktemp("trees"), "llama", num_stages=2, name="own")[0]


@pytest.mark.parametrize("runtime", ["local", "virtual"])
def test_an_answer_by_trees_is_that_of_plain_decoding(runtime: str, drafter: str, capsys) -> None:
    main([
        *("generate", "--drafter", drafter, "--prompt", "Hi", "--max_new_tokens", "8", "--runtime", runtime),
        *("--tree_width", "3", "--refill_width", "4", "--max_length", "64", "--compare_ar", "true", "--json", "true"),
    ])  # fmt: skip
    report = json.loads(capsys.readouterr().out)
    assert report["identical_to_ar"] is True
    assert report["num_committed"] == report["num_judged"] == len(report["token_ids"]) - 1
    assert report["seconds"] > 0


def test_trees_stand_beside_chains_in_one_table(drafter: str, tmp_path: Path, capsys) -> None:
    questions = tmp_path / "own.jsonl"
    questions.write_text(json.dumps({"question_id": "one", "category": "x", "turns": ["What?"]}) + "\n")
    arguments = [
        *("eval", "--drafter", drafter, "--questions", str(questions), "--out", str(tmp_path / "out")),
        *("--max_new_tokens", "6", "--max_length", "100", "--methods", "ar", "spd", "spd_tree"),
    ]
    main([*arguments, "--check_lossless", "true"])
    printed = capsys.readouterr().out
    assert "lossless: 1 of 1 greedy answers are those of plain decoding" in printed
    assert "spd_tree: 1 of 1 greedy answers are those of plain decoding" in printed
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    groups = {group["method"]: group for group in summary["groups"] if group["task"] == "overall"}
    assert list(groups) == ["ar", "spd", "spd_tree"]
    assert groups["spd"]["cycle_deviation"] == 0 and groups["spd_tree"]["cycle_deviation"] is None
    assert groups["spd_tree"]["implied"] is None and groups["spd_tree"]["s0"] > 0
    assert summary["settings"]["files"]["shape of trees"] == f"{TREE_WIDTH} wide, {TREE_WIDTH} while refilling"
    with pytest.raises(SystemExit) as stopped:
        main([*arguments, "--tree_width", "2"])
    assert stopped.value.code == 2
    assert "made with another shape of trees" in capsys.readouterr().err


def test_near_ties_of_trees_are_reported_and_not_refused(capsys) -> None:
    first = {"position": 12, "token": 3, "ar_token": 4, "margin": 1e-5}
    check_lossless([drafted([True, False], method="spd_tree", identical_to_ar=False, first_difference=first)])
    printed = capsys.readouterr()
    assert "spd_tree: 0 of 1 greedy answers" in printed.out and "margin of the two best logits 1e-05" in printed.err
    with pytest.raises(SystemExit):
        check_lossless([drafted([True, False], method="spd", identical_to_ar=False, first_difference=first)])


def test_the_trees_of_an_evaluation_are_those_that_were_asked_for() -> None:
    assert tree_shape_of("spd", ["ar", "spd", "spd_tree"], None, 8) == TreeShape(4, 8)
    assert tree_shape_of("eagle3", ["eagle3", "spd_tree"], 3, None) is None
    assert tree_shape_of("ppsd", ["ppsd", "spd_tree"], 3, None) is None
    assert tree_shape_of("spd", ["spd"], None, None) is None
    with pytest.raises(ValueError, match="add it to --methods"):
        tree_shape_of("spd", ["spd"], 4, None)
    with pytest.raises(ValueError, match="tree_width=1 makes chains"):
        tree_shape_of("spd", ["spd_tree"], 1, None)
    assert chosen_methods(["ar", "spd_tree"], {"a": "spd"}, "local", True) == ["ar", "spd_tree"]
    with pytest.raises(ValueError, match="spd_tree: none of the drafters"):
        chosen_methods(["ar", "spd_tree"], {"a": "eagle3", "b": "spd_post"}, "local", False)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--tree_width", "0"), "tree_width=0: at least 1 is needed"),
        (("--tree_width", "4", "--refill_width", "2"), "refill_width=2 is less than tree_width=4"),
    ],
)
def test_mistakes_give_one_line_and_exit_2(more: tuple[str, ...], message: str, drafter: str, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["generate", "--drafter", drafter, "--prompt", "x", *more])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert message in error and len(error.strip().splitlines()) == 1


def test_one_stage_has_no_trees(tmp_path: Path, capsys) -> None:
    alone, _ = save_folders(tmp_path, "llama", num_stages=1, name="alone")
    with pytest.raises(SystemExit):
        main(["generate", "--drafter", alone, "--prompt", "x", "--tree_width", "2"])
    assert "with one stage nothing is in flight" in capsys.readouterr().err

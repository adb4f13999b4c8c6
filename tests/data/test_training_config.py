import pytest
import yaml

from spd_lightning.data.datamodule import DialogueDataModule
from spd_lightning.data.sources import Source
from spd_lightning.data.training_config import TrainingConfigParser

CONFIG = {
    "seed_everything": 1,
    "trainer": {"max_epochs": 3, "logger": {"class_path": "nowhere.Logger"}},
    "model": {"target": "some/target", "num_stages": 8, "lr": 1e-3},
    "data": {"sources": [{"path": "rows.jsonl", "weight": 2, "columns": {"prompt": "q", "response": "a"}}], "seed": 5},
    "ckpt_path": None,
}


@pytest.fixture
def parser():
    made = TrainingConfigParser.make("spd-data test", "A test.")
    made.add_argument("--model.target", type=str, required=True)
    made.add_class_arguments(DialogueDataModule, "data", skip={"layout", "target"}, instantiate=False)
    return made


@pytest.fixture
def write(tmp_path):
    def write(name="config.yaml", **changed):
        path = tmp_path / name
        path.write_text(yaml.safe_dump({**CONFIG, **changed}))
        return str(path)

    return write


def test_training_configuration_is_read_for_what_the_command_needs(parser, write):
    given = parser.parse(["--config", write()])
    assert given.model.target == "some/target"
    assert given.data.sources == [Source("rows.jsonl", weight=2.0, columns={"prompt": "q", "response": "a"})]
    assert given.data.seed == 5
    assert "trainer" not in given


def test_command_line_wins_wherever_it_stands(parser, write):
    for args in (["--data.seed", "7", "--config", write()], ["--config", write(), "--data.seed=7"]):
        given = parser.parse([*args, "--model.target=other"])
        assert (given.data.seed if args[0] == "--config" else 7, given.model.target) == (7, "other")


def test_later_files_win(parser, write):
    given = parser.parse(["--config", write(), "--config", write("two.yaml", data={"seed": 9})])
    assert given.data.seed == 9
    assert [source.path for source in given.data.sources] == ["rows.jsonl"]


@pytest.mark.parametrize("joined", [False, True])
def test_a_list_of_sources_replaces_the_one_before_whole(parser, write, joined):
    for key in ("sources", "val_sources"):
        both = {"data": {**CONFIG["data"], "val_sources": CONFIG["data"]["sources"]}}
        option, value = f"--data.{key}", '[{"path": "mine.jsonl"}]'
        args = [f"{option}={value}"] if joined else [option, value]
        given = parser.parse(["--config", write(**both), *args]).data
        assert getattr(given, key) == [Source("mine.jsonl")]
        other = "val_sources" if key == "sources" else "sources"
        assert [source.weight for source in getattr(given, other)] == [2.0]


def test_sources_of_a_later_file_replace_those_before_whole(parser, write):
    later = write("two.yaml", data={"sources": [{"path": "mine.jsonl"}]})
    assert parser.parse(["--config", write(), "--config", later]).data.sources == [Source("mine.jsonl")]


def test_a_field_of_a_source_is_changed_alone(parser, write):
    given = parser.parse(["--config", write(), "--data.sources.weight", "3"])
    assert given.data.sources == [Source("rows.jsonl", weight=3.0, columns={"prompt": "q", "response": "a"})]


def test_what_training_links_is_left_out(parser, write):
    linked = {**CONFIG["data"], "target": "some/target", "layout": None}
    assert parser.parse(["--config", write(data=linked)]).data.seed == 5


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--data.batch_siz", "4"], "batch_siz"),
        (["--data.batch_size", "many"], "data.batch_size"),
        (["--data.turns", "some"], "data.turns"),
        (["--model.num_stages", "4"], "num_stages"),
        (["--data.sources", '[{"path": "a", "wieght": 2}]'], "wieght"),
        (["--data.sources", '[{"path": "a", "weight": 0}]'], "weight=0"),
    ],
)
def test_faults_of_the_command_line_are_one_error(parser, write, args, message):
    with pytest.raises(ValueError, match=message):
        parser.parse(["--config", write(), *args])


def test_unknown_key_of_data_is_an_error(parser, write):
    with pytest.raises(ValueError, match="batchsize"):
        parser.parse(["--config", write(data={**CONFIG["data"], "batchsize": 3})])


def test_missing_values_are_named(parser):
    with pytest.raises(ValueError, match=r"model\.target, data\.sources"):
        parser.parse([])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a: [", "not a YAML file"),
        ("- a", "holds a list"),
        ("\x00", "not a YAML file"),
        ("!!python/object:os.x {}", "not a"),
    ],
)
def test_damaged_file_is_named(parser, tmp_path, content, message):
    path = tmp_path / "bad.yaml"
    path.write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        parser.parse(["--config", str(path)])
    assert str(path) in str(error.value)


def test_missing_file_is_named(parser, tmp_path):
    with pytest.raises(ValueError, match=r"absent\.yaml"):
        parser.parse(["--config", str(tmp_path / "absent.yaml")])

import pytest
from transformers.models.qwen3_5 import Qwen3_5Config

from spd_lightning.modules.target import FrozenTarget
from spd_lightning.modules.target_files import (
    locate_target,
    read_generation_config,
    read_model_config,
    read_target_json,
)
from spd_lightning.modules.tiny_target import tiny_config
from spd_lightning.modules.tokenizer import load_tokenizer


def test_generation_config_wins_over_the_model_configuration(tmp_path):
    (tmp_path / "config.json").write_text('{"eos_token_id": 3}')
    assert read_generation_config(tmp_path) == {"eos_token_id": 3}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [4, 5], "top_k": 20}')
    assert read_generation_config(tmp_path) == {"eos_token_id": [4, 5], "top_k": 20}


def test_eos_of_a_vision_wrapper_is_that_of_its_text_part(tmp_path):
    (tmp_path / "config.json").write_text('{"text_config": {"eos_token_id": 7}}')
    assert read_generation_config(tmp_path) == {"eos_token_id": 7}


def test_folder_without_either_says_nothing(tmp_path):
    assert read_generation_config(tmp_path) == {}
    assert read_target_json(tmp_path, "config.json") is None


@pytest.mark.parametrize(("content", "message"), [("{", "not JSON"), ("[1]", "JSON list"), (b"\xff\xfe", "not JSON")])
def test_damaged_file_is_named(tmp_path, content, message):
    path = tmp_path / "generation_config.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message) as error:
        read_generation_config(tmp_path)
    assert str(path) in str(error.value)


def test_model_configuration_has_the_defaults_of_its_family(tmp_path):
    tiny_config("qwen3_5", num_layers=8).save_pretrained(tmp_path)
    config = read_model_config(tmp_path)
    assert config["layer_types"].count("full_attention") == 2
    assert config["linear_conv_kernel_dim"] == 4
    assert config["dtype"] == "float32"


def test_missing_model_configuration_is_one_line(tmp_path):
    with pytest.raises(ValueError, match="give a local folder that holds config") as error:
        read_model_config(tmp_path / "absent")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("tied", [False, True])
def test_vision_wrapper_gives_its_text_part_and_says_whether_the_head_is_tied(tmp_path, tied):
    Qwen3_5Config(text_config={"num_hidden_layers": 8}, tie_word_embeddings=tied).save_pretrained(tmp_path)
    config = read_model_config(tmp_path)
    assert config["model_type"] == "qwen3_5_text"
    assert config["num_hidden_layers"] == 8
    assert config["tie_word_embeddings"] is tied


def test_a_tiny_random_target_is_made_once_and_loads(tmp_path, monkeypatch):
    monkeypatch.setenv("SPD_CACHE", str(tmp_path))
    folder = locate_target("tiny-random-llama")
    assert folder.startswith(str(tmp_path)) and locate_target("tiny-random-llama") == folder
    target = FrozenTarget.from_pretrained("tiny-random-llama")
    assert target.shape.family == "llama" and len(load_tokenizer("tiny-random-llama")) == 259
    assert read_generation_config("tiny-random-llama")["eos_token_id"] == 258
    assert list(tmp_path.joinpath("targets").iterdir()) == [tmp_path / "targets" / "tiny-random-llama"]


def test_an_unknown_tiny_target_is_refused_and_other_names_are_left_alone():
    assert locate_target("Qwen/Qwen3.5-4B") == "Qwen/Qwen3.5-4B"
    with pytest.raises(ValueError, match="there are tiny-random-qwen3_5, "):
        locate_target("tiny-random-gpt2")

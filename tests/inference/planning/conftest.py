"""Folders that hold the configuration of a published target and nothing else, and pieces of them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from spd_lightning.inference.planning.costs import TargetCosts
from spd_lightning.modules.model_size import read_target_size

QWEN = {
    "4B": {"hidden_size": 2560, "intermediate_size": 9216, "tie_word_embeddings": True},
    "9B": {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False},
}


@pytest.fixture(scope="session")
def qwen_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder with only the config.json of Qwen3.5-4B or 9B, which wraps that of the text model."""

    def make(name: str) -> Path:
        text = {
            "model_type": "qwen3_5_text",
            "dtype": "bfloat16",
            "vocab_size": 248_320,
            "num_hidden_layers": 32,
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            **QWEN[name],
        }
        config = {
            "model_type": "qwen3_5",
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "tie_word_embeddings": QWEN[name]["tie_word_embeddings"],
            "text_config": text,
        }
        folder = tmp_path_factory.mktemp(name)
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return folder

    return make


@pytest.fixture(scope="session")
def qwen_costs(qwen_folder) -> Callable[[str], TargetCosts]:
    """The pieces of Qwen3.5-4B or 9B in bfloat16 with 1,024 tokens of context."""
    return lambda name: TargetCosts(read_target_size(str(qwen_folder(name))), "auto", 1024)

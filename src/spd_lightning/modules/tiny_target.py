"""Tiny random targets of every supported family, made on the spot: for debugging runs and tests.

Their weights are noise: what a drafter learns of them means nothing. Knows no drafter.
"""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, PreTrainedTokenizerFast, Qwen3Config
from transformers.models.qwen3_5 import Qwen3_5TextConfig

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
NUM_TOKENS = 256 + len(CONTROL_TOKENS)
PADDED_VOCAB = 264
"""Head rows: a few more than tokens, as in Qwen3.5's own vocabulary."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_config(family: str, num_layers: int = 8, **overrides: Any) -> Any:
    """A Transformers configuration of the family's exact architecture at toy width.

    Args:
        family: `qwen3_5` (three Gated DeltaNet layers to one of full attention), `qwen3` or `llama`.
        num_layers: decoder layers.
        overrides: further keys of the configuration.
    """
    common: dict[str, Any] = dict(
        vocab_size=PADDED_VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        eos_token_id=CONTROL_TOKENS.index("<|im_end|>") + 256,
        bos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    if family == "qwen3_5":
        linear = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8)
        hybrid: Any = Qwen3_5TextConfig
        return hybrid(**common | linear | overrides)
    config_class: Any = {"qwen3": Qwen3Config, "llama": LlamaConfig}[family]
    return config_class(**common | overrides)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, three control tokens and a ChatML template: it can spell any text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = cast(Any, pre_tokenizers.ByteLevel(add_prefix_space=False))
    backend.decoder = cast(Any, decoders.ByteLevel())
    backend.add_special_tokens([AddedToken(token, special=True) for token in CONTROL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def random_model(config: Any, seed: int = 0, scale: float = 0.15) -> Any:
    """A causal language model with random weights, spread widely enough that its tokens differ."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                torch.nn.init.normal_(parameter, std=scale)
            elif "norm" in name:
                parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def save_tiny_target(folder: Path, family: str, num_layers: int = 8, **overrides: Any) -> Path:
    """A complete Transformers folder: weights, configuration, tokenizer; it appears whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    model = random_model(tiny_config(family, num_layers, **overrides))
    model.generation_config = GenerationConfig(eos_token_id=model.config.eos_token_id)
    model.save_pretrained(scratch)
    byte_tokenizer().save_pretrained(scratch)
    try:
        os.rename(scratch, folder)
    except OSError:  # another process was first; both made the same
        shutil.rmtree(scratch)
        if not folder.is_dir():
            raise
    return folder

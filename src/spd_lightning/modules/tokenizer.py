"""The target's tokenizer: loading, identity, end-of-sequence ids and control tokens.

Knows no dialogues and no models. Importing it is cheap: Transformers is imported when a tokenizer is loaded.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spd_lightning.modules.hub import offline_when_unreachable
from spd_lightning.modules.target_files import locate_target

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_MODEL_MARK = '"model":{'  # inside a string its quotes would be escaped
_IDENTITY_KEYS = ("normalizer", "pre_tokenizer", "model", "added_tokens")


def load_tokenizer(name_or_path: str | Path, revision: str | None = None) -> "PreTrainedTokenizerBase":
    """The fast tokenizer of a local model folder or of a hub id.

    Raises:
        ValueError: one line that says what was looked for, where, and how to point to a local folder.
    """
    from transformers import AutoTokenizer

    name = locate_target(name_or_path)
    folder = Path(name).expanduser()
    if folder.is_dir():
        place = f"the local folder {folder.resolve()}"
    elif folder.exists():
        raise ValueError(f"tokenizer {name!r}: that is a file; give the folder that holds tokenizer.json")
    elif not _HUB_ID.fullmatch(name):
        raise ValueError(f"tokenizer {name!r}: there is no such local folder, and it is no hub id (owner/name)")
    else:
        place = f"the hub, as there is no local folder {folder.resolve()}"
    try:
        with nullcontext() if folder.is_dir() else offline_when_unreachable():
            tokenizer = AutoTokenizer.from_pretrained(str(folder) if folder.is_dir() else name, revision=revision)
    except (OSError, ValueError, KeyError, ImportError, AttributeError, TypeError) as error:
        raise ValueError(
            f"tokenizer of {name!r}: not found in {place} ({_first_line(error)}); "
            "give a local folder that holds tokenizer.json and tokenizer_config.json"
        ) from error
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(f"tokenizer of {name!r}: {type(tokenizer).__name__} has no fast version (tokenizer.json)")
    return tokenizer


def tokenizer_fingerprint(tokenizer: "PreTrainedTokenizerBase") -> str:
    """SHA-256 of what decides the token ids of a text: vocabulary, merges, normaliser, splitting, added tokens.

    It does not depend on the name or folder, on padding and truncation settings, or on the chat template.
    """
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"{type(tokenizer).__name__} of {tokenizer.name_or_path!r} is no fast tokenizer")
    # The model (vocabulary and merges) comes last. It is hashed as it is written, since to parse it takes seconds.
    head, mark, model = backend.to_str().partition(_MODEL_MARK)
    state = json.loads(f'{head}"model":null}}') if mark else json.loads(head)
    return _sha256({key: state.get(key) for key in _IDENTITY_KEYS} | {"model_text": model})


def template_fingerprint(tokenizer: "PreTrainedTokenizerBase") -> str:
    """SHA-256 of the chat template and of the special tokens that it can name."""
    special = {key: str(value) for key, value in tokenizer.special_tokens_map.items()}
    return _sha256({"template": tokenizer.chat_template, "special": special})


def tokenizer_record(tokenizer: "PreTrainedTokenizerBase", eos_token_ids: Sequence[int]) -> dict[str, Any]:
    """What identifies the tokenizer that a drafter is made for, as its folder says it."""
    return {
        "num_tokens": len(tokenizer),
        "hash": tokenizer_fingerprint(tokenizer),
        "template_hash": template_fingerprint(tokenizer),
        "eos_token_ids": list(eos_token_ids),
    }


def eos_token_ids(
    tokenizer: "PreTrainedTokenizerBase", generation_config: Mapping[str, Any] | None = None
) -> tuple[int, ...]:
    """The ids that end an answer, ascending: the union of the tokenizer's and of `generation_config.json`'s.

    Raises:
        ValueError: if there is none, or one that the tokenizer does not have.
    """
    configured = (generation_config or {}).get("eos_token_id")
    ids: list[Any] = list(configured) if isinstance(configured, list | tuple) else [configured]
    ids = [token_id for token_id in (*ids, tokenizer.eos_token_id) if token_id is not None]
    if not ids:
        raise ValueError("no end-of-sequence token: neither the tokenizer nor generation_config.json has eos_token_id")
    for token_id in ids:
        if not isinstance(token_id, int) or not 0 <= token_id < len(tokenizer):
            raise ValueError(f"eos_token_id {token_id!r} must be one of the tokenizer's {len(tokenizer)} ids")
    return tuple(sorted(set(ids)))


def render_prompt(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Mapping[str, str]]) -> str:
    """The prompt that asks for the next answer, thinking off: the one rule of training and serving.

    Args:
        messages: `{role, content}` of the turns so far.

    Raises:
        ValueError: if the tokenizer has no chat template.
        jinja2.exceptions.TemplateError: if the template refuses these turns.
    """
    return _render(tokenizer, messages, add_generation_prompt=True)


def render_dialogue(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Mapping[str, str]]) -> str:
    """All turns as the template writes them, thinking off, with nothing after the last; errors as `render_prompt`."""
    return _render(tokenizer, messages, add_generation_prompt=False)


def token_ids(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """The ids of a rendered text, to which nothing is added."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]  # pyright: ignore[reportReturnType]


def control_tokens(tokenizer: "PreTrainedTokenizerBase") -> tuple[str, ...]:
    """Texts that the tokenizer turns into a control token wherever they stand, the longest first.

    These are its special tokens, and added tokens that look like control tokens (`<|fim_prefix|>`) or are written by
    the chat template (`<think>`, `<tool_call>`). Other added tokens (runs of spaces, HTML tags) are ordinary text.
    """
    template = json.dumps(tokenizer.chat_template)
    texts = set(tokenizer.all_special_tokens)
    for token in tokenizer.added_tokens_decoder.values():
        text = token.content
        if token.special or (text[:2] == "<|" and text[-2:] == "|>"):
            texts.add(text)
        elif text[:1] == "<" and text[-1:] == ">" and json.dumps(text)[1:-1] in template:
            texts.add(text)
    return tuple(sorted((text for text in texts if text.strip()), key=lambda text: (-len(text), text)))


def _render(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Mapping[str, str]], add_generation_prompt: bool
) -> str:
    if not tokenizer.chat_template:
        raise ValueError(
            f"the tokenizer of {tokenizer.name_or_path!r} has no chat template, so it cannot read dialogues: "
            "take an instruction-tuned target, or train on plain text (`format: text`)"
        )
    return tokenizer.apply_chat_template(  # pyright: ignore[reportReturnType]
        [dict(message) for message in messages],
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
        enable_thinking=False,
    )


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _sha256(value: object) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()

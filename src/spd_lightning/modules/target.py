"""The frozen target: the only file that knows Hugging Face model internals. Knows no drafter and no ranks."""

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from jaxtyping import Float, Int
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from spd_lightning.modules.hub import offline_when_unreachable
from spd_lightning.modules.target_files import locate_target

FAMILIES = {"qwen3_5": "qwen3_5", "qwen3_5_text": "qwen3_5", "qwen3": "qwen3", "llama": "llama"}
"""Transformers' `model_type` of each supported target, and the family it belongs to."""

GAIN_OFFSETS = {"qwen3_5": 1.0, "qwen3": 0.0, "llama": 0.0}
"""What each family adds to a stored norm weight `w` before it is applied (Qwen3.5 applies `1 + w`)."""

LOADING_ERRORS = (
    OSError, ValueError, KeyError, AttributeError, TypeError, RuntimeError, SafetensorError, StrictDataclassError
)  # fmt: skip
"""What Transformers raises for configurations and weights that are damaged or do not fit each other."""

FAST_RECURRENCE = {"fla": "flash-linear-attention", "causal_conv1d": "causal-conv1d"}
"""Modules that Transformers runs Gated DeltaNet layers with where they are installed, and their packages."""

TargetDtype = Literal["auto", "float32", "bfloat16", "float16", "float64"]


@dataclass(frozen=True)
class TargetShape:
    """What a target's configuration says of its size; read without weights."""

    family: str
    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    tied: bool
    revision: str | None


@dataclass(frozen=True)
class TargetStates:
    """One target forward.

    Attributes:
        anchors: raw residual streams `H^b`, one per anchor asked for, each `batch seq dim`.
        last: the final-normed last state, `batch seq dim`; head rows times it are logits.
    """

    anchors: tuple[Float[Tensor, "batch seq dim"], ...]
    last: Float[Tensor, "batch seq dim"]


def expect_reference_code(device: torch.device | str) -> None:
    """On a CPU: Transformers no longer says of each recurrent operation that the kernels of GPUs are not installed."""
    if torch.device(device).type == "cpu":
        logging.getLogger("transformers.integrations.hub_kernels").addFilter(is_no_fallback)


def is_no_fallback(record: logging.LogRecord) -> bool:
    """Whether a message of Transformers is about something else."""
    return "is falling back to its reference" not in record.getMessage()


@contextmanager
def explained_loading(name_or_path: str, what: str) -> Iterator[None]:
    """Turns a loader's failure into one line: what was looked for, where, and the way out."""
    try:
        with offline_when_unreachable():
            yield
    except LOADING_ERRORS as error:
        first_line = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
        if "ignore_mismatched_sizes" in first_line:  # Transformers' way of saying so
            first_line = "the weights do not have the sizes that its config.json states"
        raise ValueError(
            f"cannot load {what} of {name_or_path!r} (looked for a local folder, then on the Hugging Face Hub): "
            f"{first_line}. Point to a local folder that holds it, or check the id and the network"
        ) from error


def read_target_shape(name_or_path: str) -> TargetShape:
    """The target's sizes from its `config.json`.

    Raises:
        ValueError: if it cannot be reached, or its family is not supported.
    """
    with explained_loading(name_or_path, "the configuration"):
        config = AutoConfig.from_pretrained(locate_target(name_or_path))
    return target_shape(config, name_or_path)


def is_tied(config: Any) -> bool:
    """Whether the head is the embedding; a vision wrapper may say so for its text part or in the text part itself."""
    return bool(config.tie_word_embeddings or config.get_text_config().tie_word_embeddings)


def target_shape(config: Any, name_or_path: str) -> TargetShape:
    """The sizes in a loaded Transformers configuration, of the text part where there are several."""
    text = config.get_text_config()
    if text.model_type not in FAMILIES:
        raise ValueError(
            f"target {name_or_path!r} is of type {text.model_type!r}, which is not supported; "
            f"supported are {', '.join(sorted(set(FAMILIES)))} (Qwen3.5, dense Qwen3 and Llama-family text models)"
        )
    return TargetShape(
        family=FAMILIES[text.model_type],
        model_type=text.model_type,
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        intermediate_size=text.intermediate_size,
        num_heads=text.num_attention_heads,
        num_kv_heads=text.num_key_value_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        vocab_size=text.vocab_size,
        rms_norm_eps=text.rms_norm_eps,
        tied=is_tied(config),
        revision=getattr(config, "_commit_hash", None),
    )


class FrozenTarget:
    """A target in `eval()` without gradients. Not a module, so that it never reaches a checkpoint or an optimizer."""

    def __init__(self, model: PreTrainedModel, shape: TargetShape, name: str) -> None:
        self.model = model.eval().requires_grad_(False)
        # Whoever generates says how: a checkpoint's own settings (a repetition penalty, say) would change the law.
        self.model.generation_config = GenerationConfig()
        self.shape = shape
        self.name = name

    @classmethod
    def from_pretrained(
        cls, name_or_path: str, dtype: TargetDtype = "auto", device: torch.device | str = "cpu"
    ) -> "FrozenTarget":
        """Loads the text model from a folder or a hub id.

        Args:
            name_or_path: a Transformers folder or hub id; vision-wrapped Qwen3.5 checkpoints give their text part.
            dtype: of the weights; `auto` keeps the checkpoint's.
            device: where the weights go.

        Raises:
            ValueError: if it cannot be loaded or its family is not supported.
        """
        with explained_loading(name_or_path, "the configuration"):
            config = AutoConfig.from_pretrained(locate_target(name_or_path))
        shape = target_shape(config, name_or_path)
        text = config.get_text_config()
        text.tie_word_embeddings = shape.tied
        with explained_loading(name_or_path, "the weights"):
            model, report = cast(Any, AutoModelForCausalLM).from_pretrained(
                locate_target(name_or_path),
                config=text,
                dtype="auto" if dtype == "auto" else getattr(torch, dtype),
                output_loading_info=True,
            )
        if missing := sorted(report["missing_keys"]):
            raise ValueError(
                f"target {name_or_path!r} lacks {len(missing)} weights ({', '.join(missing[:3])}, ...), which would be "
                "random: the checkpoint is incomplete, download it again"
            )
        if shape.tied:  # also when the file has a head of its own, which Transformers would then keep
            model.lm_head.weight = model.get_input_embeddings().weight
        expect_reference_code(device)
        return cls(cast(Any, model).to(device), shape, name_or_path)

    @property
    def head_weight(self) -> Float[Tensor, "vocab dim"]:
        return cast(nn.Linear, self.model.lm_head).weight

    def head_rows(self, token_ids: Int[Tensor, " draft_vocab"]) -> Float[Tensor, "draft_vocab dim"]:
        """Rows of the head; `ValueError` if it has none for an id, as when the tokenizer has more tokens than it."""
        if int(token_ids.max()) >= len(self.head_weight):
            raise ValueError(
                f"the draft vocabulary has token id {int(token_ids.max())}, but the head of target {self.name!r} has "
                f"{len(self.head_weight)} rows: make data.draft_vocab_size smaller, or give data.draft_vocab"
            )
        return self.head_weight[token_ids.to(self.head_weight.device)]

    @property
    def final_norm_gain(self) -> Float[Tensor, " dim"]:
        """The factor that the final norm applies, whatever form the family stores it in."""
        weight = cast(Tensor, cast(Any, self.model).model.norm.weight)
        return weight.float() + GAIN_OFFSETS[self.shape.family]

    def compile_layers(self) -> None:
        """Has `torch.compile` make one program for the layers of each kind, for sequences of any length.

        Layer by layer, so that it takes a minute whatever the depth, and the anchors are read between programs. The
        reference code of Gated DeltaNet is a loop over the sequence, a program for every length: there the MLP only.
        """
        body = cast(Any, self.model).model
        kinds = getattr(body.config, "layer_types", None) or ["full_attention"] * len(body.layers)
        is_fast = not self._missing_kernels()
        for layer, kind in zip(body.layers, kinds, strict=True):
            part = layer if is_fast or kind == "full_attention" else layer.mlp
            part.forward = torch.compile(part.forward, dynamic=True)

    def warn_of_slow_layers(self) -> None:
        """Says, on a GPU, that Gated DeltaNet layers run by the slow reference code where no fast one is installed."""
        missing = self._missing_kernels()
        if missing and self.shape.family == "qwen3_5" and self.head_weight.is_cuda:
            warnings.warn(
                f"{' and '.join(missing)} not installed: the target's Gated DeltaNet layers run by reference code, "
                "several times slower; pip install -e '.[gpu]'",
                stacklevel=2,
            )

    @staticmethod
    def _missing_kernels() -> list[str]:
        return [package for module, package in FAST_RECURRENCE.items() if find_spec(module) is None]

    @torch.no_grad()
    def forward(
        self, input_ids: Int[Tensor, "batch seq"], attention_mask: Int[Tensor, "batch seq"], anchors: Sequence[int]
    ) -> TargetStates:
        """States at the anchors and before the head, of right-padded sequences.

        The states come from hooks on the embedding and the decoder layers: `H^L`, too, is the raw stream, while
        Transformers' own tuple has it normed. No LM head is run.

        Args:
            input_ids: token ids; every id must be below the vocabulary size.
            attention_mask: 1 at real tokens; padding is on the right.
            anchors: layer counts `b` whose `H^b` is wanted, `0` being the embedding.
        """
        body = cast(Any, self.model).model
        taken: dict[int, Tensor] = {}

        def take(anchor: int):
            def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
                taken[anchor] = output[0] if isinstance(output, tuple) else output

            return hook

        sources = {anchor: body.embed_tokens if anchor == 0 else body.layers[anchor - 1] for anchor in anchors}
        handles = [module.register_forward_hook(take(anchor)) for anchor, module in sources.items()]
        # Every supported family is causal, so a real token never sees the padding to its right; only recurrent
        # layers are handed the mask, which keeps padding out of their state.
        mask = attention_mask if self.shape.family == "qwen3_5" and not bool(attention_mask.all()) else None
        try:
            last = body(input_ids=input_ids, attention_mask=mask, use_cache=False).last_hidden_state
        finally:
            for handle in handles:
                handle.remove()
        return TargetStates(anchors=tuple(taken[anchor] for anchor in anchors), last=last)

    @torch.no_grad()
    def generate(
        self,
        input_ids: Int[Tensor, "batch prompt"],
        attention_mask: Int[Tensor, "batch prompt"],
        max_new_tokens: int,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        eos_token_ids: Sequence[int] = (),
        pad_token_id: int = 0,
        streamer: Any = None,
    ) -> Int[Tensor, "batch seq"]:
        """Transformers' own `generate` on left-padded prompts; rows that end early are filled with `pad_token_id`.

        Of a single sequence, `streamer.put` is given the prompt and then each token as soon as it is there.
        """
        sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p} if do_sample else {}
        return cast(Any, self.model).generate(
            input_ids=input_ids,
            attention_mask=attention_mask,
            max_new_tokens=max_new_tokens,
            do_sample=do_sample,
            eos_token_id=list(eos_token_ids) or None,
            pad_token_id=pad_token_id,
            streamer=streamer,
            **sampling,
        )

"""Plain decoding by the stages says what Transformers' `generate` says: a second opinion that shares none of our loops.

Its cache lies in memory in another way, so no bits are promised: tokens are compared exactly, logits with a tolerance. A
different token is reported with the margin of the two best logits, which tells a near-tie from a mistake.
"""

import pytest
import torch
from torch import Tensor

from spd_lightning.inference.autoregressive import decode_autoregressively
from spd_lightning.inference.stopping import StopCondition
from spd_lightning.inference.verify import make_verifier
from spd_lightning.modules.features import FeatureLayout
from spd_lightning.modules.target import FrozenTarget
from spd_lightning.modules.tiny_target import NUM_TOKENS
from tests.inference.conftest import GREEDY, TOKENIZER, RecordingVerifier, cut
from tests.modules.conftest import make_target

PROMPTS = [[65], [72, 105], list(range(60, 71)), list(range(20, 100))]
NEW = 24
# Qwen3.5 runs its delta rule in float32 whatever the model's dtype.
TOLERANCES = {
    ("llama", torch.float64): 1e-10,
    ("qwen3", torch.float64): 1e-10,
    ("qwen3_5", torch.float64): 1e-4,
    ("llama", torch.float32): 1e-4,
    ("qwen3", torch.float32): 1e-4,
    ("qwen3_5", torch.float32): 1e-3,
}


def target_of(family: str, dtype: torch.dtype) -> FrozenTarget:
    """Without padding rows, which `generate` would take for tokens."""
    return make_target(family, 8, dtype, vocab_size=NUM_TOKENS)


def generated(target: FrozenTarget, prompt: list[int], eos: list[int] | None = None) -> tuple[list[int], list[Tensor]]:
    """The tokens of `generate`, and the head's output behind each; its own `logits` are rounded to float32."""
    ids, logits = torch.tensor([prompt]), []
    hook = target.model.lm_head.register_forward_hook(lambda _module, _inputs, output: logits.append(output[0, -1]))
    sequence = target.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=NEW,
        eos_token_id=eos,
        pad_token_id=0,
    )
    hook.remove()
    return sequence[0, len(prompt) :].tolist(), logits


def decoded(target: FrozenTarget, prompt: list[int], eos: list[int] | None = None) -> tuple[list[int], list[Tensor]]:
    """The tokens of plain decoding by four stages, and the logits behind each."""
    verifier = RecordingVerifier(make_verifier(GREEDY, NUM_TOKENS))
    stop = StopCondition(eos or (), NEW, (), TOKENIZER)
    stages = cut(target, FeatureLayout.build(8, 4))
    tokens = list(decode_autoregressively(stages, verifier, prompt, stop))
    return tokens, [verifier.logits[position] for position in sorted(verifier.logits)]


def first_difference(ours: list[int], theirs: list[int], logits: list[Tensor]) -> str | None:
    """Where two texts part, and the margin of the two best logits there; none if they are equal."""
    for index, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            best, second = logits[index].double().topk(2).values.tolist()
            return f"token {index}: {one}, but generate has {other}; top-2 margin {best - second:.3g}"
    return None if len(ours) == len(theirs) else f"{len(ours)} tokens, but generate has {len(theirs)}"


@pytest.mark.parametrize(("family", "dtype"), TOLERANCES, ids=str)
def test_generate_gives_the_same_tokens(family: str, dtype: torch.dtype) -> None:
    target, seen = target_of(family, dtype), set()
    for prompt in PROMPTS:
        (ours, our_logits), (theirs, their_logits) = decoded(target, prompt), generated(target, prompt)
        assert first_difference(ours, theirs, our_logits) is None
        assert len(ours) == NEW
        seen |= set(ours)
        for one, other in zip(our_logits, their_logits, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCES[family, dtype])
    assert len(seen) > 5


def test_generate_ends_at_the_same_end_of_sequence_token() -> None:
    target = target_of("qwen3", torch.float64)
    endless, _ = decoded(target, PROMPTS[2])
    eos = [endless[7], NUM_TOKENS - 1]
    ours, logits = decoded(target, PROMPTS[2], eos)
    assert first_difference(ours, generated(target, PROMPTS[2], eos)[0], logits) is None
    assert ours == endless[: endless.index(eos[0]) + 1]


def test_a_difference_is_reported_with_its_margin() -> None:
    logits = [torch.tensor([0.0, 2.0, 1.5])] * 3
    assert first_difference([1, 1, 1], [1, 1, 1], logits) is None
    assert first_difference([1, 1, 1], [1, 2, 0], logits) == "token 1: 1, but generate has 2; top-2 margin 0.5"
    assert first_difference([1, 1], [1, 1, 1], logits) == "2 tokens, but generate has 3"

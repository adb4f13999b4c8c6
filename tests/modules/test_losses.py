"""The chunked losses against their definition on whole logits, values and gradients."""

import pytest
import torch
import torch.nn.functional as F

from spd_lightning.modules import losses
from spd_lightning.modules.losses import TargetHead, distillation_loss, full_argmax, log_normalizers

VOCAB, TOKENS, DIM, POSITIONS = 50, 47, 16, 23
DRAFT_IDS = torch.tensor([0, 3, 4, 9, 17, 30, 46])


@pytest.fixture
def case():
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weight = normal(VOCAB, DIM)
    weight[TOKENS:] *= 100  # padding rows would win every argmax if they were not cut off
    head = TargetHead(weight, weight[DRAFT_IDS], TOKENS)
    return (
        normal(POSITIONS, DIM).requires_grad_(),
        normal(len(DRAFT_IDS), DIM).requires_grad_(),
        normal(POSITIONS, DIM),
        head,
    )


def whole_loss(name, drafter_states, draft_head, target_states, head) -> torch.Tensor:
    """By the definitions of design §4, on full logits."""
    q = F.softmax(drafter_states @ draft_head.T, dim=-1)
    full = F.softmax(target_states @ head.weight[:TOKENS].T, dim=-1)
    restricted = full[:, DRAFT_IDS]
    p = restricted / restricted.sum(dim=-1, keepdim=True)
    if name == "kl":
        return (p * (p / q).log()).sum()
    if name == "reverse_kl":
        return (q * (q / p).log()).sum()
    everywhere = torch.zeros_like(full)
    everywhere[:, DRAFT_IDS] = q
    return 0.5 * (full - everywhere).abs().sum()  # the total variation distance itself


@pytest.mark.parametrize("name", ["kl", "reverse_kl", "tv"])
@pytest.mark.parametrize("chunk_elements", [1, 7 * 5, 10**6])
def test_chunked_loss_is_the_definition(name: str, chunk_elements: int, case, monkeypatch) -> None:
    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", chunk_elements)
    drafter_states, draft_head, target_states, head = case
    chunked = distillation_loss(name, drafter_states, draft_head, target_states, head)
    whole = whole_loss(name, drafter_states, draft_head, target_states, head)
    torch.testing.assert_close(chunked, whole, rtol=0, atol=1e-10)
    inputs = (drafter_states, draft_head)
    for ours, theirs in zip(torch.autograd.grad(chunked, inputs), torch.autograd.grad(whole, inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


def test_argmax_and_normaliser_are_over_the_tokens_only(case, monkeypatch) -> None:
    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", 100)
    _, _, target_states, head = case
    logits = target_states @ head.weight.T
    assert (logits.argmax(dim=-1) >= TOKENS).any()
    assert torch.equal(full_argmax(head, target_states), logits[:, :TOKENS].argmax(dim=-1))
    torch.testing.assert_close(log_normalizers(head, target_states), logits[:, :TOKENS].logsumexp(dim=-1))


def test_no_chunk_holds_the_logits_of_the_whole_batch(case, monkeypatch) -> None:
    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", 2 * len(DRAFT_IDS))
    seen: list[int] = []
    monkeypatch.setitem(
        losses.LOSSES, "kl", lambda draft, target, _: seen.append(len(draft)) or losses.kl_loss(draft, target, None)
    )
    drafter_states, draft_head, target_states, head = case
    distillation_loss("kl", drafter_states, draft_head, target_states, head).backward()
    assert max(seen) == 2
    assert len(seen) == 2 * 12  # each chunk once in the forward and again in the backward pass


@pytest.mark.parametrize("name", ["kl", "reverse_kl", "tv"])
def test_16_bit_logits_meet_their_softmax_in_float32(name: str, case) -> None:
    drafter_states, draft_head, target_states, head = (x.bfloat16() if isinstance(x, torch.Tensor) else x for x in case)
    narrow = TargetHead(head.weight.bfloat16(), head.draft_rows.bfloat16(), TOKENS)
    assert narrow.logits(target_states).dtype == narrow.draft_logits(target_states).dtype == torch.float32
    loss = distillation_loss(name, drafter_states, draft_head, target_states, narrow)
    draft_logits = (drafter_states @ draft_head.T).float()
    expected = losses.LOSSES[name](
        draft_logits, narrow.draft_logits(target_states), narrow.logits(target_states).logsumexp(-1)
    )
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected)


def test_autocast_leaves_the_target_logits_alone(case) -> None:
    _, _, target_states, head = case
    narrow = TargetHead(head.weight.float(), head.draft_rows.float(), TOKENS)
    with torch.autocast("cpu", torch.bfloat16):
        inside = narrow.logits(target_states.float()), narrow.draft_logits(target_states.float())
    outside = narrow.logits(target_states.float()), narrow.draft_logits(target_states.float())
    assert all(torch.equal(a, b) for a, b in zip(inside, outside, strict=True))

"""The EAGLE-3 drafter against arithmetic written out, step by step and over all steps at once."""

import pytest
import torch
import torch.nn.functional as F

from spd_lightning.modules.eagle.eagle_config import Eagle3Config, whole_target_layout
from tests.modules.eagle.drafters import make_eagle, unrolled_mask

SEQ = 12


def rms(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * gain


def turned(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary embedding by complex numbers: entry `i` of the first half with entry `i` of the second."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * 1e4 ** (-torch.arange(half, dtype=torch.float64) / half)
    z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([z.real, z.imag], dim=-1)


def random_inputs() -> tuple[list[torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    states = [torch.randn(1, SEQ, 32, dtype=torch.float64, generator=generator) for _ in range(3)]
    return states, torch.randn(1, SEQ, 32, dtype=torch.float64, generator=generator)


def naive_outputs(drafter, states, embeddings, num_steps: int) -> list[torch.Tensor]:
    """The definition: the entries of all steps in one sequence, each step's computed after the one before it."""
    p = dict(drafter.named_parameters())
    hidden = torch.cat(states, -1)[0] @ p["fc.weight"].T
    keys, values, bases, outputs = [], [], [], []
    for step in range(num_steps):
        count = SEQ - 1 - step
        hidden, token = hidden[:count], embeddings[0, step + 1 :]
        joined = torch.cat(
            [
                rms(token, p["midlayer.input_layernorm.weight"]),
                rms(hidden, p["midlayer.hidden_norm.weight"]),
            ],
            -1,
        )
        q, k, v = (
            (joined @ p[f"midlayer.self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, 16)).transpose(0, 1)
            for name in "qkv"
        )
        positions = torch.arange(count) + step
        bases.append(count)
        keys.append(turned(k, positions).repeat_interleave(2, dim=0))
        values.append(v.repeat_interleave(2, dim=0))
        scores = turned(q, positions) @ torch.cat(keys, 1).mT / 4
        weights = scores.masked_fill(~unrolled_mask(bases)[-count:], -torch.inf).softmax(-1)
        attended = (weights @ torch.cat(values, 1)).transpose(0, 1).flatten(1)
        hidden = hidden + attended @ p["midlayer.self_attn.o_proj.weight"].T
        x = rms(hidden, p["midlayer.post_attention_layernorm.weight"])
        gate, up = (x @ p[f"midlayer.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        hidden = hidden + (F.silu(gate) * up) @ p["midlayer.mlp.down_proj.weight"].T
        outputs.append(rms(hidden, p["norm.weight"]))
    return outputs


def test_the_unrolled_drafter_is_the_arithmetic_of_the_design() -> None:
    drafter = make_eagle()
    states, embeddings = random_inputs()
    with torch.no_grad():
        found = drafter(states, embeddings, torch.arange(SEQ)[None], 4)
        expected = naive_outputs(drafter, states, embeddings, 4)
    assert [len(out[0]) for out in found] == [11, 10, 9, 8]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours[0], theirs, rtol=0, atol=1e-12)


def test_no_step_is_made_that_has_no_base() -> None:
    drafter = make_eagle()
    states, embeddings = random_inputs()
    short = [state[:, :3] for state in states]
    assert [out.shape[1] for out in drafter(short, embeddings[:, :3], torch.arange(3)[None], 7)] == [2, 1]


def test_every_parameter_has_a_gradient_from_the_first_step_alone() -> None:
    drafter = make_eagle()
    states, embeddings = random_inputs()
    (out,) = drafter(states, embeddings, torch.arange(SEQ)[None], 1)
    drafter.lm_head(out).pow(2).sum().backward()
    assert all(parameter.grad is not None and bool(parameter.grad.any()) for parameter in drafter.parameters())


def test_the_fused_layers_are_low_middle_and_high() -> None:
    assert make_eagle(8).config.anchors == (2, 4, 5)
    assert make_eagle(36).config.anchors == (2, 18, 33)
    assert whole_target_layout(36).stage_ends == (0, 36)
    with pytest.raises(ValueError, match="at least 7 layers"):
        make_eagle(6)


def test_a_configuration_comes_back_from_json() -> None:
    config = make_eagle().config
    assert Eagle3Config.from_dict(config.to_dict()) == config

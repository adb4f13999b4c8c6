"""Published PDM checkpoints built from their written format, and what they mean, spelled out naively in float64.

Shares no line with the package: rows, rotary positions, gates and gains are written down once more.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

L, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB, NUM_TOKENS = 8, 32, 48, 4, 2, 16, 264, 259
TURNING = {"qwen3_5": 4, "qwen3": 16, "llama": 16, "llama3": 16}
"""Dimensions of a head that rotary positions turn; Qwen3.5: a quarter."""
THETA, EPS = 10000.0, 1e-6


def published_file(
    family: str,
    anchors: tuple[int, ...] = (0, 2, 4, 6, 7),
    num_stages: int = 4,
    num_layers: int = 2,
    token_ids: tuple[int, ...] | None = tuple(range(3, 123, 3)),
    **config: Any,
) -> dict[str, Any]:
    """The content of a file for the tiny targets, in bf16, with gains that a forgotten norm would show."""
    generator = torch.Generator().manual_seed(5)
    rows = VOCAB if token_ids is None else len(token_ids)
    query = HEADS * HEAD_DIM * (2 if family == "qwen3_5" else 1)
    shapes = {f"aggr_projs.{i}.weight": (HIDDEN, (i + 1) * HIDDEN) for i in range(len(anchors))}
    for j in range(num_layers):
        parts = {
            "self_attn.q_proj": (query, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
            "self_attn.q_norm": (HEAD_DIM,),
            "self_attn.k_norm": (HEAD_DIM,),
            "mlp.gate_proj": (INNER, HIDDEN),
            "mlp.up_proj": (INNER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INNER),
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
        }
        shapes |= {f"spec_layers.{j}.{part}.weight": shape for part, shape in parts.items()}
    shapes["lm_head.weight"] = (rows, HIDDEN)
    state = {}
    for name, shape in shapes.items():
        value = 0.2 * torch.randn(shape, generator=generator)
        if len(shape) == 1 and family != "qwen3_5":
            value = 1 + value
        state[name] = value.bfloat16()
    settings = {
        "version": 11,
        "base_model_path": "somewhere/target",
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "num_stages": num_stages,
        "num_spec_layers": num_layers,
        "aggr_feature_bound": list(anchors),
        "num_aggr_types": len(anchors),
        "trained_with_use_deepest": True,
        "draft_vocab_size": rows,
    }
    if token_ids is not None:
        settings["draft_token_ids"] = list(token_ids)
    return {"state_dict": state, "config": settings | config}


class NaiveDrafter:
    """What a file says, of which every number is computed anew for every question.

    Args:
        content: of the file.
        family: of the target.
        final_norm: the target's gain, as it is applied.
        stage_layers: target layers per stage.
        scaling: the target's `rope_parameters`, where they are `llama3`.
    """

    def __init__(
        self,
        content: Mapping[str, Any],
        family: str,
        final_norm: Tensor,
        stage_layers: tuple[int, ...],
        scaling: Mapping[str, Any] | None = None,
    ) -> None:
        self.state = {name: value.double() for name, value in content["state_dict"].items()}
        self.config, self.family, self.final_norm = content["config"], family, final_norm.double()
        self.ends = [sum(stage_layers[:j]) for j in range(len(stage_layers) + 1)]
        self.anchors = self.config["aggr_feature_bound"]
        self.num_stages, self.scaling = len(stage_layers), scaling

    def deepest(self, depth: int) -> int:
        return max(i for i, anchor in enumerate(self.anchors) if anchor <= self.ends[depth])

    def feature(self, states: Mapping[int, Tensor], position: int, depth: int) -> Tensor:
        """`g^depth` of one position."""
        count = self.deepest(depth) + 1
        joined = torch.cat([states[anchor][position] for anchor in self.anchors[:count]])
        return self.state[f"aggr_projs.{count - 1}.weight"] @ joined

    def norm(self, x: Tensor, name: str) -> Tensor:
        gain = self.state[f"{name}.weight"] + (1 if self.family == "qwen3_5" else 0)
        return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * gain

    def stretched(self, frequency: float) -> float:
        if self.scaling is None:
            return frequency
        length, low, high = (
            self.scaling[name] for name in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
        )
        wave = 2 * math.pi / frequency
        if wave < length / high:
            return frequency
        if wave > length / low:
            return frequency / self.scaling["factor"]
        smooth = (length / wave - low) / (high - low)
        return (1 - smooth) * frequency / self.scaling["factor"] + smooth * frequency

    def turn(self, x: Tensor, positions: Tensor) -> Tensor:
        dims, out = TURNING[self.family], x.clone()
        for i in range(dims // 2):
            angle = positions.double() * self.stretched(THETA ** (-2 * i / dims))
            a, b = x[:, i], x[:, i + dims // 2]
            out[:, i] = a * angle.cos() - b * angle.sin()
            out[:, i + dims // 2] = b * angle.cos() + a * angle.sin()
        return out

    def layer(self, x: Tensor, index: int, positions: Tensor, visible: Tensor) -> Tensor:
        """A decoder layer on `rows dim`, head after head; `visible` is `rows rows`."""
        name = f"spec_layers.{index}"
        weight = {part: self.state[f"{name}.self_attn.{part}_proj.weight"] for part in "qkvo"}
        normed, heads = self.norm(x, f"{name}.input_layernorm"), []
        for head in range(HEADS):
            group = head * KV_HEADS // HEADS
            if self.family == "qwen3_5":
                both = normed @ weight["q"][head * 2 * HEAD_DIM : (head + 1) * 2 * HEAD_DIM].T
                query, gate = both[:, :HEAD_DIM], torch.sigmoid(both[:, HEAD_DIM:])
            else:
                query, gate = normed @ weight["q"][head * HEAD_DIM : (head + 1) * HEAD_DIM].T, 1.0
            key, value = (normed @ weight[part][group * HEAD_DIM : (group + 1) * HEAD_DIM].T for part in "kv")
            query = self.turn(self.norm(query, f"{name}.self_attn.q_norm"), positions)
            key = self.turn(self.norm(key, f"{name}.self_attn.k_norm"), positions)
            scores = (query @ key.T / math.sqrt(HEAD_DIM)).masked_fill(~visible, -math.inf)
            heads.append(scores.softmax(-1) @ value * gate)
        x = x + torch.cat(heads, dim=-1) @ weight["o"].T
        normed = self.norm(x, f"{name}.post_attention_layernorm")
        gate, up = (normed @ self.state[f"{name}.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        return x + (gate * torch.sigmoid(gate) * up) @ self.state[f"{name}.mlp.down_proj.weight"].T

    def logits(self, rows: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        for index in range(self.config["num_spec_layers"]):
            rows = self.layer(rows, index, positions, visible)
        normed = rows / (rows.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * self.final_norm
        return normed @ self.state["lm_head.weight"].T

    def decoding(self, states: Mapping[int, Tensor], newest: int, fill: int) -> Tensor:
        """Draft logits behind `newest`: the tokens in flight at depths `fill-1 .. 0`, all before at depth `n`."""
        depths = [newest - t if newest - t < fill else self.num_stages for t in range(newest + 1)]
        rows = torch.stack([self.feature(states, t, depth) for t, depth in enumerate(depths)])
        causal = torch.ones(len(depths), len(depths), dtype=torch.bool).tril()
        return self.logits(rows, torch.arange(len(depths)), causal)[-1]

    def training(self, states: Mapping[int, Tensor], seq: int, fill: int) -> Tensor:
        """Logits at every position in the training layout: one row for each anchor count that some depth reaches.

        A row stands for the smallest depth of its anchor count, and sees `D(d, delta; a)` of design §4.
        """
        n = self.num_stages
        row_of = [self.deepest(depth) for depth in range(n + 1)]
        kinds = sorted(set(row_of))
        smallest = [row_of.index(kind) for kind in kinds]
        rows = torch.stack([self.feature(states, t, depth) for depth in smallest for t in range(seq)])
        visible = torch.zeros(len(rows), len(rows), dtype=torch.bool)
        for r, depth in enumerate(smallest):
            for t in range(seq):
                for other in range(t + 1):
                    delta = t - other
                    seen = n if fill < n and delta > 0 and depth + delta >= fill else min(n, depth + delta)
                    visible[r * seq + t, kinds.index(row_of[seen]) * seq + other] = True
        return self.logits(rows, torch.arange(seq).repeat(len(smallest)), visible)[:seq]

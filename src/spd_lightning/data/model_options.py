"""The options of `model` that the size of a run depends on, by method, and the sizes. Builds no model."""

from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from spd_lightning.modules.eagle.eagle_config import Eagle3Config
from spd_lightning.modules.features import AnchorRule, FeatureLayout, RowMode, Schedule
from spd_lightning.modules.model_size import TARGET_SIZES, DrafterSize, TargetSize, resolve_stage_layers


@dataclass(frozen=True)
class TrainedDrafter:
    """What a drafter takes while it is trained.

    Attributes:
        num_parameters: all of them trained.
        num_states: target states that a batch keeps of each token.
        activation_bytes: of a token, kept for the backward pass.
        passes: what each token is computed for.
    """

    num_parameters: int
    num_states: int
    activation_bytes: int
    passes: str


@dataclass(frozen=True)
class ModelOptions:
    """The options of `model` that sizes depend on.

    Args:
        target: folder or hub id of the target.
        num_stages: pipeline stages.
        stage_layers: target layers per stage, or `balanced`; as even as possible when absent.
        anchors: target layers that the drafter reads, or `auto`.
        rows: row types, `exact` or `shared`.
        schedule: `pre_step` or `post_step`.
        num_spec_layers: decoder layers of the drafter.
        num_heads: query heads of the drafter; the target's when absent.
        num_kv_heads: key and value heads of the drafter; the target's when absent.
        head_dim: head width of the drafter; the target's when absent.
        intermediate_size: MLP width of the drafter; the target's when absent.
        feature_norm: `rms` has a gain for each anchor.
        gated_attention: whether the drafter's layers have gates; they have none when absent.
        target_dtype: of the target's weights; `auto` keeps the checkpoint's.
        init_from: drafter that training begins with; its sizes stand where these say nothing.
    """

    target: str
    num_stages: int
    stage_layers: list[int] | Literal["balanced"] | None = None
    anchors: list[int] | AnchorRule = "auto"
    rows: RowMode = "exact"
    schedule: Schedule = "pre_step"
    num_spec_layers: int = 2
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    feature_norm: Literal["none", "rms"] = "rms"
    gated_attention: bool | None = None
    target_dtype: str = "auto"
    init_from: str | None = None

    def drafter(self, target: TargetSize, draft_vocab_size: int) -> TrainedDrafter:
        """The Pipeline Draft Module of these options."""
        split = resolve_stage_layers(self.target, self.num_stages, self.stage_layers)
        layout = FeatureLayout.build(target.num_layers, self.num_stages, split, self.anchors, self.rows, self.schedule)
        given = with_source(self)
        size = DrafterSize.of(
            target,
            layout,
            self.num_spec_layers,
            draft_vocab_size,
            num_heads=given.num_heads,
            num_kv_heads=given.num_kv_heads,
            head_dim=given.head_dim,
            intermediate_size=given.intermediate_size,
            feature_norm=self.feature_norm,
            gated_attention=bool(given.gated_attention),
        )
        activations = size.activation_bytes(1, layout.num_rows)
        return TrainedDrafter(size.num_parameters, len(layout.anchors) + 1, activations, f"{layout.num_rows} row types")


@dataclass(frozen=True)
class EagleOptions:
    """The options of an EAGLE-3 drafter that sizes depend on.

    Args:
        target: folder or hub id of the target.
        num_steps: steps of the training-time test.
        num_heads: query heads of the drafter; the target's when absent.
        num_kv_heads: key and value heads of the drafter; the target's when absent.
        head_dim: head width of the drafter; the target's when absent.
        intermediate_size: MLP width of the drafter; the target's when absent.
        target_dtype: of the target's weights; `auto` keeps the checkpoint's.
        init_from: drafter that training begins with; its sizes stand where these say nothing.
    """

    target: str
    num_steps: int = 7
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    target_dtype: str = "auto"
    init_from: str | None = None

    def drafter(self, target: TargetSize, draft_vocab_size: int) -> TrainedDrafter:
        """The EAGLE-3 drafter of these options; every step of a chain keeps what a layer keeps."""
        given = with_source(self)
        config = Eagle3Config(
            num_layers=target.num_layers,
            hidden_size=target.hidden_size,
            intermediate_size=given.intermediate_size or target.intermediate_size,
            num_heads=given.num_heads or target.num_heads,
            num_kv_heads=given.num_kv_heads or target.num_kv_heads,
            head_dim=given.head_dim or target.head_dim,
            rope_theta=1.0,
            rms_norm_eps=1.0,
            draft_vocab_size=draft_vocab_size,
        )
        layer = DrafterSize(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            query_width=config.num_heads * config.head_dim,
            kv_width=config.num_kv_heads * config.head_dim,
            head_dim=config.head_dim,
            num_layers=1,
            projection_inputs=(),
            num_gains=0,
            draft_vocab_size=draft_vocab_size,
        )
        activations, num_states = layer.activation_bytes(1, self.num_steps), len(config.anchors) + 2
        return TrainedDrafter(config.num_parameters, num_states, activations, f"{self.num_steps} steps of each chain")


Options = TypeVar("Options", ModelOptions, EagleOptions)


def with_source(options: Options) -> Options:
    """The options, with the sizes of the drafter that training begins with where they say nothing."""
    if options.init_from is None:
        return options
    from spd_lightning.modules.checkpoint import read_drafter_config

    _, source = read_drafter_config(options.init_from)
    names = (*TARGET_SIZES, "gated_attention")
    return replace(options, **{name: getattr(source, name) for name in names if getattr(options, name, 0) is None})


METHODS: dict[str, type[ModelOptions] | type[EagleOptions]] = {"spd": ModelOptions, "eagle3": EagleOptions}
"""The options by the method that is trained."""

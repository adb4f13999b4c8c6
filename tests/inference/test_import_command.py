"""`spd-infer import`: a published file means what its format says, and every fault of it is one line."""

import io
import json
import pickle
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5TextRotaryEmbedding

from spd_lightning.inference.cli import main
from spd_lightning.modules.checkpoint import load_drafter
from spd_lightning.modules.published import tensor_faults
from spd_lightning.modules.published_config import read_config
from spd_lightning.modules.target import FrozenTarget, target_shape
from spd_lightning.modules.tiny_target import save_tiny_target, tiny_config
from tests.inference.replay import replayed_logits
from tests.modules.published_files import NUM_TOKENS, NaiveDrafter, published_file

FAMILIES = ("qwen3_5", "qwen3", "llama")
SEQ = 9
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
"""Of its eight frequencies one stays, two are blended and five are slowed down."""


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("targets")
    stretched = {"llama3": save_tiny_target(root / "llama3", "llama", 8, rope_parameters=LLAMA3)}
    return {family: save_tiny_target(root / family, family, 8) for family in FAMILIES} | stretched


def import_file(content: Any, target: Path, folder: Path) -> Path:
    """Saves and imports a file; returns the drafter folder."""
    torch.save(content, folder / "published.pt")
    main(["import", str(folder / "published.pt"), "--target", str(target), "--out", str(folder / "drafter")])
    return folder / "drafter"


def stage_lengths(config: dict[str, Any]) -> tuple[int, ...]:
    return tuple(map(int, config.get("stage_layers", "2;2;2;2").split(";")))


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3_5", {}),
        ("qwen3", {"version": 12, "stage_layers": "1;3;2;2", "anchors": (0, 1, 6, 8), "num_layers": 1}),
        ("llama", {"anchors": (0, 2, 5, 6, 7)}),  # no stage ends at 5, or between 5 and 6
        ("llama3", {}),
    ],
)
def test_an_imported_drafter_drafts_what_its_file_defines(
    family: str, settings: dict[str, Any], targets: dict[str, Path], tmp_path: Path
) -> None:
    """Float64, in the training layout and in decoding, at every fill, against a naive evaluation of the file."""
    content = published_file(family, **settings)
    drafter = load_drafter(import_file(content, targets[family], tmp_path), torch.float64).module
    target = FrozenTarget.from_pretrained(str(targets[family]), "float64")
    offset = 1.0 if family == "qwen3_5" else 0.0
    final_norm = target.model.model.norm.weight.double() + offset
    scaling = LLAMA3 if family == "llama3" else None
    naive = NaiveDrafter(content, family, final_norm, stage_lengths(content["config"]), scaling)
    ids = torch.randint(0, NUM_TOKENS, (1, SEQ), generator=torch.Generator().manual_seed(2))
    anchors = content["config"]["aggr_feature_bound"]
    by_anchor = dict(zip(anchors, target.forward(ids, torch.ones_like(ids), anchors).anchors, strict=True))
    own = {anchor: states[0].double() for anchor, states in by_anchor.items()}
    read = [by_anchor[anchor] for anchor in anchors[: drafter.features.num_anchors]]
    with torch.no_grad():
        for fill in range(1, 5):
            visible = torch.tensor(drafter.layout.visibility_table())[fill - 1 : fill]
            trained = drafter.lm_head(drafter(read, torch.arange(SEQ)[None], visible)[0])
            torch.testing.assert_close(trained, naive.training(own, SEQ, fill), rtol=0, atol=1e-10)
            for newest in (fill, SEQ - 1):
                drafted = replayed_logits(drafter, target.model.model.embed_tokens, ids, by_anchor, newest, fill)
                torch.testing.assert_close(drafted, naive.decoding(own, newest, fill), rtol=0, atol=1e-10)
    assert drafter.draft_token_ids.tolist() == content["config"]["draft_token_ids"]
    assert drafter.config.partial_rotary_factor == (0.25 if family == "qwen3_5" else 1.0)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3"])
def test_the_naive_layer_is_that_of_transformers(family: str) -> None:
    """The published names are those of Transformers' layers: it loads them strictly, and computes the same."""
    content = published_file(family)
    config = tiny_config(family, 1, layer_types=["full_attention"], attn_implementation="eager")
    if family == "qwen3":
        config = Qwen3Config(**{**config.to_dict(), "attn_implementation": "eager"})
    made, rotary = {
        "qwen3_5": (Qwen3_5DecoderLayer, Qwen3_5TextRotaryEmbedding),
        "qwen3": (Qwen3DecoderLayer, Qwen3RotaryEmbedding),
    }[family]
    layer = made(config, 0).eval()
    prefix = "spec_layers.0."
    layer.load_state_dict(
        {
            name.removeprefix(prefix): value.float()
            for name, value in content["state_dict"].items()
            if name.startswith(prefix)
        }
    )
    x, positions = torch.randn(1, SEQ, 32, generator=torch.Generator().manual_seed(3)), torch.arange(SEQ)[None]
    causal = torch.ones(SEQ, SEQ, dtype=torch.bool).tril()
    mask = torch.zeros(SEQ, SEQ).masked_fill(~causal, -torch.inf)[None, None]
    with torch.no_grad():
        expected = layer(x, position_embeddings=rotary(config)(x, positions), attention_mask=mask)
    naive = NaiveDrafter(content, family, torch.ones(32), (2, 2, 2, 2)).layer(x[0].double(), 0, positions[0], causal)
    torch.testing.assert_close(naive.float(), expected[0], rtol=0, atol=2e-5)


def test_stretched_positions_are_those_of_transformers() -> None:
    """The naive evaluation, which drafters are compared with, has Transformers' angles."""
    rotary = LlamaRotaryEmbedding(tiny_config("llama", rope_parameters=LLAMA3))
    cosines, _ = rotary(torch.zeros(1), torch.arange(100)[None])
    naive = NaiveDrafter(published_file("llama"), "llama", torch.ones(32), (2, 2, 2, 2), LLAMA3)
    angles = torch.tensor([[t * naive.stretched(1e4 ** (-2 * i / 16)) for i in range(8)] for t in range(100)])
    torch.testing.assert_close(cosines[0, :, :8], angles.cos().float(), rtol=0, atol=1e-5)


def test_an_anchor_that_no_depth_reaches_keeps_its_projection_frozen(
    targets: dict[str, Path], tmp_path: Path, capsys
) -> None:
    content = published_file("llama", anchors=(0, 2, 5, 6, 7))
    module = load_drafter(import_file(content, targets["llama"], tmp_path)).module
    assert "no depth reaches the anchors [5]" in capsys.readouterr().out
    kept = module.features.get_buffer("kept_projection_2")
    assert torch.equal(kept, content["state_dict"]["aggr_projs.2.weight"].float())
    assert sorted(module.features.projections) == ["0", "1", "3", "4"]
    assert not any("kept" in name for name, _ in module.named_parameters())


def test_without_token_ids_the_draft_vocabulary_is_the_targets(targets: dict[str, Path], tmp_path: Path) -> None:
    content = published_file("qwen3", token_ids=None)
    module = load_drafter(import_file(content, targets["qwen3"], tmp_path)).module
    assert module.draft_token_ids.tolist() == list(range(NUM_TOKENS))  # the rows beyond are padding
    assert torch.equal(module.lm_head.weight, content["state_dict"]["lm_head.weight"][:NUM_TOKENS].float())


def test_an_imported_drafter_decodes_by_command_and_says_where_it_comes_from(
    targets: dict[str, Path], tmp_path: Path, capsys
) -> None:
    folder = import_file(published_file("qwen3_5"), targets["qwen3_5"], tmp_path)
    assert "4 stages, 2 gated layers, 40 draft tokens" in capsys.readouterr().out
    main(["generate", "--drafter", str(folder), "--prompt", "Hi", "--max_new_tokens", "6", "--compare_ar", "true"])
    assert "identical to plain decoding" in capsys.readouterr().err
    record = load_drafter(folder).record
    assert record["provenance"]["imported"] == {
        "file": "published.pt",
        "version": 11,
        "base_model_path": "somewhere/target",
        "trained_with_use_deepest": True,
    }
    assert record["rotary"] == {"theta": 10000.0, "dims": 4, "layout": "half_split"}


def test_names_that_share_a_tensor_get_one_each(targets: dict[str, Path], tmp_path: Path) -> None:
    content = published_file("qwen3")
    state = content["state_dict"]
    shared = state["spec_layers.0.mlp.gate_proj.weight"].float()
    state |= {f"spec_layers.1.mlp.{part}_proj.weight": shared for part in ("gate", "up")}
    mlp = load_drafter(import_file(content, targets["qwen3"], tmp_path)).module.layers[1].mlp
    assert torch.equal(mlp.gate_proj.weight, shared) and torch.equal(mlp.up_proj.weight, shared)


def test_keys_that_the_format_does_not_define_are_named_and_kept(targets: dict[str, Path], tmp_path: Path) -> None:
    content = published_file("qwen3", rows="shared", steps=7, lr=[1e-3, 1e-4])
    with pytest.warns(UserWarning, match="ignored: steps, lr$"):
        record = json.loads((import_file(content, targets["qwen3"], tmp_path) / "config.json").read_text())
    assert record["provenance"]["imported"]["ignored"] == {"steps": 7, "lr": [1e-3, 1e-4]}


def test_an_import_never_replaces_a_target(tmp_path: Path, capsys) -> None:
    target = save_tiny_target(tmp_path / "target", "qwen3", 8)
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    torch.save(published_file("qwen3"), tmp_path / "published.pt")
    with pytest.raises(SystemExit):
        main(["import", str(tmp_path / "published.pt"), "--target", str(target), "--out", str(target)])
    assert f"{target / 'config.json'} is not that of such a drafter" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before


def without(name: str):
    return lambda content: content["config"].pop(name)


def configured(**values: Any):
    return lambda content: content["config"].update(values)


def tensor(name: str, change):
    return lambda content: content["state_dict"].update({name: change(content["state_dict"][name])})


def drop(*names: str):
    return lambda content: [content["state_dict"].pop(name) for name in names]


def drop_layer(content: dict[str, Any]) -> None:
    drop(*[name for name in content["state_dict"] if name.startswith("spec_layers.1.")])(content)


def foreign_layers(content: dict[str, Any]) -> None:
    content["state_dict"] = published_file("qwen3")["state_dict"]


def with_nan(value: torch.Tensor) -> torch.Tensor:
    return value.clone().fill_diagonal_(torch.nan)


LONG = "9" * 5000
"""More digits than Python makes a number of."""
FAULTS = {
    "no_config": (lambda content: content.pop("config"), "config is missing"),
    "no_state": (lambda content: content.pop("state_dict"), "state_dict is missing"),
    "config_is_a_list": (lambda content: content.update(config=[1]), "config is a list"),
    "missing_key": (without("num_stages"), "config.num_stages is missing"),
    "missing_anchors": (without("aggr_feature_bound"), "config.aggr_feature_bound (the anchors) is missing"),
    "missing_base": (without("base_model_path"), "config.base_model_path is missing"),
    "missing_ids": (without("draft_token_ids"), "config.draft_token_ids is missing, and the draft head has 40"),
    "wrong_version": (configured(version=10), "config.version=10: this release reads 11 and 12"),
    "wrong_width": (configured(hidden_size=64), "config.hidden_size=64, but the target has 32"),
    "wrong_vocabulary": (configured(vocab_size=300), "config.vocab_size=300, but the target has 264"),
    "too_many_stages": (configured(num_stages=9), "config.num_stages=9: a target of 8 layers"),
    "no_number": (configured(num_stages="4"), "config.num_stages='4': must be a positive integer"),
    "wrong_sum": (configured(version=12, stage_layers="2;2;2;3"), "sums to 9, but the target has 8"),
    "wrong_count": (configured(version=12, stage_layers=[4, 4]), "names 2 stages, but num_stages=4"),
    "no_split": (configured(version=12, stage_layers="2;2;x;2"), "must be a list of integers, or integers joined"),
    "unsorted_ids": (configured(draft_token_ids=[5, 3, *range(9, 47)]), "must ascend without repeats, but 3 follows 5"),
    "ids_out_of_range": (configured(draft_token_ids=[*range(39), 260]), "1 ids such as 260 that the target"),
    "other_count_of_ids": (configured(draft_token_ids=[1, 2]), "lists 2 ids, but config.draft_vocab_size=40"),
    "anchors_without_embedding": (configured(aggr_feature_bound=[1, 2, 4, 6, 7]), "must be 0, the embedding"),
    "anchors_beyond": (configured(aggr_feature_bound=[0, 2, 4, 6, 9]), "the target has 8 layers, so anchors end"),
    "anchors_unsorted": (configured(aggr_feature_bound=[0, 4, 2, 6, 7]), "must ascend without repeats"),
    "count_of_anchors": (configured(num_aggr_types=4), "num_aggr_types=4, but aggr_feature_bound has 5"),
    "missing_tensor": (drop("spec_layers.0.mlp.up_proj.weight"), "spec_layers.0.mlp.up_proj.weight is missing"),
    "missing_projection": (drop("aggr_projs.4.weight"), "has aggr_projs [0, 1, 2, 3], but config.aggr_feature_bound"),
    "missing_layer": (drop_layer, "has spec_layers [0], but config.num_spec_layers=2"),
    "extra_tensor": (
        lambda content: content["state_dict"].update({"norm.weight": torch.ones(32)}),
        "state_dict has 'norm.weight', which such a drafter does not",
    ),
    "wrong_shape": (tensor("aggr_projs.1.weight", lambda value: value[:, :32]), "aggr_projs.1.weight is [32, 32], [32"),
    "wrong_family": (foreign_layers, "the layers are plain ones, of drafters for Qwen3 and Llama"),
    "not_finite": (tensor("lm_head.weight", with_nan), "lm_head.weight has 32 values that are not finite"),
    "integers": (tensor("lm_head.weight", torch.Tensor.int), "lm_head.weight is of torch.int32"),
    "meta": (tensor("lm_head.weight", lambda value: value.to("meta")), "on meta, not all of whose values are in"),
    "sparse": (
        tensor("lm_head.weight", lambda value: value.float().to_sparse()),
        "is a torch.sparse_coo tensor on cpu",
    ),
    "eight_bits": (tensor("lm_head.weight", lambda value: value.to(torch.float8_e4m3fn)), "is of torch.float8_e4m3fn"),
    "float32_too_small": (
        tensor("lm_head.weight", lambda value: value.double() + 1e300),
        "lm_head.weight has 1280 values that are not finite in float32",
    ),
    "version_is_a_tensor": (configured(version=torch.tensor([11, 12])), "config.version=[11, 12]: this release reads"),
    "count_is_a_float": (configured(num_aggr_types=5.0), "num_aggr_types=5.0: must be a positive integer"),
    "count_is_a_tensor": (configured(num_aggr_types=torch.tensor([5, 5])), "num_aggr_types=[5, 5]: must be a positive"),
    "no_plain_value": (configured(trained_with_use_deepest={1}), "config.trained_with_use_deepest is neither plain"),
    "not_a_number": (
        configured(trained_with_use_deepest=torch.nan),
        "config.trained_with_use_deepest is neither plain",
    ),
    "meta_ids": (
        configured(draft_token_ids=torch.arange(40, device="meta")),
        "config.draft_token_ids is neither plain",
    ),
    "one_value_repeated": (
        configured(stage_layers=torch.ones(1).expand(10**6)),
        "config.stage_layers is neither plain",
    ),
    "other_schedule": (configured(schedule="post_step"), "schedule='post_step', but drafters of this format are all"),
    "long_name": (
        lambda content: content["state_dict"].update({f"aggr_projs.{LONG}.weight": 0}),
        "such a drafter does",
    ),
    "long_number": (configured(stage_layers=LONG), "must be a list of integers, or integers joined by ';'"),
    "long_list": (configured(stage_layers=[1] * 5000), "names 5000 stages, but num_stages=4"),
    "no_tensor": (tensor("lm_head.weight", torch.Tensor.tolist), "lm_head.weight is a list, a tensor is needed"),
}


def errors_of(file: Path, target: Path, out: Path, capsys) -> list[str]:
    with pytest.raises(SystemExit) as ended:
        main(["import", str(file), "--target", str(target), "--out", str(out)])
    assert ended.value.code == 2 and not out.exists()
    lines = capsys.readouterr().err.strip().splitlines()
    assert all(line.startswith(f"spd-infer: error: {file}: ") for line in lines)
    return [line.removeprefix(f"spd-infer: error: {file}: ") for line in lines]


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_one_line_and_nothing_is_written(
    name: str, targets: dict[str, Path], tmp_path: Path, capsys
) -> None:
    change, message = FAULTS[name]
    content = published_file("qwen3_5")
    change(content)
    torch.save(content, tmp_path / "published.pt")
    lines = errors_of(tmp_path / "published.pt", targets["qwen3_5"], tmp_path / "out", capsys)
    assert len(lines) == 1 and message in lines[0] and len(lines[0]) <= 400


def test_a_claim_of_many_layers_takes_no_memory() -> None:
    content = published_file("qwen3", num_spec_layers=10**6)
    shape, faults = target_shape(tiny_config("qwen3"), "tiny"), []
    config = read_config(content["config"], shape, NUM_TOKENS, faults)
    tracemalloc.start()
    faults += tensor_faults(content["state_dict"], config, shape)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert faults == ["state_dict has spec_layers [0, 1], but config.num_spec_layers=1000000"] and peak < 2**20


def test_several_faults_are_several_lines(targets: dict[str, Path], tmp_path: Path, capsys) -> None:
    content = published_file("llama", version=7, aggr_feature_bound=[1, 0, 9], num_aggr_types=3)
    drop("spec_layers.0.self_attn.q_norm.weight")(content)
    content["state_dict"]["surplus"] = torch.zeros(1)
    torch.save(content, tmp_path / "published.pt")
    lines = errors_of(tmp_path / "published.pt", targets["llama"], tmp_path / "out", capsys)
    needed = ("version=7", "must be 0", "must ascend", "anchors end there", "'surplus'", "q_norm.weight is missing")
    assert len(lines) == len(needed) and all(word in line for word, line in zip(needed, lines, strict=True))


def test_a_file_for_a_wider_target_is_one_line(targets: dict[str, Path], tmp_path: Path, capsys) -> None:
    content = published_file("llama", hidden_size=64)
    content["state_dict"] = {
        name: torch.zeros([2 * size if size == 32 else size for size in value.shape])
        for name, value in content["state_dict"].items()
    }
    torch.save(content, tmp_path / "published.pt")
    [line] = errors_of(tmp_path / "published.pt", targets["llama"], tmp_path / "out", capsys)
    assert "config.hidden_size=64, but the target has 32" in line


class Harmful:
    def __reduce__(self):
        return (Path.touch, (Path("harm"),))


def saved(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def rewritten(change: Callable[[str, bytes], bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    """A file whose records, by the last part of their names, are others."""
    buffer = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(saved(published_file("llama")))) as source,
        zipfile.ZipFile(buffer, "w", compression) as archive,
    ):
        for name in source.namelist():
            archive.writestr(name, change(name.rpartition("/")[2], source.read(name)))
    return buffer.getvalue()


def pickled(code: bytes) -> bytes:
    return rewritten(lambda name, data: b"\x80\x02" + code if name == "data.pkl" else data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (saved(published_file("llama"))[:-2000], "not a readable checkpoint"),
        (rewritten(lambda name, data: data[:10] if name == "3" else data), "does not match expected size"),
        (rewritten(lambda _, data: data, zipfile.ZIP_DEFLATED), "torch cannot read it: BadZipFile('compressed')"),
        (pickled(b"a."), "torch cannot read it: IndexError"),
        (pickled(b"h\x05."), "torch cannot read it: KeyError"),
        (pickled(b"ccollections\nOrderedDict\nK\x05\x85R."), "torch cannot read it: TypeError"),
        (pickled(b"K\x01Q."), "torch cannot read it: AssertionError"),
        (pickled(b"X\x07\x00"), "torch cannot read it: error('unpack requires"),
        (pickled(b"K\x01}b."), "more than tensors and plain values"),
        (saved(published_file("llama", draft_token_ids=np.arange(40))), "plain values: NumPy's"),
        (saved({"config": Harmful()}), "more than tensors and plain values"),
        (pickle.dumps({"config": Harmful()}), "not a readable checkpoint"),
        (saved([1, 2]), "holds a list, a dict of state_dict and config is needed"),
        (b"", "not a readable checkpoint"),
    ],
    ids=[
        "truncated",
        "short_record",
        "compressed",
        "pop",
        "memo",
        "call",
        "id",
        "cut",
        "state",
        "numpy",
        "code",
        "pickle",
        "list",
        "empty",
    ],
)
def test_a_file_that_cannot_be_read_is_one_line(
    data: bytes, message: str, targets: dict[str, Path], tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "published.pt").write_bytes(data)
    [line] = errors_of(tmp_path / "published.pt", targets["llama"], tmp_path / "out", capsys)
    assert message in line and not (tmp_path / "harm").exists()


def test_scaled_rotary_positions_are_refused(tmp_path: Path, capsys) -> None:
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    target = save_tiny_target(tmp_path / "target", "llama", 8, rope_parameters=scaled)
    torch.save(published_file("llama"), tmp_path / "published.pt")
    with pytest.raises(SystemExit):
        main(["import", str(tmp_path / "published.pt"), "--target", str(target), "--out", str(tmp_path / "out")])
    assert "the target's rotary positions are scaled (linear)" in capsys.readouterr().err

"""`spd-infer import_eagle3` and `export_eagle3`: published EAGLE-3 drafters to drafter folders and back."""

from pathlib import Path
from typing import Literal

from jsonargparse import ArgumentParser, Namespace

from spd_lightning.inference.import_command import save_imported


def add_import_arguments(parser: ArgumentParser) -> None:
    """The arguments of `spd-infer import_eagle3`."""
    add = parser.add_argument
    add("folder", type=Path, help="folder with model.safetensors and config.json in the published format")
    add("--target", type=str, required=True, help="folder or hub id of the target that it was trained for")
    add("--out", type=Path, required=True, help="drafter folder to write")


def run_import(given: Namespace) -> None:
    """Makes a drafter folder of a published drafter."""
    import torch

    from spd_lightning.inference.stage_loading import load_embedding
    from spd_lightning.modules.eagle.eagle_files import EMBEDDING, read_published
    from spd_lightning.modules.target import read_target_shape
    from spd_lightning.modules.tokenizer import load_tokenizer

    shape, tokenizer = read_target_shape(given.target), load_tokenizer(given.target)
    published = read_published(given.folder, shape.num_layers, len(tokenizer))
    if published.config.hidden_size != shape.hidden_size:
        raise ValueError(
            f"{given.folder} is for a target of width {published.config.hidden_size}, but {given.target!r} has "
            f"{shape.hidden_size}"
        )
    if published.embedding is not None:
        own = load_embedding(given.target).weight
        if own.shape != published.embedding.shape or not torch.equal(own, published.embedding.to(own.dtype)):
            raise ValueError(
                f"{given.folder}: {EMBEDDING} is not the embedding of {given.target!r}; drafters with one of their own "
                "are not supported"
            )
    save_imported(given, shape, tokenizer, published)
    print(f"drafter: {given.out} ({len(published.token_ids):,} draft tokens)")


def add_export_arguments(parser: ArgumentParser) -> None:
    """The arguments of `spd-infer export_eagle3`."""
    add = parser.add_argument
    add("--drafter", type=str, required=True, help="drafter folder, as `spd-train fit` writes it")
    add("--out", type=Path, required=True, help="folder to write model.safetensors and config.json to")
    add("--dtype", type=Literal["bfloat16", "float32"], default="bfloat16", help="of the weights")


def run_export(given: Namespace) -> None:
    """Writes a drafter in the published format."""
    import torch

    from spd_lightning.modules.checkpoint import load_drafter
    from spd_lightning.modules.eagle.eagle_config import Eagle3Config
    from spd_lightning.modules.eagle.eagle_files import write_published

    drafter = load_drafter(given.drafter)
    config = drafter.module.config
    if not isinstance(config, Eagle3Config):
        raise ValueError(
            f"{given.drafter}: the drafter is of method {config.method!r}, and only eagle3 has this format"
        )
    if Path(given.drafter).resolve() == given.out.resolve():
        raise ValueError(f"out={str(given.out)!r}: that is the drafter's own folder; name another")
    write_published(
        given.out, drafter.module.state_dict(), config, drafter.record["target"], getattr(torch, given.dtype)
    )
    print(f"EAGLE-3 checkpoint: {given.out}")

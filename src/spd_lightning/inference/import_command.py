"""`spd-infer import`: a published PDM checkpoint to a drafter folder."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace

if TYPE_CHECKING:
    from spd_lightning.modules.target import TargetShape


def add_import_arguments(parser: ArgumentParser) -> None:
    """The arguments of `spd-infer import`."""
    add = parser.add_argument
    add("file", type=Path, help="checkpoint in the published format, version 11 or 12 (.pt)")
    add("--target", type=str, required=True, help="folder or hub id of the target that it was trained for")
    add("--out", type=Path, required=True, help="drafter folder to write")


def run_import(given: Namespace) -> None:
    """Makes a drafter folder of a published checkpoint.

    Raises:
        ValueError: if file or target cannot be read.
        SystemExit: with 2, after a line for each fault of the file; nothing is written then.
    """
    from spd_lightning.inference.stage_loading import load_final_norm_gain
    from spd_lightning.modules.checkpoint import read_saved
    from spd_lightning.modules.published import PublishedFileError, import_drafter
    from spd_lightning.modules.target import read_target_shape
    from spd_lightning.modules.target_files import read_model_config
    from spd_lightning.modules.tokenizer import load_tokenizer

    if not given.file.is_file():
        raise ValueError(f"{given.file}: there is no such file")
    content = read_saved(given.file)
    if not isinstance(content, dict):
        raise ValueError(f"{given.file}: holds a {type(content).__name__}, a dict of state_dict and config is needed")
    shape, tokenizer = read_target_shape(given.target), load_tokenizer(given.target)
    try:
        imported = import_drafter(
            content, shape, read_model_config(given.target), len(tokenizer), load_final_norm_gain(given.target)
        )
    except PublishedFileError as error:
        for fault in error.faults:
            print(f"spd-infer: error: {given.file}: {fault}", file=sys.stderr)
        raise SystemExit(2) from None
    provenance = {"imported": {"file": given.file.name, **imported.provenance}}
    save_imported(given, shape, tokenizer, imported, provenance)
    config = imported.config
    if unused := [config.anchors[index] for index in config.kept_projections]:
        print(f"no depth reaches the anchors {unused}: their projections are kept, and neither used nor trained")
    print(
        f"drafter: {given.out} ({config.num_stages} stages, {config.num_spec_layers} "
        f"{'gated ' if config.gated_attention else ''}layers, {config.draft_vocab_size:,} draft tokens)"
    )


def save_imported(
    given: Namespace, shape: "TargetShape", tokenizer: Any, imported: Any, provenance: Mapping[str, Any] | None = None
) -> None:
    """Writes the drafter folder of an import.

    Args:
        given: the command's `target` and `out`.
        shape: of the target.
        tokenizer: the target's.
        imported: the drafter's `config`, `state` and `token_ids`.
        provenance: as for `drafter_record`.
    """
    from spd_lightning.modules.checkpoint import drafter_record, save_drafter
    from spd_lightning.modules.draft_vocab import DraftVocab
    from spd_lightning.modules.target_files import read_generation_config
    from spd_lightning.modules.tokenizer import eos_token_ids, tokenizer_record

    record = drafter_record(
        imported.config,
        target_name=given.target,
        target=shape,
        tokenizer=tokenizer_record(tokenizer, eos_token_ids(tokenizer, read_generation_config(given.target))),
        draft_vocab=DraftVocab(imported.token_ids),
        metrics={},
        provenance=provenance,
    )
    save_drafter(given.out, imported.state, record)

"""What a source's rows are, as a hash: contents of files, revision of a hub data set. Reads no row."""

import hashlib
import json
import sys
from dataclasses import asdict
from pathlib import Path

from spd_lightning.data.sources import GENERATED, Source, resolve_files
from spd_lightning.modules.hub import offline_when_unreachable, transport_errors

_NOT_CONTENT = ("path", "weight", "data_files", "revision")
_BLOCK = 1 << 22


def source_fingerprint(source: Source) -> str:
    """Hash of a source's content and of the options that rows depend on; the same wherever its files lie.

    Raises:
        ValueError: if the source cannot be found.
    """
    files = resolve_files(source)
    if files:
        content = [[file.suffix, _file_hash(file)] for file in files]
    elif source.path in GENERATED:
        content = [source.path, sys.version]
    else:
        content = [source.path, hub_revision(source.path, source.revision), source.data_files]
    options = {key: value for key, value in asdict(source).items() if key not in _NOT_CONTENT}
    return hashlib.sha256(json.dumps([content, options], sort_keys=True).encode()).hexdigest()


def hub_revision(path: str, revision: str | None) -> str:
    """The commit that a hub data set stands at; of the local copy when the hub cannot be reached.

    Raises:
        ValueError: if there is neither.
    """
    from huggingface_hub import HfApi, constants, errors
    from huggingface_hub.file_download import repo_folder_name

    try:
        with offline_when_unreachable():
            commit = HfApi().dataset_info(path, revision=revision).sha
        assert commit is not None
        return commit
    except (OSError, ValueError, errors.HfHubHTTPError, *transport_errors()) as error:
        folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=path, repo_type="dataset")
        reference = folder / "refs" / (revision or "main")
        if reference.is_file():
            return reference.read_text(encoding="utf-8").strip()
        if revision is not None and (folder / "snapshots" / revision).is_dir():
            return revision
        cause = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ValueError(
            f"source {path!r}: no local file or folder {Path(path).resolve()}, and no such data set on the hub or in "
            f"its local copy {folder} ({cause}); download it and set `path` to the local folder or file"
        ) from error


def _file_hash(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()

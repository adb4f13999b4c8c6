"""Drafter folders on the Hugging Face hub, and whether it can be reached: asked once, so that nobody waits for retries.

Knows no models and no data sets. Importing it is cheap.
"""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

PROBE_SECONDS = 10.0
CONFIG_FILE, WEIGHTS_FILE = "config.json", "drafter.safetensors"
"""Of a drafter folder."""
_REPOSITORY = r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w./-]+))?"
_HUB_ID = re.compile(_REPOSITORY)
_HUB_URL = re.compile("hf:/+" + _REPOSITORY)
"""`hf://owner/name`; a `Path` of it has one slash."""


def check_repository(name: str) -> None:
    """Raises `ValueError` for what the hub would not take as the id of a repository, `owner/name`."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ValueError(f"repo={name!r}: {first_sentence(error)}") from error
    if "/" not in name:
        raise ValueError(f"repo={name!r}: a hub id, owner/name, is needed")


def locate_drafter(name: str | Path) -> Path:
    """The local folder of a drafter: of a hub id that of the hub's cache, downloaded where it is not there yet.

    Args:
        name: a folder, `hf://owner/name` or, where there is no such folder, `owner/name`; a branch, tag or commit may
            follow a hub id, as in `hf://owner/name@v2`.

    Raises:
        ValueError: if a hub id cannot be read; one line.
    """
    wanted = _HUB_URL.fullmatch(str(name)) or (None if Path(name).exists() else _HUB_ID.fullmatch(str(name)))
    if wanted is None:
        return Path(name)
    from huggingface_hub import snapshot_download

    try:
        with offline_when_unreachable():
            folder = snapshot_download(
                wanted["repo"], revision=wanted["revision"], allow_patterns=[CONFIG_FILE, WEIGHTS_FILE]
            )
    except hub_errors() as error:
        raise ValueError(
            f"{name}: no drafter here (there is no such local folder), and {wanted['repo']} could not be read from the "
            f"hub ({first_sentence(error)}); check the id and the network, or download it and give the folder"
        ) from error
    return Path(folder)


@contextmanager
def offline_when_unreachable() -> Iterator[None]:
    """Within it the hub's libraries read their cache only, if the hub does not answer one short request.

    They then fail at once on what is not cached, instead of after several rounds of retries.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or _answers(constants.ENDPOINT):
        yield
        return
    switched: list[Any] = [constants, *filter(None, [sys.modules.get("datasets.config")])]
    before = [module.HF_HUB_OFFLINE for module in switched]
    for module in switched:
        module.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for module, value in zip(switched, before, strict=True):
            module.HF_HUB_OFFLINE = value


def transport_errors() -> tuple[type[Exception], ...]:
    """What the HTTP library below `huggingface_hub` raises; its releases use one of two."""
    found = [name for name in ("httpx2", "httpx") if find_spec(name)]
    return tuple(import_module(name).HTTPError for name in found)


def hub_errors() -> tuple[type[Exception], ...]:
    """What `huggingface_hub` raises when something is not there, not allowed or not reachable."""
    from huggingface_hub.errors import HfHubHTTPError

    return (OSError, ValueError, HfHubHTTPError, *transport_errors())


def first_sentence(error: Exception) -> str:
    """The beginning of a message that goes on with advice for other programs."""
    return re.split(r"\n|(?<=[^.]{3})\. ", str(error).strip())[0].rstrip(".") or type(error).__name__


@cache
def _answers(endpoint: str) -> bool:
    try:
        urlopen(Request(endpoint, method="HEAD"), timeout=PROBE_SECONDS).close()
    except HTTPError:  # it answers, if only to complain
        return True
    except OSError:
        return False
    return True

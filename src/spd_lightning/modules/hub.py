"""Whether the Hugging Face hub can be reached: asked once, so that nobody waits for a minute of retries.

Knows no models and no data sets. Importing it is cheap.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

PROBE_SECONDS = 10.0


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


@cache
def _answers(endpoint: str) -> bool:
    try:
        urlopen(Request(endpoint, method="HEAD"), timeout=PROBE_SECONDS).close()
    except HTTPError:  # it answers, if only to complain
        return True
    except OSError:
        return False
    return True

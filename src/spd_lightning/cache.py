"""Where what can be made again is kept. Knows nothing of what it is."""

import os
from pathlib import Path


def default_cache_dir() -> Path:
    """`$SPD_CACHE`, else `spd-lightning` in `$XDG_CACHE_HOME` (`~/.cache`)."""
    if given := os.environ.get("SPD_CACHE"):
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spd-lightning"

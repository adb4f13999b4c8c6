"""Files that appear whole or not at all. Knows nothing of what is in them."""

import os
from pathlib import Path


def write_whole(path: Path, content: str) -> None:
    """Writes a text to a temporary file beside `path` and renames it, so that no reader sees a part of it."""
    scratch = path.with_name(f".{path.name}.part")
    scratch.write_text(content, encoding="utf-8")
    os.replace(scratch, path)

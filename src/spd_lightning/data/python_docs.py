"""A plain-text corpus that every machine has: Python's topic pages and the docstrings of its standard library.

Modules are parsed, never imported. Knows no tokenizer.
"""

import ast
import sysconfig
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

PYTHON_DOCS = "python-docs"

_SKIPPED = frozenset("site-packages dist-packages test tests idlelib lib2to3 turtledemo pydoc_data __pycache__".split())


def python_docs_rows() -> Iterator[tuple[str, dict[str, str]]]:
    """`(location, {"text": ...})`: topics by name, then modules by path; the same on every run of one Python.

    Raises:
        ValueError: if this Python comes without its documentation and its sources.
    """
    found = False
    for location, text in chain(_topics(), _module_docstrings(Path(sysconfig.get_paths()["stdlib"]))):
        found = True
        yield f"{PYTHON_DOCS} {location}", {"text": text}
    if not found:
        raise ValueError(f"source {PYTHON_DOCS!r}: this Python has no pydoc_data and no library sources: name a folder")


def _topics() -> Iterator[tuple[str, str]]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions package it apart
        return
    for name in sorted(topics):
        yield f"topic {name}", topics[name].strip() + "\n"


def _module_docstrings(library: Path) -> Iterator[tuple[str, str]]:
    """All docstrings of each module, in source order, a blank line between two."""
    for path in sorted(library.rglob("*.py")):
        name = path.relative_to(library)
        if _SKIPPED.intersection(name.parts):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # templates and examples of broken code
            continue
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        nodes = sorted(
            (node for node in ast.walk(tree) if isinstance(node, documented)),
            key=lambda node: getattr(node, "lineno", 0),
        )
        texts = [text for node in nodes if (text := ast.get_docstring(node))]
        if texts:
            yield name.as_posix(), "\n\n".join(texts) + "\n"

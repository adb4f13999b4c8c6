"""An answer's text -> the number it ends with (GSM8K), or the program to be run (HumanEval). Runs nothing itself."""

import ast
import re
import textwrap
import warnings
from collections.abc import Iterator
from decimal import Decimal

from spd_lightning.inference.evaluation.tasks import GSM8K_SOLUTION, Question

# A minus is a sign unless it joins two things, as in 10-5; digits inside a word (x2) are no number.
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_NUMBER = rf"(?>(?:(?<![\w)\]}}%.])-)?(?<![\w.])(?:{_DIGITS}))"
# Explicit forms of a final answer, the most explicit first. `#### 1. Add the costs` is a heading.
_MARKED = re.compile(rf"####[ \t*]*({_NUMBER})(?![.):][ \t]+\S)")
_BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
# Also a heading, `### Answer`, and the number below it.
_STATED = re.compile(
    r"(?:(?:\b(?:the|final|correct|my|our)[ \t]+|^[^\w\n]*)answer(?:\b[^.\n0-9:]{0,60}?\b(?:is|are|be)\b|[^\w\n]{0,4}:)"
    r"|^[^\w\n]*[#*][^\w\n]*(?:final[ \t]+)?answer[^\w\n]*$)"
    rf"[^0-9\n]{{0,80}}?(?:\n+[^0-9\n]{{0,80}}?)?({_NUMBER}(?:(?!\.\s)[^\n])*)",
    re.IGNORECASE | re.MULTILINE,
)
_OPERATOR = re.compile(r"[+*/×÷·]|\\(?:cdot|times|div|frac)|[ \t]-[ \t]|[0-9]-[0-9]|\bx\b")

_FENCED = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)
_FUTURE = re.compile(r"^from __future__ import .*\n?", re.MULTILINE)
_DEFINITIONS = (
    ast.Import,
    ast.ImportFrom,
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.Assign,
    ast.AnnAssign,
)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_INDENT = "    "


def final_number(text: str) -> Decimal | None:
    """The number that `text` gives as its answer, `None` if it holds no number.

    That is the last one marked `####`, else in `\\boxed{}`, else after "the answer is", else the last of the text.
    Thousands commas, currency signs, percent signs and a full stop behind it do not count.
    """
    for old, new in (("\u2212", "-"), ("{,}", ","), ("\\,", "")):
        text = text.replace(old, new)
    text = re.sub(r"\\?[$€£]", "", text)
    for form in (_MARKED, _BOXED, _STATED):
        for explicit in reversed(form.findall(text)):
            # Of 3 * 5 = 15 apples the number behind the last equals sign, but of 24 = 2 dozen the first one.
            left, _, right = explicit.rpartition("=")
            behind = re.findall(_NUMBER, right) if _OPERATOR.search(left) else []
            if numbers := behind or re.findall(_NUMBER, explicit):
                return _value(numbers[0])
    numbers = re.findall(_NUMBER, text)
    return _value(numbers[-1]) if numbers else None


def gold_number(reference: str) -> Decimal:
    """The number of a GSM8K solution, which ends with `#### 42`.

    Raises:
        ValueError: if it does not.
    """
    if not (found := GSM8K_SOLUTION.fullmatch(reference)):
        raise ValueError(f"a GSM8K solution ends with a number behind ####, not with {reference[-40:]!r}")
    return _value(found[1])


def is_gsm8k_correct(text: str, reference: str) -> bool:
    """Whether the answer `text` and the solution `reference` end with equal numbers (42 equals 42.00)."""
    return final_number(text) == gold_number(reference)


def humaneval_program(question: Question, text: str) -> str:
    """The original prompt, the answer's code and the tests, as one program that fails unless all tests hold.

    The answer is a function with its signature or the body alone (indented or not), in the first fenced block that
    holds it or else in the text itself, from which what stands around is left out. Other blocks are kept if they hold
    definitions only. An answer without code gives a program that fails.
    """
    assert question.original is not None and question.test is not None, "the question is not one of HumanEval"
    text = text.replace("\r\n", "\n")
    futures, text = "".join(_FUTURE.findall(text)), _FUTURE.sub("", text)
    entry_point = question.test.rstrip().rpartition("check(")[2].removesuffix(")")
    prompt = question.original.rstrip("\n") + "\n"
    blocks = [match[1] for match in _FENCED.finditer(text)]
    plain = _FENCED.split(text, maxsplit=1)[0]
    for index, source in enumerate([*blocks, *_starts(plain)]):
        if answer := _answer(prompt, source, entry_point):
            others = [textwrap.dedent(block) for block in blocks if block is not source]
            before, after = [
                [block for block in part if _holds_definitions(block, entry_point)]
                for part in (others[:index], others[index:])
            ]
            # A body must follow its signature; a signature may need what was imported for it.
            parts = [*before, answer, *after] if _defined(answer, entry_point) else [answer, *before, *after]
            break
    else:
        parts = []
    return futures + prompt + "\n".join([*parts, question.test])


def _value(number: str) -> Decimal:
    return Decimal(number.replace(",", ""))


def _starts(text: str) -> Iterator[str]:
    """`text` from each line on at which code may begin: its first, one after an empty line, one with a keyword."""
    lines = text.split("\n")
    for index, line in enumerate(lines):
        after_gap = index == 0 or not lines[index - 1].strip()
        if line.strip() and (after_gap or re.match(r"(async |def |class |import |from |@)", line)):
            yield "\n".join(lines[index:])


def _answer(prompt: str, source: str, entry_point: str) -> str | None:
    """The code at the beginning of `source` that makes `prompt` a whole function, indented as that needs."""
    dedented = textwrap.dedent(source)
    if code := _longest_code(prompt, dedented, entry_point):
        return code
    shapes = (_INDENT + source.lstrip(), textwrap.indent(dedented, _INDENT))
    codes = [_longest_code(prompt, shape, entry_point) for shape in shapes]
    return max(filter(None, codes), key=lambda code: code.count("\n"), default=None)


def _longest_code(prompt: str, source: str, entry_point: str) -> str | None:
    """The most lines of `source` that compile behind `prompt`, if the entry point returns something then."""
    lines = source.split("\n")
    num_prompt_lines = prompt.count("\n")
    while lines:
        code = "\n".join(lines)
        tree = _parsed(prompt + code)
        if isinstance(tree, ast.Module):
            return code if _completes(tree, entry_point) else None
        # No shorter piece that still holds the faulty line would compile.
        del lines[max(0, min(len(lines) - 1, tree - num_prompt_lines - 1)) :]
    return None


def _parsed(program: str) -> ast.Module | int:
    """Its syntax tree, or the number of the line that keeps it from compiling."""
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(program)
            compile(tree, "program.py", "exec", dont_inherit=True)  # finds more, such as a stray `return`
            return tree
    except SyntaxError as error:
        return error.lineno or 0
    except (ValueError, RecursionError, MemoryError):  # characters that are no source; nested too deeply
        return 0


def _completes(tree: ast.Module, entry_point: str) -> bool:
    """Whether the entry point, as the last definition leaves it, has a body of its own."""
    for node in reversed(tree.body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == entry_point:
            return _returns(node)
        if isinstance(node, ast.Assign) and entry_point in map(ast.unparse, node.targets):
            return True
    return False


def _returns(node: ast.AST) -> bool:
    """Whether there is a `return` below `node`, but not in a function within it."""
    return any(
        isinstance(child, ast.Return | ast.Yield) or (not isinstance(child, _SCOPES) and _returns(child))
        for child in ast.iter_child_nodes(node)
    )


def _defined(code: str, entry_point: str) -> bool:
    tree = _parsed(code)
    return isinstance(tree, ast.Module) and _completes(tree, entry_point)


def _holds_definitions(code: str, entry_point: str) -> bool:
    tree = _parsed(code)
    return (
        isinstance(tree, ast.Module)
        and all(isinstance(node, _DEFINITIONS) for node in tree.body)
        and not _completes(tree, entry_point)
    )

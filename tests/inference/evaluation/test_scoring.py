import json
import re
import textwrap
import time
from decimal import Decimal
from pathlib import Path

import pytest

from spd_lightning.inference.evaluation.scoring import final_number, gold_number, humaneval_program, is_gsm8k_correct
from spd_lightning.inference.evaluation.tasks import Question, load_questions


@pytest.mark.parametrize(
    "text, number",
    [
        # the last number
        ("She has 3 cats and 12 dogs.", "12"),
        ("That makes 1,234,567 in all", "1234567"),
        ("It costs $1,080.50.", "1080.50"),
        ("So 25%", "25"),
        ("So 25\\%.", "25"),
        ("a debt of -7", "-7"),
        ("a debt of −7.", "-7"),
        ("a debt of -$7", "-7"),
        ("a debt of $-7", "-7"),
        ("half of it, .5", "0.5"),
        ("from 10-15", "15"),
        ("(3)-15", "15"),
        ("10 - 15 = **-5**", "-5"),
        ("We need $42$ of them", "42"),
        ("$1{,}234$", "1234"),
        ("1\\,234", "1234"),
        ("12,34", "34"),
        ("1,2345", "2345"),
        ("60 minutes x2", "60"),
        ("5kg of H2O", "5"),
        ("Version 42.", "42"),
        ("7..", "7"),
        ("It is\n\n  42\n\n", "42"),
        # "the answer is"
        ("### Answer\n42\n\nCheck: 6 * 7", "42"),
        ("the answer is 24 = 2 dozen", "24"),
        ("\\boxed{24 = 2 \\cdot 12}", "24"),
        ("The answer is 2 * 12 = 24 eggs", "24"),
        ("The answer is 5, because 2 + 1 is 3.", "5"),
        ("The answer is $1,200 for 3 days.", "1200"),
        ("the final answer would be: **18** eggs of 20", "18"),
        ("The answer to the question is 7 out of 9.", "7"),
        ("**Answer:** 64 apples for 3 people", "64"),
        ("### Final Answer:\n\n**64** apples for 3 people", "64"),
        ("Answer: -3\nNote 1", "-3"),
        ("The answer is 16/2 = 8. Checked 2 times.", "8"),
        ("The answer is:\n\\[ 3 \\times 5 = 15 \\text{ apples} \\]\nfor 2 people", "15"),
        ("The answer is 5. No, wait 1 second: the answer is 6. Done in 2 steps", "6"),
        ("Find the answer by adding: 3 + 4 = 7", "7"),
        ("Each wrong answer is minus 5 points, so 20 are left", "20"),
        ("The answer is below.\n\nHe has 42 marbles and\nneeds 8 more", "42"),
        # \boxed{}
        ("The answer is 5, no: \\boxed{42}. Verified 3 times, and the answer is fine.", "42"),
        ("\\boxed{\\$1{,}200}, step 3", "1200"),
        ("\\[ \\boxed{42 \\text{ dollars in } 7 \\text{ days}} \\] 3", "42"),
        ("\\boxed{x = 3 + 4 = 7} and 1", "7"),
        ("\\boxed{5} is wrong, \\boxed{6} is right in 2 ways", "6"),
        ("\\boxed{\\text{none}} 9", "9"),
        ("\\boxed{5 = x} 9", "5"),
        # ####
        ("1 + 1 = <<1+1=2>>2\n#### 2\nThe answer is 3, \\boxed{4}", "2"),
        ("#### $1,080 dollars in 2 days", "1080"),
        ("#### **-5**\nin 2 days", "-5"),
        ("#### 42.\nAnd 7", "42"),
        ("#### 1. Add the costs\n3 + 4 = 7\n#### 2. Answer\nIt is 7", "7"),
    ],
)
def test_final_number_is_what_a_reader_takes_for_the_answer(text: str, number: str) -> None:
    assert final_number(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "No idea.", "x2 + y3", "####", "\\boxed{}", "The answer is forty-two."])
def test_a_text_without_a_number_has_no_answer(text: str) -> None:
    assert final_number(text) is None
    assert not is_gsm8k_correct(text, "#### 0")


def test_numbers_are_compared_by_value() -> None:
    assert is_gsm8k_correct("It is $1,080.00.", "so\n#### 1,080")
    assert is_gsm8k_correct("42", "#### 42")
    assert not is_gsm8k_correct("42.5", "#### 42")
    assert not is_gsm8k_correct("-42", "#### 42")


@pytest.mark.parametrize(
    "reference, number", [("a 3\n#### 42", "42"), ("####-1,000 \n", "-1000"), ("#### 1\n#### 2.5", "2.5")]
)
def test_gold_number_stands_behind_the_last_mark(reference: str, number: str) -> None:
    assert gold_number(reference) == Decimal(number)


@pytest.mark.parametrize("reference", ["42", "#### forty", "#### 42 dollars", "#### ", ""])
def test_a_solution_without_its_number_is_refused(reference: str) -> None:
    with pytest.raises(ValueError, match="a GSM8K solution ends with a number behind ####, not with"):
        gold_number(reference)


def test_gsm8k_answers_are_found_in_every_usual_form(shared_dir: Path) -> None:
    forms = ("The answer is ${:,}.", "So \\boxed{{\\${:,} \\text{{ dollars}}}}. Checked 3 times.", "Thus {:.2f}%.")
    forms += ("**Answer:** {:,} in 7 days", "So 0 + {0} = {0}", "The answer is:\n\n\\[ 12 \\times 1 + 0 = {:,} \\]")
    for line in (shared_dir / "data" / "gsm8k" / "test.jsonl").read_text(encoding="utf-8").splitlines():
        reference = json.loads(line)["answer"]
        gold, steps = gold_number(reference), reference.rpartition("####")[0]
        assert final_number(reference) == gold
        for form in forms:
            assert final_number(steps + form.format(gold)) == gold, steps + form.format(gold)


@pytest.mark.parametrize(
    "piece", ["the answer is ", "- ", "answer:\n", "\\boxed{", "#### ", "1,", "a b ", "-", "```\n", "def f(:\n"]
)
def test_long_degenerate_answers_take_no_time(piece: str) -> None:
    began = time.process_time()
    final_number(piece * 1000)
    humaneval_program(COUNT, piece * 300)
    assert time.process_time() - began < 5


COUNT = Question(
    task="humaneval",
    question_id="0",
    category="code",
    turns=("Complete the code I provided.",),
    original='from typing import List\n\n\ndef count(items: List[int]) -> int:\n    """How many\n\n    >>> count([1])\n    1\n    """\n',
    test="def check(candidate):\n    assert candidate([]) == 0\n    assert candidate([1, 2]) == 2\n\n\ncheck(count)\n",
)
BODY = "    total = 0\n    for item in items:\n        total += 1\n    return total\n"
FUNCTION = f"def count(items: List[int]) -> int:\n{BODY}"
WHOLE = f"from typing import List\n\n\n{FUNCTION}"


def fenced(code: str, language: str = "python") -> str:
    return f"```{language}\n{code}```\n"


def outcome(text: str, question: Question = COUNT) -> str:
    """`passed`, or the error of the program; only for answers that are written in this file."""
    program = humaneval_program(question, text)
    try:
        exec(compile(program, "program.py", "exec"), {"__name__": "program"})
    except (SyntaxError, ValueError, AssertionError, NameError, TypeError) as error:
        return type(error).__name__
    return "passed"


PROSE = "Here is the completed function:\n\n"
REMARKS = "\nThis works because it counts:\n\n1. it starts at 0\n2. it adds 1\n"
RIGHT_ANSWERS = {
    "body": BODY,
    "body after an empty line": f"\n{BODY}",
    "body whose first indentation is lost": BODY.lstrip(),
    "body without its indentation": textwrap.dedent(BODY),
    "body of one line": "return len(items)",
    "body and then another function": f"{BODY}\n\ndef other():\n    return 1\n",
    "body and then remarks": BODY + REMARKS,
    "body behind prose": PROSE + BODY + REMARKS,
    "body and then a fence that was never opened": f"{BODY}```\n{REMARKS}",
    "function": FUNCTION,
    "function behind its import": WHOLE,
    "function between prose": PROSE + WHOLE + REMARKS,
    "function between prose that looks like code": "from the prompt:\n" + FUNCTION + "import nothing else.\n",
    "function of carriage returns": PROSE + fenced(WHOLE).replace("\n", "\r\n"),
    "block": PROSE + fenced(WHOLE) + REMARKS,
    "block without language": PROSE + fenced(FUNCTION, "") + REMARKS,
    "block with the language py": fenced(FUNCTION, "py"),
    "block of the body": PROSE + fenced(BODY) + REMARKS,
    "block of the body without its indentation": fenced(textwrap.dedent(BODY)),
    "block within a list": "1. So:\n\n" + textwrap.indent(fenced(WHOLE), "   ") + REMARKS,
    "block that is not closed": PROSE + f"```python\n{WHOLE}",
    "block that ends in the middle of an example": PROSE + f"```python\n{WHOLE}\n\nprint(count([1, ",
    "import in a block before": fenced("import math\n")
    + fenced("def count(items):\n    return math.floor(len(items))\n"),
    "import that the signature needs": fenced("from typing import Sequence\n")
    + fenced("def count(items: Sequence):\n    return len(items)\n"),
    "helper in a block before": fenced("def one(item):\n    return 1\n")
    + fenced("def count(items):\n    return sum(map(one, items))\n"),
    "helper in a block behind": fenced("def count(items):\n    return sum(map(one, items))\n")
    + fenced("def one(item):\n    return 1\n"),
    "helper in a block before, with carriage returns": (
        fenced("def one(item):\n    return 1\n") + fenced("def count(items):\n    return sum(map(one, items))\n")
    ).replace("\n", "\r\n"),
    "helper in a block before, all within a list": "1. So:\n\n"
    + textwrap.indent(
        fenced("def one(item):\n    return 1\n") + fenced("def count(items):\n    return sum(map(one, items))\n"), "   "
    ),
    "block behind prose that looks like a body": "We count. Then\n\nreturn it\n\n" + fenced(WHOLE),
    "block with a fence in a text": fenced(
        'def count(items):\n    """Uses ```fences```\n\n    ...```"""\n    return len(items)\n'
    ),
    "function and then a stray return": FUNCTION + "return count\n",
    "helper in a block before the body": fenced("def one(item):\n    return 1\n")
    + fenced("    return sum(map(one, items))\n"),
    "usage in a block behind": fenced(WHOLE) + "Usage:\n" + fenced("print(count([1, 2], 3))\n"),
    "usage in a block before": fenced(">>> count([1])\n1\n") + fenced("pip install nothing\n", "bash") + fenced(WHOLE),
    "the prompt in a block before": fenced(COUNT.original or "") + "becomes\n" + fenced(WHOLE),
    "a second, wrong function behind": fenced(WHOLE) + "Or:\n" + fenced("def count(items):\n    return 7\n"),
    "import from the future": fenced(
        "from __future__ import annotations\n\ndef count(items: Unheard):\n    return len(items)\n"
    ),
    "a lambda": fenced("count = lambda items: len(items)\n"),
    "a generator's sum with letters of any language": fenced(
        "def count(items):\n    # ➞ Zählen\n    return sum(1 for _ in items)\n"
    ),
    "an escape that Python warns about": fenced(
        "import re\n\ndef count(items):\n    return len(items) + len(re.findall('\\d', ''))\n"
    ),
}


@pytest.mark.parametrize("text", RIGHT_ANSWERS.values(), ids=RIGHT_ANSWERS)
def test_a_right_answer_passes_in_every_usual_shape(text: str) -> None:
    assert outcome(text) == "passed"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "I cannot do that.",
        "Okay",
        "pass",
        "    pass\n",
        "return",
        fenced("def size(items):\n    return len(items)\n"),
        fenced("def count(items):\n    return 0\n"),
        fenced("import math\n"),
        fenced("def count(items) return len(items)\n"),
        "def count(items):\n    total = 0\n    for item in",
        "\0",
        "\ud800",
        "(" * 5000,
        f"return {'-' * 100_000}1",
        f"return {'1 + ' * 5000}1",
    ],
)
def test_an_answer_that_is_no_right_function_fails(text: str) -> None:
    assert outcome(text) != "passed"


def test_the_first_of_several_functions_counts() -> None:
    wrong = fenced("def count(items):\n    return 7\n")
    assert outcome(wrong + "Or:\n" + fenced(WHOLE)) == "AssertionError"


def test_helpers_of_the_prompt_stay() -> None:
    question = Question(
        task="humaneval",
        question_id="1",
        category="code",
        turns=("",),
        original='def twice(x):\n    return 2 * x\n\n\ndef half(x):\n    """The inverse of twice."""\n',
        test="def check(candidate):\n    assert candidate(twice(3)) == 3\n\ncheck(half)",
    )
    for text in (
        "    return x / 2",
        "def half(x):\n    return x / 2",
        fenced("def half(x):\n    assert twice(1) == 2\n    return x / 2\n"),
    ):
        assert outcome(text, question) == "passed"
    assert outcome("    return x", question) == "AssertionError"


def test_every_humaneval_solution_passes_as_body_and_in_a_block(shared_dir: Path) -> None:
    for question in load_questions(["humaneval"], shared_dir / "data", None, 80):
        assert question.reference is not None and question.original is not None
        whole = question.original + question.reference
        for text in (question.reference.strip(), PROSE + fenced(whole) + REMARKS):
            assert outcome(text, question) == "passed", (question.question_id, text)
        name = re.findall(r"^def (\w+)", question.original, re.MULTILINE)[-1]
        assert outcome(f"def {name}(*args):\n    return object()\n", question) != "passed"

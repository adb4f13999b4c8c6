"""Small made-up dialogues for runs that only check the machinery. Knows no tokenizer."""

import random
from collections.abc import Iterator

DEBUG_DIALOGUES = "debug-dialogues"
NUM_DIALOGUES = 200


def debug_dialogue_rows() -> Iterator[tuple[str, dict[str, object]]]:
    """`(location, {"messages": ...})`: sums and spellings in one or two turns, the same on every run."""
    rng = random.Random(0)
    for number in range(NUM_DIALOGUES):
        turns = [_sum(rng)] if rng.random() < 0.7 else [_sum(rng), _spelling(rng)]
        messages = [
            {"role": role, "content": text}
            for turn in turns
            for role, text in zip(("user", "assistant"), turn, strict=True)
        ]
        yield f"{DEBUG_DIALOGUES} row {number}", {"messages": messages}


def _sum(rng: random.Random) -> tuple[str, str]:
    first, second = rng.randint(1, 50), rng.randint(1, 50)
    return f"What is {first} + {second}?", f"{first} + {second} = {first + second}."


def _spelling(rng: random.Random) -> tuple[str, str]:
    word = rng.choice("pipeline drafter target token anchor stage cycle depth".split())
    return f"Spell {word}.", "-".join(word.upper())

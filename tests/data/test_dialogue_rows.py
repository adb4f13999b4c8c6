"""Rows of every kind, from the raw row to prompt and supervised text, under a thinking template with thinking off."""

import pytest

from spd_lightning.data.conversations import DropRow, parse_conversation
from spd_lightning.data.encoding import encode


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def bot(text: str, **fields: object) -> dict[str, object]:
    return {"role": "assistant", "content": text, **fields}


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def prompt(*turns: tuple[str, str]) -> str:
    """What serving shows: history without think blocks, then the opened and closed one of the answer to come."""
    history = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    return f"{history}<|im_start|>assistant\n<think>\n\n</think>\n\n"


ASKED = prompt(("user", "Why is the sky blue?"))
SKY = user("Why is the sky blue?")
ANSWERED = [(ASKED, "Rayleigh scattering.<|im_end|>")]

CASES: dict[str, tuple[dict, object]] = {
    "messages": ({"messages": [SKY, bot("Rayleigh scattering.")]}, ANSWERED),
    "from and value": (
        {
            "conversations": [
                {"from": "human", "value": SKY["content"]},
                {"from": "gpt", "value": "Rayleigh scattering."},
            ]
        },
        ANSWERED,
    ),
    "role and content": ({"conversations": [SKY, bot("Rayleigh scattering.")]}, ANSWERED),
    "spelling of roles": (
        {
            "conversations": [
                {"from": "User", "value": SKY["content"]},
                {"from": "ChatGPT", "value": "Rayleigh scattering."},
            ]
        },
        ANSWERED,
    ),
    "top-level system": (
        {"system": "Answer in a word.", "messages": [SKY, bot("Rayleigh.")]},
        [(prompt(("system", "Answer in a word."), ("user", SKY["content"])), "Rayleigh.<|im_end|>")],
    ),
    "two system turns": (
        {"messages": [system("Be short."), system("Be kind."), SKY, bot("Rayleigh.")]},
        [(prompt(("system", "Be short.\n\nBe kind."), ("user", SKY["content"])), "Rayleigh.<|im_end|>")],
    ),
    "empty system turn": ({"messages": [system("  "), SKY, bot("Rayleigh scattering.")]}, ANSWERED),
    "late system turn": (
        {"messages": [SKY, bot("Rayleigh."), system("Be short."), SKY, bot("R.")]},
        "system_not_first",
    ),
    "extra keys": (
        {"id": 4, "messages": [SKY | {"name": "Ann"}, bot("Rayleigh scattering.", weight=0.5)], "topic": None},
        ANSWERED,
    ),
    "instruction and output": ({"instruction": "Why?", "input": "", "output": "Because."}, "unknown_schema"),
    "answers only": (
        {
            "messages": [
                bot("Hello!"),
            ]
        },
        "no_user_turn",
    ),
    "system only": ({"messages": [system("Be short.")]}, "no_user_turn"),
    "greeting first": ({"messages": [bot("Hello!"), SKY, bot("Rayleigh scattering.")]}, ANSWERED),
    "question last": ({"messages": [SKY, bot("Rayleigh scattering."), user("And red?")]}, ANSWERED),
    "question only": ({"messages": [SKY]}, "no_supervised_token"),
    "two questions": (
        {"messages": [user("Why?"), SKY, bot("Rayleigh.")]},
        [(prompt(("user", "Why?"), ("user", SKY["content"])), "Rayleigh.<|im_end|>")],
    ),
    "two answers": ({"messages": [SKY, bot("Rayleigh."), bot("More.")]}, "role_order"),
    "no turns": ({"conversations": []}, "empty_conversation"),
    "null turns": ({"conversations": None, "id": "x"}, "empty_conversation"),
    "strange role": ({"messages": [SKY, {"role": "critic", "content": "Hm."}, bot("Rayleigh.")]}, "unknown_role"),
    "empty answer": ({"messages": [SKY, bot("")]}, "no_supervised_token"),
    "blank answer": ({"messages": [SKY, bot("\t\n \n")]}, "no_supervised_token"),
    "answer without text": ({"messages": [SKY, {"role": "assistant", "weight": 1}]}, "bad_turn"),
    "turns that are texts": ({"messages": ["Why?", "Because."]}, "bad_turn"),
    "empty question": (
        {"messages": [user(""), bot("Yes?")]},
        [(prompt(("user", "")), "Yes?<|im_end|>")],
    ),
    "white space around code": (
        {"messages": [SKY, bot("\n\n    sky = 'blue'\n")]},
        [(ASKED, "sky = 'blue'<|im_end|>")],
    ),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}, bot("A cat.")]},
        "multimodal_unsupported",
    ),
    "unicode": (
        {"messages": [user("日本の🏳️‍🌈 e\u0301?"), bot("ok\u2028\U0001f44d\U0001f3fd")]},
        [(prompt(("user", "日本の🏳️‍🌈 e\u0301?")), "ok\u2028\U0001f44d\U0001f3fd<|im_end|>")],
    ),
    "control token in a question": (
        {"messages": [user("x<|im_start|>system"), bot("No.")]},
        "special_token_in_content",
    ),
    "control token in an answer": ({"messages": [SKY, bot("Rayleigh.<|im_end|>")]}, "special_token_in_content"),
    "several turns": (
        {"messages": [SKY, bot("<think>\nhm\n</think>\n\nRayleigh."), user("And red?"), bot("Sunset.")]},
        [
            (ASKED, "Rayleigh.<|im_end|>"),
            (
                prompt(("user", SKY["content"]), ("assistant", "Rayleigh."), ("user", "And red?")),
                "Sunset.<|im_end|>",
            ),
        ],
    ),
    "inline reasoning": ({"messages": [SKY, bot("<think>\nlight\n</think>\n\nRayleigh scattering.")]}, ANSWERED),
    "empty reasoning": ({"messages": [SKY, bot("<think>\n\n</think>\n\nRayleigh scattering.")]}, ANSWERED),
    "reasoning field": ({"messages": [SKY, bot("Rayleigh scattering.", reasoning_content="light")]}, ANSWERED),
    "unfinished reasoning": ({"messages": [SKY, bot("<think>\nlight is")]}, "think_tag_in_content"),
    "quoted think tag": ({"messages": [SKY, bot("It ends with </think>.")]}, "think_tag_in_content"),
    "only reasoning": ({"messages": [SKY, bot("<think>\nlight\n</think>\n")]}, "no_supervised_token"),
    "tool call": (
        {"messages": [SKY, bot("", tool_calls=[{"function": {"name": "f"}}]), {"role": "tool", "content": "1"}]},
        "tool_turns_unsupported",
    ),
    "function call": (
        {"conversations": [{"from": "human", "value": "q"}, {"from": "function_call", "value": "{}"}]},
        "tool_turns_unsupported",
    ),
    "half a character": ({"messages": [user("cut \ud83d"), bot("Yes.")]}, "invalid_unicode"),
}


def outcome(row: dict, tokenizer) -> object:
    """(prompt, supervised text) of each row, or the reason for the drop."""
    try:
        rows = encode(parse_conversation(row), tokenizer)
    except DropRow as drop:
        return drop.reason
    pairs = []
    for encoded in rows:
        length = encoded.loss_mask.index(1)
        assert all(encoded.loss_mask[length:])
        pairs.append((tokenizer.decode(encoded.input_ids[:length]), tokenizer.decode(encoded.input_ids[length:])))
    return pairs


@pytest.mark.parametrize("name", CASES)
def test_rows_of_every_kind_under_a_small_thinking_template(thinking_tokenizer, name):
    row, expected = CASES[name]
    assert outcome(row, thinking_tokenizer) == expected


@pytest.mark.parametrize("name", [name for name in CASES if name != "unicode"])
def test_rows_of_every_kind_under_the_qwen_template(qwen_tokenizer, name):
    row, expected = CASES[name]
    assert outcome(row, qwen_tokenizer) == expected


def test_qwen_reads_composed_characters(qwen_tokenizer):
    row, _ = CASES["unicode"]
    ((shown, answer),) = outcome(row, qwen_tokenizer)  # its tokenizer normalises to NFC
    assert "日本の🏳️‍🌈 \u00e9?" in shown
    assert answer == "ok\u2028\U0001f44d\U0001f3fd<|im_end|>"

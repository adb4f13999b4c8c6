import pickle
import re

import pytest

from spd_lightning.data.conversations import Conversation, DropRow, Message, parse_conversation

Q = {"role": "user", "content": "q"}
A = {"role": "assistant", "content": "a"}


def turns(row, **options) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in parse_conversation(row, **options).messages]


def reason(row, **options) -> str:
    with pytest.raises(DropRow) as drop:
        parse_conversation(row, **options)
    assert drop.value.detail
    return drop.value.reason


def test_the_normal_form_is_plain_data():
    assert parse_conversation({"messages": [Q, A]}) == Conversation((Message("user", "q"), Message("assistant", "a")))


@pytest.mark.parametrize("user", ["user", "human", "User", "HUMAN", " human "])
@pytest.mark.parametrize("assistant", ["assistant", "gpt", "chatgpt", "bot", "GPT", "ChatGPT", "Chat-GPT", "Bot"])
@pytest.mark.parametrize("role, text", [("role", "content"), ("from", "value"), ("role", "value")])
def test_roles_are_known_in_any_spelling(user, assistant, role, text):
    row = {"conversations": [{role: user, text: "q"}, {role: assistant, text: "a"}]}
    assert turns(row) == [("user", "q"), ("assistant", "a")]


@pytest.mark.parametrize(
    "role", ["narrator", "bing", "bard", "moderator", "assistant2", "users", "", "developer", "用户"]
)
def test_an_unknown_role_drops_the_row(role):
    assert reason({"messages": [Q, {"role": role, "content": "x"}, A]}) == "unknown_role"


@pytest.mark.parametrize("key", ["messages", "conversations"])
def test_both_names_of_the_turn_list_are_known(key):
    assert turns({key: [Q, A], "id": 7, "source": None}) == [("user", "q"), ("assistant", "a")]


def test_columns_filled_with_null_by_a_merge_of_files_do_not_count():
    row = {
        "messages": None,
        "conversations": [
            {"from": "human", "value": "q", "role": None, "content": None, "tool_calls": None},
            {"from": "gpt", "value": "a", "role": None, "content": None, "tool_calls": []},
        ],
        "system": None,
        "tools": None,
        "images": [],
    }
    assert turns(row) == [("user", "q"), ("assistant", "a")]


def test_turns_may_be_stored_as_json_or_as_columns():
    assert turns({"conversations": '[{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]'}) == [
        ("user", "q"),
        ("assistant", "a"),
    ]
    assert turns({"messages": {"role": ["user", "assistant"], "content": ["q", "a"]}}) == [
        ("user", "q"),
        ("assistant", "a"),
    ]


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"instruction": "q", "input": "", "output": "a"},
        {"instruction": "q", "output": "a", "text": "q a"},
        {"prompt": "q", "completion": "a"},
        {"question": "q", "answer": "a"},
        {"messages": "q then a"},
        {"messages": "[broken"},
        {"messages": 3},
        {"messages": {"role": ["user", "assistant"], "content": ["q"]}},
        {"messages": {"role": "user", "content": "q"}},
    ],
)
def test_other_schemas_are_dropped_not_guessed(row):
    assert reason(row) == "unknown_schema"


@pytest.mark.parametrize(
    "row", [{"messages": []}, {"messages": None}, {"conversations": []}, {"conversations": None}, {"messages": ""}]
)
def test_a_row_without_turns_is_empty(row):
    assert reason(row) == "empty_conversation"


@pytest.mark.parametrize(
    "turn",
    [
        "q",
        None,
        ["user", "q"],
        3,
        {"content": "q"},
        {"role": None, "content": "q"},
        {"role": 1, "content": "q"},
        {"role": "user"},
        {"role": "user", "content": None},
        {"role": "user", "content": 5},
        {"role": "user", "content": {"text": "q"}},
        {"role": "user", "content": [5]},
        {"role": "user", "content": [{"type": "text"}]},
        {"role": "user", "content": [{"type": "text", "text": 5}]},
        {"role": "user", "content": [{"type": "riddle", "riddle": "?"}]},
    ],
)
def test_a_malformed_turn_drops_the_row(turn):
    assert reason({"messages": [turn, A]}) == "bad_turn"


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "one "}, {"type": "input_text", "text": "two"}, " three", {"text": "!"}]
    assert turns({"messages": [{"role": "user", "content": parts}, A]})[0] == ("user", "one two three!")


@pytest.mark.parametrize("part", [{"type": "thinking", "thinking": "r"}, {"type": "reasoning", "text": "r"}])
def test_reasoning_parts_are_removed(part):
    answer = {"role": "assistant", "content": [part, {"type": "text", "text": "a"}]}
    assert turns({"messages": [Q, answer]})[1] == ("assistant", "a")


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": "x.png"},
        {"type": "image_url", "image_url": {"url": "x"}},
        {"type": "input_audio", "input_audio": {}},
        {"type": "video", "video": "x.mp4"},
        {"image": "x.png"},
        {"type": "image", "text": "caption"},
    ],
)
def test_media_parts_drop_the_row(part):
    assert reason({"messages": [{"role": "user", "content": [part]}, A]}) == "multimodal_unsupported"


@pytest.mark.parametrize("key, value", [("image", "x.png"), ("images", ["x.png"]), ("audio", {"bytes": b"x"})])
def test_a_media_column_drops_the_row(key, value):
    assert reason({"conversations": [Q, A], key: value}) == "multimodal_unsupported"


@pytest.mark.parametrize(
    "role",
    ["tool", "function", "function_call", "Function-Call", "observation", "ipython", "tool_call", "tool_response"],
)
def test_tool_roles_drop_the_row(role):
    assert reason({"messages": [Q, {"role": role, "content": "{}"}, A]}) == "tool_turns_unsupported"


@pytest.mark.parametrize(
    "turn",
    [
        {"role": "assistant", "content": "a", "tool_calls": [{"function": {"name": "f"}}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]},
        {"role": "assistant", "function_call": {"name": "f"}},
        {"role": "assistant", "content": [{"type": "tool_use", "name": "f"}]},
    ],
)
def test_tool_calls_drop_the_row(turn):
    assert reason({"messages": [Q, turn]}) == "tool_turns_unsupported"


def test_offered_tools_drop_the_row_and_empty_ones_do_not():
    assert reason({"messages": [Q, A], "tools": [{"name": "f"}]}) == "tool_turns_unsupported"
    assert reason({"messages": [Q, A], "functions": '[{"name": "f"}]'}) == "tool_turns_unsupported"
    for empty in (None, "", "[]", [], {"name": None, "arguments": None}):
        assert turns({"messages": [{**Q, "tool_calls": empty}, A], "tools": empty})


SYSTEM = {"role": "system", "content": "s"}


def test_system_turns_at_the_start_are_joined_by_a_blank_line():
    row = {"messages": [SYSTEM, {"role": "system", "content": "t"}, Q, A]}
    assert turns(row) == [("system", "s\n\nt"), ("user", "q"), ("assistant", "a")]


@pytest.mark.parametrize("key", ["system", "system_prompt"])
def test_a_top_level_system_comes_first(key):
    assert turns({key: "top", "messages": [Q, A]})[0] == ("system", "top")
    assert turns({key: "top", "messages": [SYSTEM, Q, A]})[0] == ("system", "top\n\ns")
    assert turns({key: "s", "messages": [SYSTEM, Q, A]})[0] == ("system", "s")
    assert turns({key: " \n", "messages": [Q, A]})[0] == ("user", "q")
    assert reason({key: 5, "messages": [Q, A]}) == "bad_turn"


@pytest.mark.parametrize("empty", ["", " \n\t"])
def test_empty_system_turns_are_removed(empty):
    blank = {"role": "system", "content": empty}
    assert turns({"messages": [blank, Q, A]}) == [("user", "q"), ("assistant", "a")]
    assert turns({"messages": [blank, SYSTEM, Q, blank, A]}) == [("system", "s"), ("user", "q"), ("assistant", "a")]


@pytest.mark.parametrize("place", [1, 2])
def test_a_later_system_turn_drops_the_row(place):
    messages = [Q, A]
    messages.insert(place, SYSTEM)
    assert reason({"messages": messages}) == "system_not_first"
    assert reason({"messages": [SYSTEM, *messages]}) == "system_not_first"


def test_the_source_system_is_for_dialogues_without_one():
    assert turns({"messages": [Q, A]}, system="default")[0] == ("system", "default")
    assert turns({"messages": [SYSTEM, Q, A]}, system="default")[0] == ("system", "s")
    assert turns({"system": "top", "messages": [Q, A]}, system="default")[0] == ("system", "top")


def test_consecutive_user_turns_stay_turns():
    assert turns({"messages": [Q, Q, A]}) == [("user", "q"), ("user", "q"), ("assistant", "a")]


@pytest.mark.parametrize("first, second", [("a1", "a2"), ("", "a"), ("a", ""), ("<think>r</think>", "a")])
def test_consecutive_assistant_turns_drop_the_row(first, second):
    pair = [{"role": "assistant", "content": first}, {"role": "assistant", "content": second}]
    assert reason({"messages": [Q, *pair]}) == "role_order"
    assert reason({"messages": [Q, A, Q, *pair]}) == "role_order"


def test_a_leading_assistant_turn_is_removed():
    assert turns({"messages": [A, Q, A]}) == [("user", "q"), ("assistant", "a")]
    assert turns({"messages": [SYSTEM, A, Q, A]}) == [("system", "s"), ("user", "q"), ("assistant", "a")]


@pytest.mark.parametrize("messages", [[A], [SYSTEM], [SYSTEM, A], [{"role": "system", "content": ""}]])
def test_a_row_without_a_user_turn_is_dropped(messages):
    assert reason({"messages": messages}) == "no_user_turn"


def test_a_dialogue_without_an_answer_is_kept_for_regenerate():
    assert turns({"messages": [Q]}) == [("user", "q")]
    assert turns({"messages": [Q, A, Q]})[-1] == ("user", "q")


@pytest.mark.parametrize(
    "content",
    [
        "<think>\nr\n</think>\n\na",
        "<think></think>a",
        "<think>\n\n</think>\n\na",
        "\n <think>r\n\nr2 <b> </think>\na",
    ],
)
def test_inline_reasoning_is_removed_from_every_answer(content):
    answer = {"role": "assistant", "content": content}
    assert turns({"messages": [Q, answer, Q, answer]})[1::2] == [("assistant", "a")] * 2


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking", "thought"])
def test_reasoning_fields_are_removed(field):
    assert turns({"messages": [Q, {**A, field: "<think> r"}]})[1] == ("assistant", "a")


@pytest.mark.parametrize(
    "content",
    [
        "<think>\nr without an end",
        "r without a beginning\n</think>\n\na",
        "Use the </think> tag to end.",
        "The tag <think> begins it.",
        "<think>r</think>a <think>again</think>",
        "<think>r</think>Close with </think>.",
        "<think>the user asks for <think> tags</think>a",
        "a\n<think>r</think>",
    ],
)
def test_an_ambiguous_think_tag_drops_the_row(content):
    answer = {"role": "assistant", "content": content}
    assert reason({"messages": [Q, answer]}) == "think_tag_in_content"
    assert reason({"messages": [Q, answer, Q, A]}) == "think_tag_in_content"


def test_a_think_tag_in_a_question_drops_the_row():
    assert reason({"messages": [{"role": "user", "content": "what is <think>?"}, A]}) == "think_tag_in_content"


@pytest.mark.parametrize("content", ["I think so", "<thinking>a</thinking>", "< think >", "x <thinker> y"])
def test_other_words_are_no_think_tags(content):
    assert turns({"messages": [Q, {"role": "assistant", "content": content}]})[1] == ("assistant", content)


@pytest.mark.parametrize(
    "content", ["\n    x = 1\n\n", " ", "", "\u200b", "a\u2028b\x00c", "e\u0301 👩‍👩‍👧", "\ufeffa"]
)
def test_text_is_kept_as_it_is(content):
    assert turns({"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": content}]}) == [
        ("user", content),
        ("assistant", content),
    ]


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
@pytest.mark.parametrize("half", [0xD83D, 0xDE00, 0xDCFF])
def test_half_a_surrogate_pair_drops_the_row(role, half):
    messages = [SYSTEM, Q, A]
    messages = [{**turn, "content": f"cut {chr(half)}"} if turn["role"] == role else turn for turn in messages]
    assert reason({"messages": messages}) == "invalid_unicode"


def test_prompt_and_response_columns():
    columns = {"prompt": "question", "response": "answer"}
    assert turns({"question": "q", "answer": "a", "id": 1}, columns=columns) == [("user", "q"), ("assistant", "a")]
    assert turns({"prompt": "q", "response": "a"}) == [("user", "q"), ("assistant", "a")]
    assert turns({"prompt": [SYSTEM, Q], "response": [A]}) == [("system", "s"), ("user", "q"), ("assistant", "a")]
    assert reason({"question": "q"}, columns=columns) == "unknown_schema"
    assert reason({"question": "q", "answer": None}, columns=columns) == "bad_turn"
    assert reason({"question": "q", "answer": 72}, columns=columns) == "bad_turn"


def test_columns_win_over_a_turn_list_of_the_row():
    row = {"question": "q2", "answer": "a2", "messages": [Q, A]}
    assert turns(row, columns={"prompt": "question", "response": "answer"}) == [("user", "q2"), ("assistant", "a2")]


def test_columns_name_the_turns_and_the_system_prompt():
    row = {"dialog": [Q, A], "persona": "s", "system": "ignored"}
    assert turns(row, columns={"messages": "dialog", "system": "persona"})[0] == ("system", "s")
    assert reason(row, columns={"messages": "chat"}) == "unknown_schema"


def test_removal_from_answers_comes_first_and_leaves_questions_alone():
    row = {"messages": [{"role": "user", "content": "<<1>>"}, {"role": "assistant", "content": "a <<1+1=2>>2</think>"}]}
    pattern = re.compile(r"<<.*?>>|</think>")
    assert turns(row, response_remove=pattern) == [("user", "<<1>>"), ("assistant", "a 2")]


def test_a_drop_says_why_and_travels_between_processes():
    drop = DropRow("bad_turn", "turn 1")
    copy = pickle.loads(pickle.dumps(drop))
    assert (copy.reason, copy.detail, str(copy)) == ("bad_turn", "turn 1", "bad_turn: turn 1")
    assert str(DropRow("too_long")) == "too_long"

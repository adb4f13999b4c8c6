import subprocess
import sys

import pytest
from tokenizers import AddedToken

from spd_lightning.modules.tokenizer import (
    control_tokens,
    eos_token_ids,
    load_tokenizer,
    render_dialogue,
    render_prompt,
    template_fingerprint,
    token_ids,
    tokenizer_fingerprint,
)

QUESTION = [{"role": "user", "content": "q"}]


def test_importing_it_is_cheap():
    code = (
        "import sys, spd_lightning.modules.tokenizer\n"
        "print([name for name in ('transformers', 'torch', 'lightning', 'datasets') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_saved_tokenizer_loads_with_its_template(tiny_tokenizer_dir, tiny_tokenizer):
    loaded = load_tokenizer(tiny_tokenizer_dir)
    assert loaded.chat_template == tiny_tokenizer.chat_template
    assert token_ids(loaded, "two plus two") == token_ids(tiny_tokenizer, "two plus two")
    assert tokenizer_fingerprint(loaded) == tokenizer_fingerprint(tiny_tokenizer)
    assert template_fingerprint(loaded) == template_fingerprint(tiny_tokenizer)


def one_line_error(name) -> str:
    with pytest.raises(ValueError) as error:
        load_tokenizer(name)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_hub_id_out_of_reach_is_one_line_with_the_way_out():
    message = one_line_error("owner/no-such-model")
    assert message.startswith("tokenizer of 'owner/no-such-model': not found in the hub")
    assert message.endswith("give a local folder that holds tokenizer.json and tokenizer_config.json")


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    assert f"not found in the local folder {tmp_path}" in one_line_error(tmp_path)


def test_a_damaged_tokenizer_is_named(tiny_tokenizer_dir):
    (tiny_tokenizer_dir / "tokenizer.json").write_text("{broken")
    assert str(tiny_tokenizer_dir) in one_line_error(tiny_tokenizer_dir)


def test_what_is_neither_folder_nor_hub_id_is_refused(tmp_path):
    assert "no such local folder" in one_line_error(tmp_path / "absent")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "give the folder" in one_line_error(tmp_path / "tokenizer.json")


def test_the_tokenizer_fingerprint_changes_with_the_ids_only(tiny_tokenizer):
    before = tokenizer_fingerprint(tiny_tokenizer)
    tiny_tokenizer(["a", "b c d"], padding=True, truncation=True, max_length=2)
    tiny_tokenizer.chat_template = "another"
    assert tokenizer_fingerprint(tiny_tokenizer) == before
    tiny_tokenizer.add_tokens([AddedToken("zzz")])
    assert tokenizer_fingerprint(tiny_tokenizer) != before


def test_the_template_fingerprint_changes_with_the_template_and_its_tokens(tiny_tokenizer):
    prints = {template_fingerprint(tiny_tokenizer)}
    tiny_tokenizer.eos_token = "<|endoftext|>"
    prints.add(template_fingerprint(tiny_tokenizer))
    tiny_tokenizer.chat_template += " "
    prints.add(template_fingerprint(tiny_tokenizer))
    tiny_tokenizer.chat_template = None
    prints.add(template_fingerprint(tiny_tokenizer))
    assert len(prints) == 4


@pytest.mark.parametrize(
    "configured, expected", [(None, (2,)), (0, (0, 2)), ([2, 0], (0, 2)), ([2], (2,)), ((7, 5), (2, 5, 7))]
)
def test_end_of_sequence_ids_are_the_union(tiny_tokenizer, configured, expected):
    assert eos_token_ids(tiny_tokenizer, {"eos_token_id": configured}) == expected
    assert eos_token_ids(tiny_tokenizer) == (2,)


@pytest.mark.parametrize("wrong", [400, -1, "2", [2, 400]])
def test_impossible_end_of_sequence_ids_are_refused(tiny_tokenizer, wrong):
    with pytest.raises(ValueError, match=r"eos_token_id .* must be one of the tokenizer's 400 ids"):
        eos_token_ids(tiny_tokenizer, {"eos_token_id": wrong})


def test_a_tokenizer_without_an_end_is_refused(tiny_tokenizer):
    tiny_tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no end-of-sequence token"):
        eos_token_ids(tiny_tokenizer, {})
    assert eos_token_ids(tiny_tokenizer, {"eos_token_id": 1}) == (1,)


def test_control_tokens_are_special_or_written_by_the_template(tiny_tokenizer):
    assert set(control_tokens(tiny_tokenizer)) == {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}
    texts = ["<think>", "<table>", "<|fim|>", "    ", "<br>"]
    tiny_tokenizer.add_tokens([AddedToken(text, special=False) for text in texts])
    tiny_tokenizer.chat_template += "{# <think> #}"
    assert set(control_tokens(tiny_tokenizer)) - {"<|endoftext|>", "<|im_start|>", "<|im_end|>"} == {
        "<think>",
        "<|fim|>",
    }


def test_longer_control_tokens_come_first(tiny_tokenizer):
    tiny_tokenizer.add_tokens([AddedToken("<|im|>", special=True), AddedToken("<|im|><|end|>", special=True)])
    lengths = [len(text) for text in control_tokens(tiny_tokenizer)]
    assert lengths == sorted(lengths, reverse=True)


def test_the_prompt_turns_thinking_off(tiny_tokenizer):
    tiny_tokenizer.chat_template = "{{ messages | length }} {{ enable_thinking }} {{ add_generation_prompt }}"
    assert render_prompt(tiny_tokenizer, QUESTION) == "1 False True"
    assert render_dialogue(tiny_tokenizer, QUESTION) == "1 False False"


def test_a_missing_template_is_named(tiny_tokenizer):
    tiny_tokenizer.chat_template = None
    with pytest.raises(ValueError, match="has no chat template"):
        render_prompt(tiny_tokenizer, QUESTION)


def test_nothing_is_added_to_a_rendered_text(tiny_tokenizer):
    assert token_ids(tiny_tokenizer, "") == []
    assert token_ids(tiny_tokenizer, "<|im_end|>") == [2]
    assert tiny_tokenizer.decode(token_ids(tiny_tokenizer, "any text " * 50)) == "any text " * 50

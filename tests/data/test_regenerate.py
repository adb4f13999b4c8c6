"""Regenerated answers: what is asked, what is kept, what a stopped run leaves and how it goes on."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from spd_lightning.data.answering import Sampling
from spd_lightning.data.conversations import Conversation
from spd_lightning.data.encoding import encode
from spd_lightning.data.regenerate import RegenerationReport, regenerate
from spd_lightning.data.rows import PretokenisedRow
from spd_lightning.data.sources import Source, iter_rows
from spd_lightning.modules.target import FrozenTarget

EOS = 2


class ScriptedTarget:
    """Answers each prompt by `script(prompt text)`; the answer ends unless its text ends with three dots."""

    def __init__(self, tokenizer: Any, script: Callable[[str], str]) -> None:
        self.tokenizer = tokenizer
        self.script = script
        self.prompts: list[list[str]] = []
        self.stop_after: int | None = None

    def generate(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        max_new_tokens: int,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        eos_token_ids: Sequence[int] = (),
        pad_token_id: int = 0,
    ) -> torch.Tensor:
        if self.stop_after is not None and len(self.prompts) == self.stop_after:
            raise KeyboardInterrupt
        prompts = []
        rows = []
        for ids, mask in zip(input_ids, attention_mask.bool(), strict=True):
            assert not mask[: int((~mask).sum())].any()  # padded on the left, and only there
            assert (ids[~mask] == pad_token_id).all()
            prompt = self.tokenizer.decode(ids[mask])
            prompts.append(prompt)
            answer = self.script(prompt)
            new = self.tokenizer(answer, add_special_tokens=False).input_ids[:max_new_tokens]
            if len(new) < max_new_tokens and not answer.endswith("..."):
                new.append(eos_token_ids[0])
            if answer.endswith("..."):
                new = (new * max_new_tokens)[:max_new_tokens]
            rows.append(torch.tensor(new))
        self.prompts.append(prompts)
        width = max(len(row) for row in rows)
        padded = [torch.cat([row, row.new_full((width - len(row),), pad_token_id)]) for row in rows]
        return torch.cat([input_ids, torch.stack(padded)], dim=1)


def last_question(prompt: str) -> str:
    return prompt.split("user\n")[-1].split("<|im_end|>")[0]


def write_rows(path: Path, rows: list[Any]) -> list[Source]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return [Source(str(path))]


def turns(*texts: str) -> dict[str, Any]:
    return {
        "messages": [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)],
    }


def run(
    sources: list[Source], target: Any, tokenizer: Any, out: Path, max_new_tokens: int = 32, **options: Any
) -> RegenerationReport:
    sampling = Sampling(
        max_new_tokens=max_new_tokens,
        temperature=options.pop("temperature", 0.0),
        seed=options.pop("seed", 0),
    )
    settings: dict[str, Any] = {"target_name": "scripted", "eos_token_ids": (EOS,), "batch_size": 2, "max_length": 512}
    return regenerate(sources, target, tokenizer, out, sampling=sampling, **(settings | options))


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def answers(path: Path) -> list[list[str]]:
    return [[m["content"] for m in row["messages"] if m["role"] == "assistant"] for row in read(path)]


def test_all_turns_are_answered_in_order_with_own_answers_as_history(tmp_path: Path, tiny_tokenizer: Any) -> None:
    sources = write_rows(tmp_path / "in.jsonl", [turns("one", "old 1", "two", "old 2"), turns("three", "old 3")])
    target = ScriptedTarget(tiny_tokenizer, lambda prompt: f"answer to {last_question(prompt)}")
    report = run(sources, target, tiny_tokenizer, tmp_path / "out.jsonl")
    assert answers(tmp_path / "out.jsonl") == [["answer to one", "answer to two"], ["answer to three"]]
    seen = [prompt for batch in target.prompts for prompt in batch]
    assert len(seen) == 3
    assert not any("old" in prompt for prompt in seen)
    assert seen[-1] == (
        "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\nanswer to one<|im_end|>\n"
        "<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n"
    )
    assert report.num_rows == 2
    assert report.reasons == {"stop": 2}


def test_last_keeps_the_history_of_the_data(tmp_path: Path, tiny_tokenizer: Any) -> None:
    sources = write_rows(tmp_path / "in.jsonl", [turns("one", "old 1", "two", "old 2")])
    target = ScriptedTarget(tiny_tokenizer, lambda _: "new")
    run(sources, target, tiny_tokenizer, tmp_path / "out.jsonl", turns="last")
    assert answers(tmp_path / "out.jsonl") == [["old 1", "new"]]
    assert "old 1" in target.prompts[0][0]
    unfinished = ScriptedTarget(tiny_tokenizer, lambda _: "on and on...")
    run(sources, unfinished, tiny_tokenizer, tmp_path / "none.jsonl", turns="last")
    assert answers(tmp_path / "none.jsonl") == []  # the data's own answers alone are not worth a row


def test_rows_keep_their_order_whatever_the_batches(tmp_path: Path, tiny_tokenizer: Any) -> None:
    questions = ["x" * (1 + 7 * n % 13) + str(n) for n in range(40)]
    sources = write_rows(tmp_path / "in.jsonl", [turns(question) for question in questions])
    target = ScriptedTarget(tiny_tokenizer, lambda prompt: f"re {last_question(prompt)}")
    run(sources, target, tiny_tokenizer, tmp_path / "out.jsonl")
    assert answers(tmp_path / "out.jsonl") == [[f"re {question}"] for question in questions]
    # Batches are of about the same length: sorted within a window of 16 batches, so of 32 prompts here.
    lengths = [len(prompt) for batch in target.prompts[:16] for prompt in batch]
    assert lengths == sorted(lengths)


def test_an_answer_without_end_is_dropped_or_kept_as_tokens(tmp_path: Path, tiny_tokenizer: Any) -> None:
    sources = write_rows(tmp_path / "in.jsonl", [turns("good", "", "endless", "", "never asked", ""), turns("endless")])
    target = ScriptedTarget(tiny_tokenizer, lambda prompt: "and so on..." if "endless" in prompt else "fine")
    report = run(sources, target, tiny_tokenizer, tmp_path / "out.jsonl", max_new_tokens=9)
    assert answers(tmp_path / "out.jsonl") == [["fine"]]  # cut before the turn without an end
    assert read(tmp_path / "out.jsonl")[0]["finish_reason"] == "length"
    assert report.reasons == {"length": 2}
    assert not any("never asked" in prompt for batch in target.prompts for prompt in batch)

    report = run(sources, target, tiny_tokenizer, tmp_path / "out.jsonl", max_new_tokens=9, keep_unfinished=True)
    assert report.num_tokens == 0  # nothing was asked again
    assert report.num_rows == 3
    items = [row.item for row in iter_rows(Source(str(tmp_path / "out.jsonl")))]
    assert [type(item) for item in items] == [Conversation, PretokenisedRow, PretokenisedRow]
    closed = encode(items[0], tiny_tokenizer)[0]
    assert closed.input_ids[-1] == EOS
    assert closed.loss_mask[-1] == 1
    for item in items[1:]:
        row = encode(item, tiny_tokenizer)[0]
        assert sum(row.loss_mask) == 9
        assert all(row.loss_mask[-9:])
        assert EOS not in row.input_ids[-9:]  # no end is invented


def test_what_cannot_be_asked_or_kept_is_counted(tmp_path: Path, tiny_tokenizer: Any) -> None:
    rows = [
        turns("good"),
        turns("a control <|im_start|> token"),
        turns("far too long " * 40),
        {"text": "plain text"},
        turns("empty"),
        turns("echo"),
        turns("good"),
    ]
    sources = write_rows(tmp_path / "in.jsonl", rows)
    script = {"good": "fine", "empty": "  ", "echo": "an <|endoftext|> inside"}
    target = ScriptedTarget(tiny_tokenizer, lambda prompt: script[last_question(prompt)])
    report = run(sources, target, tiny_tokenizer, tmp_path / "out.jsonl", max_length=128)
    assert report.reasons == {
        "stop": 2,
        "special_token_in_content": 2,
        "prompt_too_long": 1,
        "not_a_dialogue": 1,
        "empty_answer": 1,
    }
    kept = read(tmp_path / "out.jsonl")
    assert [row["id"] for row in kept] == [kept[0]["id"], f"{kept[0]['id']}-2"]
    again = run(sources, target, tiny_tokenizer, tmp_path / "out.jsonl", max_length=128)
    assert again.num_tokens == 0
    assert again.reasons == report.reasons


def test_a_stopped_run_goes_on_and_asks_nothing_twice(tmp_path: Path, tiny_tokenizer: Any) -> None:
    sources = write_rows(tmp_path / "in.jsonl", [turns(f"question {n}") for n in range(9)])
    target = ScriptedTarget(tiny_tokenizer, lambda prompt: f"re {last_question(prompt)}")
    target.stop_after = 3
    with pytest.raises(KeyboardInterrupt):
        run(sources, target, tiny_tokenizer, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()
    journal = tmp_path / "out.jsonl.journal"
    journal.write_bytes(journal.read_bytes()[:-5])  # and the last line was cut
    target.stop_after = None
    run(sources, target, tiny_tokenizer, tmp_path / "out.jsonl")
    assert answers(tmp_path / "out.jsonl") == [[f"re question {n}"] for n in range(9)]
    asked = [prompt for batch in target.prompts for prompt in batch]
    assert len(asked) == len(set(asked)) + 2  # the batch of the cut line, as a whole


def test_further_rows_are_added_to_a_finished_run(tmp_path: Path, tiny_tokenizer: Any) -> None:
    rows = [turns(f"question {n}") for n in range(7)]
    target = ScriptedTarget(tiny_tokenizer, lambda _: "fine")
    run(write_rows(tmp_path / "in.jsonl", rows[:4]), target, tiny_tokenizer, tmp_path / "out.jsonl")
    first = read(tmp_path / "out.jsonl")
    report = run(write_rows(tmp_path / "in.jsonl", rows), target, tiny_tokenizer, tmp_path / "out.jsonl")
    assert read(tmp_path / "out.jsonl")[:4] == first
    assert report.num_rows == 7


@pytest.fixture(scope="module")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> FrozenTarget:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=400,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=EOS,
    )
    folder = tmp_path_factory.mktemp("target")
    LlamaForCausalLM(config).save_pretrained(folder)
    return FrozenTarget.from_pretrained(str(folder), dtype="float32")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_resuming_a_real_target_gives_the_uninterrupted_file(
    tmp_path: Path, tiny_tokenizer: Any, tiny_target: FrozenTarget, temperature: float
) -> None:
    sources = write_rows(tmp_path / "in.jsonl", [turns(f"question {n}", "", "and?", "") for n in range(10)])
    options: dict[str, Any] = {"temperature": temperature, "keep_unfinished": True, "max_new_tokens": 12}
    torch.manual_seed(1)
    whole = run(sources, tiny_target, tiny_tokenizer, tmp_path / "whole.jsonl", **options)
    assert whole.num_rows > 0

    class Stopping:
        calls = 0

        def generate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            self.calls += 1
            if self.calls == 3:
                raise KeyboardInterrupt
            return tiny_target.generate(*args, **kwargs)

    torch.manual_seed(2)  # the caller's generator has no influence, and is left alone
    state = torch.get_rng_state()
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            run(sources, Stopping(), tiny_tokenizer, tmp_path / "parts.jsonl", **options)
    run(sources, tiny_target, tiny_tokenizer, tmp_path / "parts.jsonl", **options)
    assert torch.equal(torch.get_rng_state(), state)
    assert (tmp_path / "parts.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_seeds_matter_when_sampling(tmp_path: Path, tiny_tokenizer: Any, tiny_target: FrozenTarget) -> None:
    sources = write_rows(tmp_path / "in.jsonl", [turns("same question"), turns("same question")])
    options: dict[str, Any] = {"keep_unfinished": True, "max_new_tokens": 12, "batch_size": 1}

    def tokens(name: str, **more: Any) -> list[dict[str, Any]]:
        run(sources, tiny_target, tiny_tokenizer, tmp_path / name, **options, **more)
        return [{k: v for k, v in row.items() if k != "id"} for row in read(tmp_path / name)]

    greedy = tokens("greedy.jsonl")
    assert greedy[0] == greedy[1]
    sampled = tokens("sampled.jsonl", temperature=1.0)
    assert sampled[0] != sampled[1]  # asked twice, drawn twice
    assert tokens("other.jsonl", temperature=1.0, seed=1) != sampled


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"max_length": 32}, "max_length=32 leaves no room for a prompt before max_new_tokens=32"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
    ],
)
def test_arguments_out_of_range(tmp_path: Path, tiny_tokenizer: Any, options: dict[str, Any], message: str) -> None:
    sources = write_rows(tmp_path / "in.jsonl", [turns("question")])
    with pytest.raises(ValueError, match=message):
        run(sources, ScriptedTarget(tiny_tokenizer, str), tiny_tokenizer, tmp_path / "out.jsonl", **options)


def test_a_foreign_file_and_other_settings_are_refused(tmp_path: Path, tiny_tokenizer: Any) -> None:
    sources = write_rows(tmp_path / "in.jsonl", [turns("question")])
    target = ScriptedTarget(tiny_tokenizer, lambda _: "fine")
    (tmp_path / "mine.jsonl").write_text("mine")
    with pytest.raises(ValueError, match="has no journal to go on from"):
        run(sources, target, tiny_tokenizer, tmp_path / "mine.jsonl")
    assert (tmp_path / "mine.jsonl").read_text() == "mine"
    run(sources, target, tiny_tokenizer, tmp_path / "out.jsonl")
    with pytest.raises(ValueError, match="max_new_tokens 32 -> 16"):
        run(sources, target, tiny_tokenizer, tmp_path / "out.jsonl", max_new_tokens=16)


def test_sources_without_a_prompt_are_an_error(tmp_path: Path, tiny_tokenizer: Any) -> None:
    sources = write_rows(tmp_path / "in.jsonl", [{"text": "plain"}])
    with pytest.raises(ValueError, match="no prompt to answer"):
        run(sources, ScriptedTarget(tiny_tokenizer, str), tiny_tokenizer, tmp_path / "out.jsonl")

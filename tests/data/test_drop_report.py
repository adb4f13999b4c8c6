import json

from spd_lightning.data.drop_report import SourceReport, format_reports


def report():
    made = SourceReport("chat.jsonl", read=1200, kept=1000, rows=2500, tokens=90000, supervised_tokens=40000)
    for number in range(150):
        made.add_drop(made.drops, "too_long", f"chat.jsonl:{number}", "3,000 tokens")
    for number in range(50):
        made.add_drop(made.drops, "unknown_role", f"chat.jsonl:{number}", "")
    made.add_drop(made.turn_drops, "too_long", "chat.jsonl:7", "turn 3")
    return made


def test_report_survives_json():
    assert SourceReport.from_json(json.loads(json.dumps(report().to_json()))) == report()


def test_text_has_every_reason_the_most_frequent_first_with_few_examples():
    assert format_reports([report(), SourceReport("empty")]).splitlines() == [
        "chat.jsonl: 1,200 read, 1,000 kept (16.7% dropped), 2,500 rows, 90,000 tokens, 40,000 supervised",
        "  too_long: 150 rows",
        "    chat.jsonl:0: 3,000 tokens",
        "    chat.jsonl:1: 3,000 tokens",
        "    chat.jsonl:2: 3,000 tokens",
        "  unknown_role: 50 rows",
        "    chat.jsonl:0",
        "    chat.jsonl:1",
        "    chat.jsonl:2",
        "  too_long: 1 single turns",
        "    chat.jsonl:7: turn 3",
        "empty: 0 read, 0 kept (0.0% dropped), 0 rows, 0 tokens, 0 supervised",
    ]


def test_likely_cause_is_the_most_frequent_reason_with_an_example():
    assert report().likely_cause() == "150 of 1200 rows were dropped as too_long, e.g. chat.jsonl:0: 3,000 tokens"
    assert SourceReport("s").likely_cause() == ""

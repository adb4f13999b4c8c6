"""Held-out acceptance of finished runs as one table and one JSON file: `collect.py --out FILE.json NAME=RUN_DIR ...`."""

import argparse
import json
from pathlib import Path
from typing import Any

LAYOUT_KEYS = ("num_stages", "stage_layers", "anchors", "rows", "feature_norm", "num_spec_layers", "draft_vocab_size")


def read_run(folder: Path) -> dict[str, Any]:
    """Layout, figures and versions out of a run's drafter folder."""
    record = json.loads((folder / "drafter" / "config.json").read_text(encoding="utf-8"))
    return {
        "drafter": {key: record["drafter"][key] for key in LAYOUT_KEYS},
        "metrics": {name: value for name, value in record["provenance"]["metrics"].items() if name.startswith("val/")},
        "versions": record["provenance"]["versions"] | {"python": record["provenance"]["python"]},
    }


def table(runs: dict[str, dict[str, Any]]) -> str:
    """One line a run: greedy acceptance at fill 1 and n, and what all fills imply."""
    lines = [
        "| layout | p at fill 1 | p at fill n | implied p | tokens per cycle | S0 | KL |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, run in runs.items():
        metrics, stages = run["metrics"], run["drafter"]["num_stages"]
        figures = [metrics[f"val/{key}"] for key in ("p_fill_1", f"p_fill_{stages}", "p", "alpha", "s0", "loss")]
        lines.append(f"| {name} | " + " | ".join(f"{figure:.3f}" for figure in figures) + " |")
    return "\n".join(lines)


def main() -> None:
    """Writes the JSON file and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("runs", nargs="+", metavar="NAME=RUN_DIR")
    given = parser.parse_args()
    runs = {name: read_run(Path(folder)) for name, folder in (run.split("=", 1) for run in given.runs)}
    given.out.write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")
    print(table(runs))


if __name__ == "__main__":
    main()

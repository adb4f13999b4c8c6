"""The model card of a drafter folder: the README.md of its repository. Knows records; knows no hub and no weights."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spd_lightning.modules.drafter_config import DrafterConfig
from spd_lightning.modules.eagle.eagle_config import Eagle3Config

CARD_FILE = "README.md"
METHOD_NAMES = {
    "spd": "Pipeline Draft Module of Speculative Pipeline Decoding (SPD), drafting while the stages run",
    "spd_post": "Pipeline Draft Module of Speculative Pipeline Decoding (SPD), drafting after the stages have run",
    "ppsd": "PPSD: a drafter of first-stage states, drafting after the stages have run",
    "eagle3": "EAGLE-3: an autoregressive drafter of fused states, verified on one device",
}


@dataclass(frozen=True)
class Measurement:
    """Figures and the command that gave them.

    Attributes:
        command: that was run.
        table: the figures, in Markdown.
    """

    command: str
    table: str


def model_card(
    repository: str,
    record: Mapping[str, Any],
    config: DrafterConfig | Eagle3Config,
    licence: str | None = None,
    measurements: Sequence[Measurement] = (),
) -> str:
    """The card in Markdown, with the hub's metadata before it.

    Args:
        repository: hub id that it is for.
        record: the drafter's `config.json`.
        config: the drafter's.
        licence: the hub's name of it, such as `apache-2.0`; without one the card says that none was stated.
        measurements: evaluations.
    """
    target, provenance = record["target"], record["provenance"]
    parts = [
        _front_matter(target, config.method, licence),
        f"# {repository.rpartition('/')[2]}\n",
        f"A drafter for speculative decoding of `{target['name']}`. It proposes tokens, and the target judges "
        "them: what is written is the target's.\n",
        "## Use\n",
        f'```sh\nspd-infer generate --drafter hf://{repository} --prompt "Why is the sky blue?"\n```\n',
        "## Target\n",
        _table(
            {
                "name": f"`{target['name']}`",
                "revision": target["revision"] or "none: no hub id",
                "family": target["family"],
                "layers, width, vocabulary": f"{target['num_layers']}, {target['hidden_size']}, {target['vocab_size']}",
                "tokenizer (hash)": f"{record['tokenizer']['num_tokens']} tokens (`{record['tokenizer']['hash'][:16]}`)",
            }
        ),
        "## Method\n",
        f"{METHOD_NAMES[config.method]}.\n",
        _table({name: f"`{json.dumps(value)}`" for name, value in config.to_dict().items()}),
        "## Data\n",
        *_data(record),
        "## Metrics\n",
        *_metrics(provenance, measurements),
        "## Limits\n",
        *_limits(config, bool(measurements)),
        "## Licence\n",
        f"{f'{licence}.' if licence else 'Not stated by who uploaded this.'} {_origin(provenance)}, so the licence of "
        f"`{target['name']}` applies to them as well.\n",
        "## Versions\n",
        _table({"python": provenance["python"], **provenance["versions"]}),
    ]
    return "\n".join(parts)


def _origin(provenance: Mapping[str, Any]) -> str:
    if provenance.get("imported"):
        return "The output norm is the target's, and the rows of the draft head are as a rule copies of the target's"
    return "The rows of the draft head and the output norm began as copies of the target's"


def _front_matter(target: Mapping[str, Any], method: str, licence: str | None) -> str:
    lines = ["library_name: spd-lightning", f"tags: [speculative-decoding, spd-lightning, {method}]"]
    if target["revision"] is not None:  # of the hub; a local folder has none
        lines.append(f"base_model: {json.dumps(target['name'])}")
    if licence:
        lines.append(f"license: {json.dumps(licence)}")
    return "\n".join(["---", *lines, "---", ""])


def _table(rows: Mapping[str, Any]) -> str:
    lines = [f"| {name} | {str(value).replace('|', chr(92) + '|')} |" for name, value in rows.items()]
    return "\n".join(["| | |", "| --- | --- |", *lines, ""])


def _data(record: Mapping[str, Any]) -> list[str]:
    provenance, vocab = record["provenance"], record["draft_vocab"]
    lines = []
    if sources := provenance.get("data"):
        lines += ["Trained on:\n", *(f"- `{json.dumps(source)}`" for source in sources), ""]
    elif imported := provenance.get("imported"):
        lines.append(f"Imported from `{json.dumps(imported)}`, which does not say what it was trained on.\n")
    else:
        lines.append("Not recorded.\n")
    if source := provenance.get("init_from"):
        lines.append(f"Training began with the weights of `{source}`.\n")
    counted = vocab.get("total_positions_counted")
    where = f", counted on {counted:,} answer tokens" if counted else ""
    lines.append(f"Draft vocabulary: {len(vocab['token_ids']):,} of the target's tokens{where}.\n")
    return lines


def _metrics(provenance: Mapping[str, Any], measurements: Sequence[Measurement]) -> list[str]:
    lines = []
    if metrics := provenance["metrics"]:
        lines += [
            "Last logged figures of training, on held-out rows where they begin with `val/`:\n",
            _table({f"`{name}`": f"{value:.4g}" for name, value in sorted(metrics.items())}),
            f"```sh\n{_without_folder(provenance['command'])}\n```\n",
        ]
    for measurement in measurements:
        lines += [measurement.table.strip() + "\n", f"```sh\n{measurement.command}\n```\n"]
    return lines or ["None were measured.\n"]


def _without_folder(command: str) -> str:
    """A command line without the folder of its program, which is of one machine only."""
    program, *args = command.split(" ")
    return " ".join([program.rpartition("/")[2], *args])


def _limits(config: DrafterConfig | Eagle3Config, was_measured: bool) -> list[str]:
    limits = [
        "Works with this target alone (another dtype or quantisation of it will do): it reads the target's hidden states.",
        "Proposes the tokens of its draft vocabulary only; where the target writes others, drafts are rejected.",
        "Acceptance, and with it speed, depends on the text: expect less than measured on other languages and tasks.",
    ]
    if isinstance(config, DrafterConfig):
        limits.append(
            f"The split into {config.num_stages} stages ({', '.join(map(str, config.stage_layers))} layers) is part of "
            "it: decoding with another one is refused."
        )
        limits.append(
            "`S0` and implied speedups assume free drafting and communication; they are no wall-clock figures."
        )
    if not was_measured:
        limits.append("No evaluation of decoding was given for this card.")
    return [*(f"- {limit}" for limit in limits), ""]

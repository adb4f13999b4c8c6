"""`spd-infer push`: a drafter folder to the Hugging Face hub, with a model card."""

from pathlib import Path
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser, Namespace

if TYPE_CHECKING:
    from spd_lightning.modules.model_card import Measurement


def add_push_arguments(parser: ArgumentParser) -> None:
    """The arguments of `spd-infer push`."""
    add = parser.add_argument
    add("folder", type=Path, help="drafter folder, of any method")
    add("repo", type=str, help="hub id, owner/name; made if it is not there")
    add(
        "--eval",
        type=str,
        nargs="+",
        default=[],
        help="folders of `spd-infer eval` with this drafter, whose figures and commands the card shows",
    )
    add("--licence", type=str | None, default=None, help="of the drafter, as the hub names it (apache-2.0)")
    add("--private", type=bool, nargs="?", const=True, default=False, help="a repository that others cannot see")
    add(
        "--new_card", type=bool, nargs="?", const=True, default=False, help="write the card anew over one that is there"
    )
    add(
        "--dry_run", type=bool, nargs="?", const=True, default=False, help="write the card, list the files, upload none"
    )


def run_push(given: Namespace) -> None:
    """Writes the model card into the folder and uploads it with weights and configuration.

    Raises:
        ValueError: if the folder is no complete drafter, the id is none, or the hub cannot be reached or refuses.
    """
    from spd_lightning.files import write_whole
    from spd_lightning.modules.checkpoint import load_drafter
    from spd_lightning.modules.hub import CONFIG_FILE, WEIGHTS_FILE, check_repository
    from spd_lightning.modules.model_card import CARD_FILE, model_card

    check_repository(given.repo)
    if not given.folder.is_dir():
        raise ValueError(f"{given.folder}: there is no such folder")
    drafter = load_drafter(given.folder)
    card, config = given.folder / CARD_FILE, drafter.module.config
    measured = [measurement(folder, given.folder / WEIGHTS_FILE) for folder in given.eval]
    text = model_card(given.repo, drafter.record, config, given.licence, measured)
    if not card.exists() or given.new_card:
        write_whole(card, text)
    elif card.read_text(encoding="utf-8") != text:
        if given.eval or given.licence:
            raise ValueError(f"{card} is there, and says something else: --new_card true writes it anew")
        print(f"{card} is there and is left as it is; --new_card true writes it anew")
    names = (CARD_FILE, CONFIG_FILE, WEIGHTS_FILE)
    for name in names:
        print(f"{name}  {(given.folder / name).stat().st_size:,} bytes")
    if given.dry_run:
        print(f"dry run: nothing was uploaded to {given.repo}; the card is {card}")
        return
    print(f"uploaded: {upload(given.folder, given.repo, names, given.private)}")


def measurement(folder: str, weights: Path) -> "Measurement":
    """The table and the command of an evaluation folder.

    Raises:
        ValueError: if it cannot be read, or was made with other weights.
    """
    from spd_lightning.inference.evaluation.folder import load_folder
    from spd_lightning.inference.evaluation.journal import file_fingerprint
    from spd_lightning.inference.evaluation.tables import to_markdown
    from spd_lightning.modules.model_card import Measurement

    summary = load_folder(folder).summary
    if file_fingerprint(weights) not in summary["settings"]["files"].values():
        raise ValueError(f"--eval {folder}: it was made with other drafters than {weights}")
    _, _, tables = to_markdown(summary).partition("\n## ")  # after its title and command
    return Measurement(summary["command"], "### " + tables.replace("\n## ", "\n### "))


def upload(folder: Path, repo: str, names: tuple[str, ...], private: bool) -> str:
    """Uploads these files in one commit, making the repository where it is missing; where they then are.

    Raises:
        ValueError: if the hub cannot be reached or refuses; one line.
    """
    from huggingface_hub import HfApi

    from spd_lightning.modules.hub import first_sentence, hub_errors, offline_when_unreachable

    api = HfApi()
    try:
        with offline_when_unreachable():
            api.create_repo(repo, private=private, exist_ok=True)
            commit = api.upload_folder(
                repo_id=repo,
                folder_path=folder,
                allow_patterns=list(names),
                commit_message="Upload drafter",
            )
    except hub_errors() as error:
        raise ValueError(
            f"nothing was uploaded to {repo}: {first_sentence(error)}. Check the network (HF_HUB_OFFLINE), log in with "
            "`hf auth login` or HF_TOKEN, or use --dry_run true"
        ) from error
    return str(commit)

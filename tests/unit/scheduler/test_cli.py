from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from scheduler.cli import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["serve", "--batch-timout-ms", "5"],
            "unknown option --batch-timout-ms; did you mean --batch-timeout-ms?",
        ),
        (
            ["serve", "--batch-timout-ms=5"],
            "unknown option --batch-timout-ms; did you mean --batch-timeout-ms?",
        ),
        (["serve", "--zzz"], "unknown option --zzz"),
        (["serve", "--max-num", "5"], "unknown option --max-num; did you mean --max-num-seqs?"),
        (["serve", "here"], "unexpected argument here"),
        (["serve", "--port"], "argument --port: expected one argument"),
        (["serve", "--batch-timeout-ms", "-1"], "batch_timeout_ms must be >= 0, got -1"),
        (["serve", "--model", "smollm2"], None),
        (["models", "--lst"], "unknown option --lst; did you mean --list?"),
        (["models", "no-such-model"], None),
        (["leave", "--timeout-s", "-1"], "argument --timeout-s: must be >= 0 and <= 86400, got -1"),
        (["leave", "--ray-adress", "auto"], "unknown option --ray-adress; did you mean --ray-address?"),
        ([], "the following arguments are required: COMMAND"),
        (["sevre"], None),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: list[str], message: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2

    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert output.err.startswith("purefill: error: ")
    if message is not None:
        assert output.err == f"purefill: error: {message}\n"


def test_a_wrong_variable_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PUREFILL_PORT", "high")

    assert main(["serve"]) == 2
    assert (
        capsys.readouterr().err
        == "purefill: error: port must be a whole number, got 'high' (from PUREFILL_PORT)\n"
    )


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--version"])

    assert capsys.readouterr().out == f"purefill {version('purefill')}\n"


def test_help_names_each_option_and_default_and_imports_nothing_heavy() -> None:
    code = """
import sys
from scheduler.cli import main
try:
    main(["serve", "--help"])
finally:
    assert not {"torch", "transformers", "ray", "fastapi", "huggingface_hub"} & set(sys.modules)
"""
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert answer.returncode == 0, answer.stderr
    text = " ".join(answer.stdout.split())
    assert (
        "--batch-timeout-ms NUMBER longest that a prompt is held for others to join its batch (default: 20)"
        in text
    )
    assert "--batch-policy {fixed,adaptive}" in text
    assert "--max-capture-tokens N" in text


def test_models_shows_name_size_and_folder_of_what_is_cached(tmp_path: Path) -> None:
    def purefill(*arguments: str) -> tuple[str, str]:
        environ = os.environ | {"PUREFILL_CACHE": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "hub")}
        command = [sys.executable, "-m", "scheduler.cli", *arguments]
        answer = subprocess.run(command, env=environ, check=True, capture_output=True, text=True)
        return answer.stdout, answer.stderr

    assert purefill("models", "--list") == ("", f"no model is cached in {tmp_path}\n")

    folder = tmp_path / "models" / "smollm2-135m"
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).write_bytes(bytes(1_000_000))
    assert purefill("models") == (f"smollm2-135m\t3 MB\t{folder}\n", "")

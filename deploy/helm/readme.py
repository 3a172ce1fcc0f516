"""Write deploy/helm/purefill/README.md from the chart's values.yaml: ``python deploy/helm/readme.py [--check]``.

A value is described by the ``# --`` comment above it; what stands under a described value belongs to it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parent / "purefill"
_LINE = re.compile(r"( *)([\w.]+):(?: |$)")


def described(text: str) -> Iterator[tuple[str, str]]:
    """Yield path and description of each value in values.yaml. Raises ValueError for one without."""
    path: list[tuple[int, str]] = []
    comment: list[str] = []
    covered: int | None = None  # the indentation of a described value, whose inner lines are its own
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("# --"):
            comment = [stripped[4:].strip()]
        elif stripped.startswith("#") and comment:
            comment.append(stripped[1:].strip())
        elif match := _LINE.match(line):
            indent = len(match[1])
            if covered is not None and indent > covered:
                continue
            covered = None
            path = [part for part in path if part[0] < indent] + [(indent, match[2])]
            name = ".".join(key for _, key in path)
            if comment:
                yield name, " ".join(comment)
                comment, covered = [], indent
            elif line.rstrip().endswith(":"):
                continue
            else:
                raise ValueError(f"values.yaml: {name} has no description")


def _default(values: dict[str, Any], name: str) -> str:
    value: Any = values
    for key in name.split("."):
        value = value[key]
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000).strip()
    return text.removesuffix("\n...").strip()


def readme() -> str:
    """Return the whole file."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    text = (CHART / "values.yaml").read_text()
    values = yaml.safe_load(text)
    rows = [
        f"| `{name}` | `{_default(values, name)}` | {words.replace('|', chr(92) + '|')} |"
        for name, words in described(text)
    ]
    examples = [
        f"- [{path.name}](examples/{path.name}): {path.read_text().splitlines()[0].removeprefix('# ')}"
        for path in sorted((CHART / "examples").glob("*.yaml"))
    ]
    return "\n".join(
        [
            f"# {chart['name']} {chart['version']}",
            "",
            f"{chart['description']}. Needs Kubernetes {chart['kubeVersion'].removesuffix('-0')}, and KubeRay's "
            "operator with the definitions of `ray.io/v1`.",
            "How it is built, scaled and upgraded: [docs/deploy.md](../../../docs/deploy.md).",
            "",
            "```",
            "helm install llm deploy/helm/purefill --set image.repository=REPOSITORY \\",
            "  --values deploy/helm/purefill/examples/one-gpu.yaml",
            "```",
            "",
            "## Examples",
            "",
            *examples,
            "",
            "## Values",
            "",
            "Written by `python deploy/helm/readme.py`.",
            "",
            "| value | default | meaning |",
            "|---|---|---|",
            *rows,
            "",
        ]
    )


def main() -> int:
    """Write the file, or with ``--check`` only say whether it is as it should be. Returns the exit code."""
    path, text = CHART / "README.md", readme()
    if sys.argv[1:] == ["--check"]:
        is_fresh = path.read_text() == text
        if not is_fresh:
            print(
                "deploy/helm/purefill/README.md is stale: run python deploy/helm/readme.py", file=sys.stderr
            )
        return 0 if is_fresh else 1
    path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

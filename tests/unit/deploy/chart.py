"""The chart, rendered by Helm's own library."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import yaml

REPO = Path(__file__).resolve().parents[3]
CHART = REPO / "deploy" / "helm" / "purefill"
EXAMPLES = {path.stem: path for path in sorted((CHART / "examples").glob("*.yaml"))}
RELEASE, NAMESPACE = "demo", "prod"
FULLNAME = "demo-purefill"

Manifest = dict[str, Any]


@cache
def _chart() -> helm_python.Chart:
    return helm_python.Chart.load(CHART)


def example(name: str) -> dict[str, Any]:
    """Return the values of an example."""
    values: dict[str, Any] = yaml.safe_load(EXAMPLES[name].read_text())
    return values


def render(values: dict[str, Any] | None = None, *, release: str = RELEASE) -> list[Manifest]:
    """Return all objects that an installation with these values would make."""
    files = _chart().render(values or {}, name=release, namespace=NAMESPACE)
    return [
        document
        for name, text in files.items()
        if name.endswith(".yaml")
        for document in yaml.safe_load_all(text)
        if document
    ]


def one(objects: list[Manifest], kind: str, name: str = FULLNAME) -> Manifest:
    """Return the only object of a kind and name."""
    (found,) = [item for item in objects if (item["kind"], item["metadata"]["name"]) == (kind, name)]
    return found


def pod_templates(objects: list[Manifest]) -> dict[str, Manifest]:
    """Return every pod template by its component's name."""
    templates = []
    for item in objects:
        if item["kind"] == "RayCluster":
            templates.append(item["spec"]["headGroupSpec"]["template"])
            templates += [group["template"] for group in item["spec"]["workerGroupSpecs"]]
        elif item["kind"] in ("Deployment", "StatefulSet"):
            templates.append(item["spec"]["template"])
    return {item["metadata"]["labels"]["app.kubernetes.io/component"]: item for item in templates}


def container_of(template: Manifest) -> Manifest:
    """Return the only container of a pod template."""
    (container,) = template["spec"]["containers"]
    return dict(container)


def variables_of(container: Manifest) -> dict[str, Any]:
    """Return a container's environment by name: the value, or where it comes from."""
    return {item["name"]: item.get("value", item.get("valueFrom")) for item in container["env"]}

"""The schemas of Kubernetes and of KubeRay."""

from __future__ import annotations

import gzip
import json
import re
from functools import cache
from importlib.resources import files
from typing import Any

import yaml
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from tests.support.data import shared_file

_KUBERNETES = "v1.34.0-local-strict"


@cache
def _folder() -> Any:
    return files("kubernetes_validate") / "kubernetes-json-schema" / _KUBERNETES


@cache
def _definitions() -> Registry[Any]:
    """Return the registry of everything that the kinds refer to."""
    resource = Resource.from_contents(json.loads((_folder() / "_definitions.json").read_text()))
    return (resource @ Registry()).crawl()


@cache
def _validator(api_version: str, kind: str) -> Draft202012Validator:
    """Return the validator of a kind. Raises FileNotFoundError if Kubernetes has none."""
    group = re.sub(r"^([^./]*)(\.[^/]*)?/", r"\1-", api_version)
    schema = json.loads((_folder() / f"{kind.lower()}-{group}.json").read_text())
    return Draft202012Validator(schema, registry=Resource.from_contents(schema) @ _definitions())


def kubernetes_errors(item: dict[str, Any]) -> list[str]:
    """Return what Kubernetes would refuse of an object, unknown fields included."""
    return [
        f"{item['kind']} {error.json_path}: {error.message}"
        for error in _validator(item["apiVersion"], item["kind"]).iter_errors(item)
    ]


@cache
def _ray_cluster() -> dict[str, Any]:
    text = gzip.decompress(shared_file("data", "kuberay", "ray.io_rayclusters.yaml.gz").read_bytes())
    versions = yaml.load(text, yaml.CSafeLoader)["spec"]["versions"]
    (schema,) = [item["schema"]["openAPIV3Schema"] for item in versions if item["name"] == "v1"]
    return dict(schema)


def kuberay_errors(cluster: dict[str, Any]) -> list[str]:
    """Return what KubeRay's definition refuses of a RayCluster, and what the API server would drop silently."""
    schema = _ray_cluster()
    errors = [
        f"{error.json_path}: {error.message}" for error in Draft202012Validator(schema).iter_errors(cluster)
    ]
    unknown = _unknown_fields(cluster["spec"], schema["properties"]["spec"], "spec")
    return errors + [f"{path}: unknown" for path in unknown]


def _unknown_fields(value: object, schema: dict[str, Any], path: str) -> list[str]:
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        return []
    if isinstance(value, list):
        return [found for item in value for found in _unknown_fields(item, schema.get("items", {}), path)]
    if not isinstance(value, dict):
        return []
    known, others = schema.get("properties", {}), schema.get("additionalProperties")
    if schema.get("type") == "object" and not known and others is None:
        return []
    found = []
    for name, item in value.items():
        inner = known.get(name, others)
        if inner is None:
            found.append(f"{path}.{name}")
        elif isinstance(inner, dict):
            found += _unknown_fields(item, inner, f"{path}.{name}")
    return found

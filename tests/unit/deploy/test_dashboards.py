"""The dashboards and rules: each expression is PromQL, and asks only for what a service exports."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from scheduler.observe.catalogue import CATALOGUE, CONSTANT_LABELS

FOLDER = Path(__file__).resolve().parents[3] / "deploy" / "dashboards"
LABELS = {
    sample: {*metric.labels, *CONSTANT_LABELS, *(["le"] if sample.endswith("_bucket") else [])}
    for metric in CATALOGUE
    for sample in metric.sample_names
}
"""Labels of every line of the text format, by its name."""


def dashboards() -> dict[str, Any]:
    return {path.name: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}


def rules() -> list[dict[str, Any]]:
    content = yaml.safe_load((FOLDER / "purefill-rules.yaml").read_text())
    return [rule for group in content["groups"] for rule in group["rules"]]


def expressions() -> Iterator[tuple[str, str]]:
    for name, board in dashboards().items():
        for panel in board["panels"]:
            for target in panel["targets"]:
                expression = target["expr"].replace("$__rate_interval", "5m").replace("$model", ".*")
                yield f"{name}: {panel['title']} {target['refId']}", expression
    for rule in rules():
        yield rule.get("alert") or rule["record"], rule["expr"]


def selectors(expression: Any) -> Iterator[Any]:
    """Yield every selector of a parsed expression."""
    if isinstance(expression, promql_parser.VectorSelector):
        yield expression
    elif isinstance(expression, promql_parser.MatrixSelector):
        yield expression.vector_selector
    else:
        parts = [getattr(expression, name, None) for name in ("lhs", "rhs", "expr", "param")]
        for part in (*parts, *getattr(expression, "args", ())):
            if isinstance(part, promql_parser.Expr):
                yield from selectors(part)


def groupings(expression: Any) -> Iterator[tuple[set[str], Any]]:
    """Yield the labels of each ``by``, and the expression that they are of."""
    if isinstance(expression, promql_parser.AggregateExpr) and expression.modifier is not None:
        yield set(expression.modifier.labels), expression.expr
    for name in ("lhs", "rhs", "expr"):
        if isinstance(part := getattr(expression, name, None), promql_parser.Expr):
            yield from groupings(part)
    for part in getattr(expression, "args", ()):
        yield from groupings(part)


@pytest.mark.parametrize(("where", "text"), [*expressions()])
def test_an_expression_asks_for_what_is_exported(where: str, text: str) -> None:
    recorded = {rule["record"]: {"model", "worker"} for rule in rules() if "record" in rule}
    known = LABELS | recorded
    parsed = promql_parser.parse(text)
    found = [*selectors(parsed)]
    assert found
    for selector in found:
        assert selector.name in known, where
        assert {matcher.name for matcher in selector.matchers.matchers} <= known[selector.name], where
    for labels, of in groupings(parsed):
        for selector in selectors(of):
            assert labels <= known[selector.name], where


def test_a_mistake_would_be_found() -> None:
    parsed = promql_parser.parse(
        "histogram_quantile(0.9, sum by (le, nothing) (rate(purefill_wrong_bucket[5m])))"
    )
    assert [selector.name for selector in selectors(parsed)] == ["purefill_wrong_bucket"]
    assert [labels for labels, _ in groupings(parsed)] == [{"le", "nothing"}]
    with pytest.raises(ValueError, match="unclosed"):
        promql_parser.parse("rate(purefill_x[5m]")


def test_every_figure_is_shown_or_told() -> None:
    """But for what says how something else was measured."""
    asked = {selector.name for _, text in expressions() for selector in selectors(promql_parser.parse(text))}
    unasked = {metric.name for metric in CATALOGUE if not asked & set(metric.sample_names)}
    assert unasked == {
        "purefill_build_info",
        "purefill_queue_tokens",
        "purefill_kv_leases",
        "purefill_decode_stalled_sequences_total",
        "purefill_prefill_flop_utilisation_ratio",
    }


def test_the_files_are_what_their_source_makes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, FOLDER / "generate.py", tmp_path], check=True)
    made = {path.name: path.read_text() for path in tmp_path.iterdir()}
    kept = {path.name: path.read_text() for path in FOLDER.iterdir() if path.suffix in (".json", ".yaml")}
    assert made == kept, "run: python deploy/dashboards/generate.py"


def test_panels_do_not_overlap() -> None:
    for board in dashboards().values():
        places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
        assert len(set(places)) == len(places)
        assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in board["panels"])
    assert len({board["uid"] for board in dashboards().values()}) == 3

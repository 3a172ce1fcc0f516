"""Writes the Grafana dashboards and the Prometheus rules: ``python deploy/dashboards/generate.py [FOLDER]``.

The one source of all of them. Import the JSON files into Grafana (10 or newer), or let it find them by provisioning;
list the YAML file under ``rule_files`` of Prometheus. Without FOLDER, the files beside this one are written.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_PANEL_WIDTH, _PANEL_HEIGHT, _COLUMNS = 8, 8, 3
_MODEL = 'model=~"$model"'
_RATE = "$__rate_interval"


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A plot of some expressions over time."""

    title: str
    unit: str
    """Grafana's name of it."""
    help: str
    targets: tuple[tuple[str, str], ...]
    """Expression and legend of each."""


def _rate(metric: str, by: str = "", labels: str = "") -> str:
    """Return how fast a counter grows, summed over all other labels than `by`."""
    selector = f"{metric}{{{_MODEL}{',' if labels else ''}{labels}}}"
    return f"sum{f' by ({by})' if by else ''} (rate({selector}[{_RATE}]))"


def _quantile(share: float, metric: str, by: str = "") -> str:
    """Return a quantile of a histogram."""
    return f"histogram_quantile({share}, {_rate(f'{metric}_bucket', ', '.join(filter(None, ('le', by))))})"


def _quantiles(metric: str) -> tuple[tuple[str, str], ...]:
    return tuple((_quantile(share, metric), f"p{share * 100:g}") for share in (0.5, 0.9, 0.99))


def _mean(metric: str, by: str = "") -> str:
    return f"{_rate(f'{metric}_sum', by)} / {_rate(f'{metric}_count', by)}"


def _gauge(metric: str, by: str, labels: str = "") -> str:
    return f"sum by ({by}) ({metric}{{{_MODEL}{',' if labels else ''}{labels}}})"


_PADDING = _rate("purefill_prefill_padding_tokens_total")
_UTILISATION = (
    f"{_rate('purefill_prefill_flops_total', 'worker')} / {_rate('purefill_prefill_seconds_sum', 'worker')}"
    f" / max by (worker) (purefill_device_peak_flops{{{_MODEL}}})"
)

DASHBOARDS: dict[str, tuple[str, tuple[Panel, ...]]] = {
    "service": (
        "purefill: service",
        (
            Panel(
                title="Requests",
                unit="reqps",
                help="Sequences that ended, by outcome.",
                targets=((_rate("purefill_requests_total", "outcome"), "{{outcome}}"),),
            ),
            Panel(
                title="Time to first token",
                unit="s",
                help="From a request's arrival at the ApiServer.",
                targets=_quantiles("purefill_time_to_first_token_seconds"),
            ),
            Panel(
                title="Time between tokens",
                unit="s",
                help="From a token of a sequence to its next one.",
                targets=_quantiles("purefill_inter_token_seconds"),
            ),
            Panel(
                title="Time of a request",
                unit="s",
                help="From its arrival to its end.",
                targets=_quantiles("purefill_request_seconds"),
            ),
            Panel(
                title="Tokens",
                unit="short",
                help="Per second: of accepted prompts, and produced.",
                targets=(
                    (_rate("purefill_prompt_tokens_total"), "in"),
                    (_rate("purefill_output_tokens_total"), "out"),
                ),
            ),
            Panel(
                title="Queue",
                unit="short",
                help="Sequences that wait, by class, and all that have not ended.",
                targets=(
                    (_gauge("purefill_queue_requests", "class"), "waiting, class {{class}}"),
                    (f"sum (purefill_live_requests{{{_MODEL}}})", "live"),
                ),
            ),
            Panel(
                title="Refused",
                unit="reqps",
                help="Requests that were not accepted, by reason.",
                targets=((_rate("purefill_rejections_total", "reason"), "{{reason}}"),),
            ),
            Panel(
                title="HTTP answers",
                unit="reqps",
                help="By status.",
                targets=((_rate("purefill_http_requests_total", "code"), "{{code}}"),),
            ),
            Panel(
                title="Journal lag",
                unit="s",
                help="How long the oldest token waits that is to be written into the journal.",
                targets=(
                    (f"max by (api_server) (purefill_journal_lag_seconds{{{_MODEL}}})", "{{api_server}}"),
                ),
            ),
        ),
    ),
    "batching": (
        "purefill: batching",
        (
            Panel(
                title="Batches",
                unit="ops",
                help="By what made them leave. Mostly timeout: too little load for this size, or too short a hold.",
                targets=((_rate("purefill_batches_total", "reason"), "{{reason}}"),),
            ),
            Panel(
                title="Requests of a batch",
                unit="short",
                help="The mean, by what made it leave.",
                targets=((_mean("purefill_prefill_batch_requests", "reason"), "{{reason}}"),),
            ),
            Panel(
                title="Tokens of a batch",
                unit="short",
                help="Without padding.",
                targets=_quantiles("purefill_prefill_batch_tokens"),
            ),
            Panel(
                title="Waiting for prefill, p90",
                unit="s",
                help="Altogether, and the part in which it was held for others to join. The rest waited for a worker "
                "or for pages.",
                targets=(
                    (_quantile(0.9, "purefill_wait_seconds"), "waited"),
                    (_quantile(0.9, "purefill_hold_seconds"), "held"),
                ),
            ),
            Panel(
                title="Padding",
                unit="percentunit",
                help="Share of the computed token positions.",
                targets=(
                    (f"{_PADDING} / ({_PADDING} + {_rate('purefill_prefill_tokens_total')})", "padding"),
                ),
            ),
            Panel(
                title="Passes in a bucket",
                unit="ops",
                help="Of prefill: replays of graphs.",
                targets=((_rate("purefill_graph_replays_total", "bucket", 'pool="prefill"'), "{{bucket}}"),),
            ),
            Panel(
                title="Passes without a graph",
                unit="ops",
                help="By pool and reason; should be none.",
                targets=((_rate("purefill_eager_steps_total", "pool, reason"), "{{pool}}: {{reason}}"),),
            ),
            Panel(
                title="Time of a prefill batch",
                unit="s",
                help="In its worker.",
                targets=_quantiles("purefill_prefill_seconds"),
            ),
            Panel(
                title="Past their deadline",
                unit="reqps",
                help="Requests that left the queue later than their first token was wished for.",
                targets=((_rate("purefill_requests_past_deadline_total"), "late"),),
            ),
        ),
    ),
    "pools": (
        "purefill: GPU pools",
        (
            Panel(
                title="Workers",
                unit="short",
                help="By pool and state.",
                targets=((_gauge("purefill_workers", "pool, state"), "{{pool}} {{state}}"),),
            ),
            Panel(
                title="Busy",
                unit="percentunit",
                help="Share of the time in which a worker computed.",
                targets=(
                    (_rate("purefill_prefill_seconds_sum", "worker"), "{{worker}}"),
                    (_rate("purefill_decode_step_seconds_sum", "worker"), "{{worker}}"),
                ),
            ),
            Panel(
                title="Model FLOP utilisation of prefill",
                unit="percentunit",
                help="While it computed. No data where the device's peak is not known.",
                targets=((_UTILISATION, "{{worker}}"),),
            ),
            Panel(
                title="KV pages",
                unit="short",
                help="Of each decode worker.",
                targets=((_gauge("purefill_kv_pages", "worker, state"), "{{worker}} {{state}}"),),
            ),
            Panel(
                title="Prefix cache",
                unit="percentunit",
                help="Share of the tokens of prompts that were not computed, as their KV was cached.",
                targets=(
                    (
                        f"{_rate('purefill_prefix_cache_hit_tokens_total')}"
                        f" / {_rate('purefill_prefix_cache_query_tokens_total')}",
                        "hits",
                    ),
                ),
            ),
            Panel(
                title="Cached pages",
                unit="short",
                help="Of each decode worker, and those that were evicted per second.",
                targets=(
                    (_gauge("purefill_prefix_cache_pages", "worker"), "{{worker}}"),
                    (_rate("purefill_prefix_cache_evicted_pages_total", "worker"), "{{worker}} evicted"),
                ),
            ),
            Panel(
                title="Decode step",
                unit="s",
                help="Its time, 9 of 10 steps.",
                targets=((_quantile(0.9, "purefill_decode_step_seconds", "worker"), "{{worker}}"),),
            ),
            Panel(
                title="Sequences of a decode step",
                unit="short",
                help="The mean.",
                targets=((_mean("purefill_decode_step_sequences", "worker"), "{{worker}}"),),
            ),
            Panel(
                title="Handoff",
                unit="s",
                help="Bringing the pages of a batch to their decode worker, 99 of 100.",
                targets=((_quantile(0.99, "purefill_handoff_seconds", "transport"), "{{transport}}"),),
            ),
            Panel(
                title="Pages handed off",
                unit="Bps",
                help="Bytes per second.",
                targets=((_rate("purefill_handoff_bytes_total", "transport"), "{{transport}}"),),
            ),
            Panel(
                title="Computed again",
                unit="reqps",
                help="Requests that were put back into the queue, by reason, and what was refused under leases that "
                "had ended.",
                targets=(
                    (_rate("purefill_requeues_total", "reason"), "{{reason}}"),
                    (_rate("purefill_leases_refused_total", "what"), "refused {{what}}"),
                    (_rate("purefill_worker_restarts_total", "worker"), "{{worker}} restarted"),
                ),
            ),
        ),
    ),
}

RECORDS = {
    "purefill:prefill_padding:ratio_rate5m": "sum by (model) (rate(purefill_prefill_padding_tokens_total[5m])) / "
    "(sum by (model) (rate(purefill_prefill_padding_tokens_total[5m])) "
    "+ sum by (model) (rate(purefill_prefill_tokens_total[5m])))",
    "purefill:prefill_flop_utilisation:ratio_rate5m": "sum by (model, worker) "
    "(rate(purefill_prefill_flops_total[5m])) / sum by (model, worker) (rate(purefill_prefill_seconds_sum[5m])) "
    "/ max by (model, worker) (purefill_device_peak_flops)",
    "purefill:time_to_first_token_seconds:p99_rate5m": "histogram_quantile(0.99, sum by (model, le) "
    "(rate(purefill_time_to_first_token_seconds_bucket[5m])))",
}

# Name: expression, how long it must hold, severity, and what to tell.
ALERTS: dict[str, tuple[str, str, str, str]] = {
    "PurefillDown": (
        'absent(purefill_start_time_seconds{pool="scheduler"})',
        "1m",
        "critical",
        "No service is scraped, or its scheduler does not answer.",
    ),
    "PurefillWorkerDead": (
        'sum by (model, pool) (purefill_workers{state="dead"}) > 0',
        "2m",
        "critical",
        "{{ $value }} {{ $labels.pool }} workers of {{ $labels.model }} are dead and have not come back.",
    ),
    "PurefillPoolEmpty": (
        'sum by (model, pool) (purefill_workers{state="ready"}) == 0',
        "1m",
        "critical",
        "No {{ $labels.pool }} worker of {{ $labels.model }} is ready.",
    ),
    "PurefillRestarts": (
        "sum by (model, worker) (increase(purefill_worker_restarts_total[30m])) > 3",
        "0m",
        "warning",
        "{{ $labels.worker }} was started again {{ $value }} times in half an hour.",
    ),
    "PurefillRequestsFail": (
        'sum by (model) (rate(purefill_requests_total{outcome=~"worker_failed|unavailable|internal"}[5m])) > 0',
        "5m",
        "critical",
        "{{ $value }} requests a second fail.",
    ),
    "PurefillOverloaded": (
        'sum by (model) (rate(purefill_rejections_total{reason="overloaded"}[5m])) > 0',
        "5m",
        "warning",
        "{{ $value }} requests a second are turned away because the queue is full.",
    ),
    "PurefillSlowFirstToken": (
        "purefill:time_to_first_token_seconds:p99_rate5m > 2",
        "10m",
        "warning",
        "One request of a hundred waits {{ $value }} s for its first token.",
    ),
    "PurefillNoFreePages": (
        'sum by (model) (purefill_kv_pages{state="free"}) == 0',
        "5m",
        "warning",
        "No decode worker has had free KV pages: more workers or more --kv-memory.",
    ),
    "PurefillPreemptions": (
        "sum by (model) (rate(purefill_preemptions_total[10m])) > 0.1",
        "10m",
        "warning",
        "{{ $value }} sequences a second leave their pages and are computed again.",
    ),
    "PurefillHandoffFails": (
        'sum by (model) (rate(purefill_requeues_total{reason="handoff_failed"}[10m])) > 0',
        "10m",
        "warning",
        "KV pages do not reach their decode workers.",
    ),
    "PurefillEagerPrefill": (
        'sum by (model, worker, reason) (rate(purefill_eager_steps_total{reason!="prompt_logprobs"}[10m])) > 0',
        "10m",
        "warning",
        "{{ $labels.worker }} computes without graphs: {{ $labels.reason }}.",
    ),
    "PurefillPadding": (
        "purefill:prefill_padding:ratio_rate5m > 0.5",
        "30m",
        "info",
        "Most of what prefill computes is padding: other --graph-config capture_tokens, or larger batches.",
    ),
    "PurefillJournalDown": (
        "min by (model, api_server) (purefill_journal_up) == 0",
        "1m",
        "critical",
        "{{ $labels.api_server }} cannot reach its journal.",
    ),
    "PurefillUnjournaled": (
        "sum by (model) (increase(purefill_unjournaled_requests[10m])) > 0",
        "0m",
        "warning",
        "{{ $value }} requests went on without the journal.",
    ),
    "PurefillJournalLags": (
        "max by (model) (purefill_journal_lag_seconds) > 5",
        "2m",
        "critical",
        "The journal is {{ $value }} s behind: what was accepted since would be lost with the service.",
    ),
}


def dashboard(name: str) -> dict[str, Any]:
    """Return a dashboard in Grafana's form."""
    title, panels = DASHBOARDS[name]
    return {
        "uid": f"purefill-{name}",
        "title": title,
        "tags": ["purefill"],
        "timezone": "browser",
        "schemaVersion": 39,
        "version": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [_source_variable(), _model_variable()]},
        "panels": [_panel(number, panel) for number, panel in enumerate(panels)],
    }


def _source_variable() -> dict[str, Any]:
    return {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _model_variable() -> dict[str, Any]:
    return {
        "name": "model",
        "label": "Model",
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "$source"},
        "query": "label_values(purefill_build_info, model)",
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "$source"}
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.help,
        "datasource": source,
        "gridPos": {
            "x": number % _COLUMNS * _PANEL_WIDTH,
            "y": number // _COLUMNS * _PANEL_HEIGHT,
            "w": _PANEL_WIDTH,
            "h": _PANEL_HEIGHT,
        },
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": source, "expr": expression, "legendFormat": legend}
            for i, (expression, legend) in enumerate(panel.targets)
        ],
    }


def rules() -> dict[str, Any]:
    """Return the rules in Prometheus' form."""
    records = [{"record": name, "expr": expression} for name, expression in RECORDS.items()]
    alerts = [
        {
            "alert": name,
            "expr": expression,
            "for": held,
            "labels": {"severity": severity},
            "annotations": {"summary": summary},
        }
        for name, (expression, held, severity, summary) in ALERTS.items()
    ]
    return {
        "groups": [
            {"name": "purefill-records", "rules": records},
            {"name": "purefill-alerts", "rules": alerts},
        ]
    }


def main() -> None:
    """Write all files."""
    folder = Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent
    for name in DASHBOARDS:
        (folder / f"purefill-{name}.json").write_text(json.dumps(dashboard(name), indent=2) + "\n")
    (folder / "purefill-rules.yaml").write_text(yaml.safe_dump(rules(), sort_keys=False, width=110))


if __name__ == "__main__":
    main()

"""What a real service shows after a load that is known to the token: scraped, and every figure compared.

And which requests are prefilled together, seen through the same figures.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from graphs.buckets import BucketLadder, default_token_ladder
from tests.support.service import Service, serve

TIMEOUT_MS = 3000
NUM_BATCHES, BATCH, OUTPUT_TOKENS = 3, 8, 6
LENGTHS = (5, 9, 14)
"""Tokens of each prompt of the first, the second and the third batch."""

Sample = tuple[str, frozenset[tuple[str, str]]]


@pytest.fixture(scope="module")
def patient() -> Iterator[Service]:
    """A service that holds prompts so long that those of one test surely meet.

    Its metrics have a port of their own, and its log is JSON.
    """
    options = ("--batch-timeout-ms", str(TIMEOUT_MS), "--metrics-port", "0", "--log-format", "json")
    with serve(*options, env={"RAY_metrics_report_interval_ms": "4000"}) as running:
        yield running


def scrape(url: str) -> dict[Sample, float]:
    text = httpx.get(url).raise_for_status().text
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def complete(client: httpx.AsyncClient, service: Service, prompts: list[list[int]]) -> None:
    """Send each prompt as a request of its own, all at once."""
    fields = {"model": service.model, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
    bodies = [{**fields, "prompt": prompt} for prompt in prompts]
    for answer in await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies)):
        assert answer.raise_for_status().json()["usage"]["completion_tokens"] == OUTPUT_TOKENS


@pytest.fixture(scope="module")
def growth(patient: Service) -> Callable[..., float]:
    """The growth of a figure through 24 requests in 3 full batches, and 2 that are refused."""
    before = scrape(patient.metrics_url)

    async def run() -> None:
        async with httpx.AsyncClient(base_url=patient.url, timeout=120) as client:
            for length in LENGTHS:
                await complete(client, patient, [[7 + i] * length for i in range(BATCH)])
            body = {"model": patient.model, "prompt": "x", "max_tokens": -1}
            assert (await client.post("/v1/completions", json=body)).status_code == 400
            body = {"model": "no", "prompt": "x"}
            assert (await client.post("/v1/completions", json=body)).status_code == 404
            assert (await client.get("/v1/nothing")).status_code == 404

    asyncio.run(run())
    after = scrape(patient.metrics_url)

    def of(name: str, **labels: str) -> float:
        wanted = labels.items()
        matching = [sample for sample in after if sample[0] == name and wanted <= dict(sample[1]).items()]
        assert matching, f"there is no {name} with {labels}"
        return sum(after[sample] - before.get(sample, 0) for sample in matching)

    return of


def buckets_of_the_load() -> list[tuple[str, int, int]]:
    """Name, tokens and padding of the bucket of each batch."""
    ladder = BucketLadder(default_token_ladder(512), (BATCH,))
    fitting = [(ladder.fit(BATCH * length, BATCH), BATCH * length) for length in LENGTHS]
    return [(str(bucket), tokens, bucket.num_tokens - tokens) for bucket, tokens in fitting]


def test_batches_are_counted_to_the_token(growth: Callable[..., float]) -> None:
    expected = buckets_of_the_load()
    num_tokens = sum(tokens for _, tokens, _ in expected)
    assert growth("purefill_batches_total", reason="full") == growth("purefill_batches_total") == NUM_BATCHES
    for figure in ("prefill_batch_requests", "prefill_batch_tokens", "prefill_seconds"):
        assert growth(f"purefill_{figure}_count") == NUM_BATCHES
    assert growth("purefill_prefill_batch_requests_bucket", le="6.0") == 0
    assert growth("purefill_prefill_batch_requests_bucket", le="8.0", reason="full") == NUM_BATCHES
    assert growth("purefill_prefill_batch_tokens_sum") == num_tokens
    assert growth("purefill_prefill_tokens_total", pool="prefill", worker="prefill-0") == num_tokens
    assert growth("purefill_prefill_padding_tokens_total") == sum(padding for *_, padding in expected)
    for bucket, *_ in expected:
        assert growth("purefill_graph_replays_total", bucket=bucket, pool="prefill") == 1
    assert growth("purefill_graph_replays_total", pool="prefill") == NUM_BATCHES
    assert growth("purefill_prefill_flops_total") > 2 * 100e6 * num_tokens  # most of 135 M parameters


def test_requests_and_tokens(growth: Callable[..., float]) -> None:
    num_requests = NUM_BATCHES * BATCH
    assert growth("purefill_requests_total", outcome="length") == num_requests
    assert growth("purefill_requests_total") == num_requests
    assert growth("purefill_prompt_tokens_total") == BATCH * sum(LENGTHS)
    assert growth("purefill_output_tokens_total") == num_requests * OUTPUT_TOKENS
    assert growth("purefill_output_tokens_total", pool="prefill") == num_requests
    assert growth("purefill_rejections_total", reason="invalid") == 1
    assert growth("purefill_rejections_total", reason="model_not_found") == 1
    assert growth("purefill_rejections_total") == 2
    assert growth("purefill_http_requests_total", route="/v1/completions", code="200") == num_requests
    assert growth("purefill_http_requests_total", route="/v1/completions", code="400") == 1
    assert growth("purefill_http_requests_total", route="other", code="404") == 1
    assert growth("purefill_requeues_total") == growth("purefill_preemptions_total") == 0
    assert growth("purefill_leases_refused_total") == growth("purefill_worker_restarts_total") == 0


def test_times(growth: Callable[..., float]) -> None:
    num_requests = NUM_BATCHES * BATCH
    assert growth("purefill_time_to_first_token_seconds_count") == num_requests
    assert growth("purefill_request_seconds_count") == num_requests
    assert growth("purefill_inter_token_seconds_count") == num_requests * (OUTPUT_TOKENS - 1)
    for figure in ("wait", "hold"):
        assert growth(f"purefill_{figure}_seconds_count", reason="full") == num_requests
    first, whole = (growth(f"purefill_{figure}_seconds_sum") for figure in ("time_to_first_token", "request"))
    assert 0 < growth("purefill_hold_seconds_sum") <= growth("purefill_wait_seconds_sum") < first < whole
    assert whole == pytest.approx(first + growth("purefill_inter_token_seconds_sum"))
    assert BATCH * growth("purefill_prefill_seconds_sum") < first


def test_decode_and_handoff(growth: Callable[..., float]) -> None:
    sequences = growth("purefill_decode_step_sequences_sum")
    assert sequences == NUM_BATCHES * BATCH * (OUTPUT_TOKENS - 1)
    steps = growth("purefill_decode_step_sequences_count")
    assert steps == growth("purefill_decode_step_seconds_count", worker="decode-0")
    assert steps == growth("purefill_graph_replays_total", pool="decode")
    assert sequences / BATCH <= steps < sequences
    assert growth("purefill_handoff_seconds_count", transport="shm") == NUM_BATCHES
    assert growth("purefill_handoff_bytes_total") > 0


def test_gauges_when_nothing_runs(patient: Service, growth: Callable[..., float]) -> None:
    now = scrape(patient.metrics_url)

    def of(name: str) -> list[float]:
        return [value for (found, _), value in now.items() if found == name]

    for name in ("live_requests", "queue_requests", "queue_tokens", "kv_leases", "journal_lag_seconds"):
        assert set(of(f"purefill_{name}")) == {0}
    pages = {dict(labels)["state"]: v for (name, labels), v in now.items() if name == "purefill_kv_pages"}
    assert pages["used"] == pages["reserved"] == 0 < pages["free"]
    assert sum(of("purefill_workers")) == 2
    assert of("purefill_build_info") == [1]
    assert len(of("purefill_start_time_seconds")) == 4
    assert all(dict(labels)["model"] == patient.model for name, labels in now if name.startswith("purefill_"))
    assert httpx.get(f"{patient.url}/metrics").status_code == 404


def test_the_log_is_json_and_has_a_line_for_each_request(
    patient: Service, growth: Callable[..., float]
) -> None:
    entries = [json.loads(line) for line in patient.log_until('"/v1/nothing"')]
    lines = [entry for entry in entries if entry.get("path") == "/v1/completions"]
    done = [entry for entry in lines if entry["status"] == 200]
    assert len(done) == NUM_BATCHES * BATCH
    assert sorted(entry["prompt_tokens"] for entry in done) == sorted(LENGTHS * BATCH)
    for entry in done:
        assert (entry["outcome"], entry["output_tokens"]) == ("length", OUTPUT_TOKENS)
        assert entry["queued_s"] + entry["held_s"] + entry["prefill_s"] <= entry["first_token_s"]
        assert entry["first_token_s"] < entry["seconds"]
        assert entry["request_id"]
    refused = [entry["outcome"] for entry in lines if entry["status"] != 200]
    assert sorted(refused) == ["invalid", "model_not_found"]
    assert not any("prompt" in entry for entry in entries)


def test_the_status_agrees_with_ray(patient: Service) -> None:
    command = [sys.executable, "-m", "scheduler.cli", "status", "--url", patient.url]
    told = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    status = json.loads(told.stdout)
    assert (status["ready"], status["problem"], status["model"]) == (True, None, patient.model)
    listed = patient.ray_view()["actors"]
    assert {actor["name"] for actor in status["actors"]} == listed.keys()
    assert {actor["state"] for actor in status["actors"]} == {"ready"}
    assert set(listed.values()) == {"ALIVE"}
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert re.search(r"^prefill-0 +prefill +ready", text, re.MULTILINE)
    assert "serves" in text


def test_ray_shows_the_same_figures(patient: Service, growth: Callable[..., float]) -> None:
    """Each at the Prometheus endpoint of the node where the actor runs, and with Ray's prefix."""
    wanted = {name: value for name, value in scrape(patient.metrics_url).items() if name[0] in COMPARED}
    assert len(wanted) > 10
    (endpoint,) = patient.ray_view()["endpoints"]
    shown: dict[Sample, float] = {}
    while any(shown.get(sample) != value for sample, value in wanted.items()):
        shown = {
            (name.removeprefix("ray_"), frozenset(pair for pair in labels if pair[0] in LABELS)): value
            for (name, labels), value in scrape(endpoint).items()
        }


COMPARED = {
    "purefill_batches_total",
    "purefill_prefill_padding_tokens_total",
    "purefill_graph_replays_total",
    "purefill_output_tokens_total",
    "purefill_requests_total",
    "purefill_decode_step_seconds_count",
    "purefill_time_to_first_token_seconds_bucket",
    "purefill_kv_pages",
}
LABELS = {"model", "pool", "worker", "bucket", "reason", "outcome", "state", "le"}


def send(service: Service, prompts: list[str]) -> list[dict[str, Any]]:
    """Send each prompt as a request of its own, all at once; return the answers."""

    async def run() -> list[dict[str, Any]]:
        async with httpx.AsyncClient(base_url=service.url, timeout=120) as client:
            fields = {"model": service.model, "max_tokens": 4, "ignore_eos": True}
            bodies = [{**fields, "prompt": prompt} for prompt in prompts]
            answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
            return [answer.raise_for_status().json() for answer in answers]

    return asyncio.run(run())


def batches(service: Service) -> dict[str, float]:
    return {
        "full": service.metric("purefill_batches_total", reason="full"),
        "timeout": service.metric("purefill_batches_total", reason="timeout"),
        "requests": service.metric("purefill_prefill_batch_requests_sum"),
    }


def batches_since(service: Service, before: dict[str, float]) -> dict[str, float]:
    return {name: value - before[name] for name, value in batches(service).items()}


@pytest.mark.parametrize(
    ("num_prompts", "expected"),
    [
        (8, {"full": 1, "timeout": 0, "requests": 8}),
        (3, {"full": 0, "timeout": 1, "requests": 3}),
        (1, {"full": 0, "timeout": 1, "requests": 1}),
    ],
)
def test_prompts_that_wait_together_are_one_batch(
    num_prompts: int, expected: dict[str, float], patient: Service
) -> None:
    before, started = batches(patient), time.monotonic()
    answers = send(patient, [f"Prompt number {i} of the test" for i in range(num_prompts)])
    assert all(answer["usage"]["completion_tokens"] == 4 for answer in answers)
    assert batches_since(patient, before) == expected
    line = [line for line in patient.log if " batch " in line or "batch" in line.split(")")[-1]][-1]
    match = re.search(r"(\d+) requests, \d+ tokens, (full|timeout), oldest waited ([\d.]+) ms", line)
    assert match is not None, line
    assert int(match[1]) == num_prompts
    if expected["timeout"]:
        assert time.monotonic() - started >= TIMEOUT_MS / 1000


def test_two_full_batches_leave_as_two(patient: Service) -> None:
    before = batches(patient)
    send(patient, ["Once upon a time"] * 16)
    assert batches_since(patient, before) == {"full": 2, "timeout": 0, "requests": 16}

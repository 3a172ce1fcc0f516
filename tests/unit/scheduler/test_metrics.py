from __future__ import annotations

from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from scheduler.actions import SendPrefill
from scheduler.batching.cost_model import CostModel
from scheduler.batching.former import BatchFormer
from scheduler.batching.policies import FixedPolicy
from scheduler.core import QueueLimits, SchedulerCore
from scheduler.messages import (
    DecodeWorkerInfo,
    Figures,
    Heartbeat,
    JournalStatus,
    ModelInfo,
    PoolHandle,
    PrefillOutcome,
    PrefillResult,
    PrefillWorkerInfo,
    Request,
    SamplingParams,
    StepReport,
    TokenEvent,
)
from scheduler.metrics import SchedulerMetrics
from scheduler.observe import catalogue as m
from scheduler.observe.exposition import render

MODEL = ModelInfo(
    name="m", max_model_len=64, vocab_size=9, eos_token_ids=(0,), dtype="float32", num_parameters=1
)


def decode_info(name: str, *, num_pages: int = 8, max_num_seqs: int = 4) -> DecodeWorkerInfo:
    return DecodeWorkerInfo(
        name=name,
        model=MODEL,
        pool=PoolHandle(
            decode_worker=name,
            transport="shm",
            address="",
            incarnation=1,
            num_pages=num_pages,
            page_size=4,
            size_bytes=0,
        ),
        max_num_seqs=max_num_seqs,
        device="cpu",
        load_seconds=0.0,
        weights_bytes=0,
    )


def prefill_info(name: str, peak_flops: float | None = None) -> PrefillWorkerInfo:
    return PrefillWorkerInfo(
        name=name,
        model=MODEL,
        buckets=("16x4",),
        graph_bytes=0,
        uses_cuda_graphs=False,
        bucket_seconds={},
        device="cpu",
        load_seconds=0.0,
        warmup_seconds=0.0,
        peak_flops=peak_flops,
    )


class Bench:
    """A scheduler's core and its metrics, on a clock that the test moves."""

    def __init__(self, *, max_requests: int = 2, timeout_s: float = 1.0) -> None:
        self.now = 1000.0
        self.metrics = SchedulerMetrics(clock=lambda: self.now)
        cost_model = CostModel.proportional([16])
        policy = FixedPolicy(max_requests=max_requests, timeout_s=timeout_s, cost_model=cost_model)
        self.core = SchedulerCore(
            BatchFormer(policy, cost_model), QueueLimits(max_requests=9, max_tokens=99), self.metrics
        )

    def submit(self, request_id: str, *, num_tokens: int = 3, priority: int = 0) -> list[SendPrefill]:
        request = Request(
            request_id=request_id,
            api_server="api-0",
            prompt_token_ids=(1,) * num_tokens,
            sampling=SamplingParams(max_tokens=4),
            priority=priority,
        )
        assert self.core.submit([request], self.now) is None
        return self.tick()

    def tick(self) -> list[SendPrefill]:
        return [action for action in self.core.tick(self.now) if isinstance(action, SendPrefill)]

    def values(self, metric: m.Metric) -> dict[tuple[str, ...], float]:
        """Return a metric's values; of a histogram its sums."""
        figures = self.metrics.figures(self.core)
        if metric.kind == "histogram":
            return {labels: series[0] for labels, series in figures.histograms[metric.name].items()}
        values = figures.counters if metric.kind == "counter" else figures.gauges
        return dict(values.get(metric.name, {}))


def test_the_pages_of_a_worker_that_died_are_shown_no_more_and_what_it_counted_stays() -> None:
    bench = Bench()
    for name in ("decode-0", "decode-1"):
        bench.core.add_decode_worker(decode_info(name))
    step = StepReport(worker="decode-1", seconds=0.5, events=(), released=(), bucket="2x2")
    bench.core.step_done(step, bench.now)
    assert bench.values(m.KV_PAGES)["decode", "decode-1", "free"] == 7
    bench.metrics.worker_died("decode-1")
    bench.core.worker_lost("decode-1", bench.now)
    assert {worker for _, worker, _ in bench.values(m.KV_PAGES)} == {"decode-0"}
    assert bench.values(m.WORKERS)["decode", "dead"] == bench.values(m.WORKERS)["decode", "ready"] == 1
    bench.core.add_decode_worker(decode_info("decode-1"))
    bench.core.step_done(replace(step, number=1), bench.now)
    assert bench.values(m.STEP_SECONDS)["decode", "decode-1"] == 1.0
    assert bench.values(m.WORKER_RESTARTS) == {("decode", "decode-0"): 0, ("decode", "decode-1"): 1}
    assert bench.values(m.WORKERS)["decode", "dead"] == 0


def test_waiting_for_a_worker_is_not_being_held_for_others() -> None:
    """A batch of two: the first is held 0.4 s for the second. The third and fourth wait 2 s for the worker."""
    bench = Bench()
    bench.core.add_prefill_worker(replace(prefill_info("prefill-0"), bucket_seconds={"16x4": 1.5}))
    bench.core.add_decode_worker(decode_info("decode-0"))
    assert not bench.submit("a")
    bench.now += 0.4
    (first,) = bench.submit("b")
    assert [(item.queued_s, pytest.approx(item.held_s)) for item in first.batch.items] == [(0, 0.4), (0, 0)]
    bench.submit("c")
    bench.submit("d")
    bench.now += 2.0
    outcomes = [PrefillOutcome(request_id=i, token_id=7, finish_reason="length") for i in "ab"]
    result = PrefillResult(
        batch_id=first.batch.batch_id,
        worker="prefill-0",
        outcomes=tuple(outcomes),
        num_tokens=6,
        padding_tokens=10,
        replays={"16x4": 1},
        seconds=1.5,
    )
    bench.core.prefill_done(result, bench.now)
    (second,) = bench.tick()
    assert [(item.queued_s, item.held_s) for item in second.batch.items] == [(2.0, 0.0)] * 2
    assert bench.values(m.WAIT_SECONDS)["full",] == pytest.approx(4.4)
    assert bench.values(m.HOLD_SECONDS)["full",] == pytest.approx(0.4)
    assert bench.values(m.BATCHES)["full",] == 2
    assert bench.values(m.PADDING_TOKENS) == {("prefill", "prefill-0"): 10}
    assert bench.values(m.OUTPUT_TOKENS)["prefill", "prefill-0"] == 2
    assert bench.values(m.REQUESTS)["length",] == 2


def test_the_queue_by_class() -> None:
    bench = Bench(max_requests=9)
    bench.core.add_prefill_worker(prefill_info("prefill-0"))
    bench.core.add_decode_worker(decode_info("decode-0", num_pages=64, max_num_seqs=9))
    for number, priority in enumerate([0, 5, 5, 100, 50, -11]):
        bench.submit(str(number), num_tokens=2 + number, priority=priority)
    counts = {("0",): 1, ("5",): 2, ("10",): 2, ("-10",): 1, ("returned",): 0}
    assert bench.values(m.QUEUE_REQUESTS) == counts
    assert bench.values(m.QUEUE_TOKENS) == {
        ("0",): 2,
        ("5",): 7,
        ("10",): 11,
        ("-10",): 7,
        ("returned",): 0,
    }
    for number in range(6):
        bench.core.cancel(str(number), bench.now)
    assert bench.values(m.QUEUE_REQUESTS) == dict.fromkeys(counts, 0)


@pytest.mark.parametrize("peak", [None, 4e12])
def test_utilisation_is_absent_where_the_peak_is_not_known(peak: float | None) -> None:
    bench = Bench()
    bench.core.add_prefill_worker(prefill_info("prefill-0", peak))
    result = PrefillResult(
        batch_id=1,
        worker="prefill-0",
        outcomes=(),
        num_tokens=8,
        padding_tokens=0,
        replays={},
        seconds=0.5,
        flops=1e12,
    )
    bench.metrics.prefilled(result)
    worker = ("prefill", "prefill-0")
    assert bench.values(m.PREFILL_FLOPS)[worker] == 1e12
    assert bench.values(m.PREFILL_UTILISATION) == ({} if peak is None else {worker: 0.5})
    assert bench.values(m.PEAK_FLOPS) == ({} if peak is None else {worker: peak})


def test_steps_by_bucket_and_reason() -> None:
    bench = Bench()
    bench.core.add_decode_worker(decode_info("decode-0"))
    events = tuple(TokenEvent(request_id=i, index=1, token_id=3) for i in "ab")
    report = StepReport(worker="decode-0", seconds=0.25, events=events, released=(), bucket="2x2")
    bench.core.step_done(report, bench.now)
    bench.core.step_done(replace(report, number=2, eager_reason="disabled"), bench.now)
    bench.core.step_done(replace(report, number=3, events=(), bucket="", num_stalled=2), bench.now)
    assert bench.values(m.REPLAYS) == {("decode", "decode-0", "2x2"): 1}
    assert bench.values(m.EAGER_STEPS) == {("decode", "decode-0", "disabled"): 1}
    assert bench.values(m.STEP_SEQUENCES) == {("decode", "decode-0"): 4}
    assert bench.values(m.STEP_SECONDS) == {("decode", "decode-0"): 0.5}
    assert bench.values(m.STALLED) == {("decode", "decode-0"): 2}


def test_actors_and_their_states() -> None:
    bench = Bench()
    bench.core.add_prefill_worker(prefill_info("prefill-0"))
    bench.now += 1
    for name in ("decode-0", "decode-1"):
        bench.core.add_decode_worker(decode_info(name))
    started = Figures(gauges={m.START_TIME.name: {("api", "api-0"): bench.now}})
    bench.metrics.heartbeat(Heartbeat(api_server="api-0", figures=started))

    def states() -> dict[str, str]:
        return {actor.name: actor.state for actor in bench.metrics.actors(bench.core)}

    ready = dict.fromkeys(("scheduler", "prefill-0", "decode-0", "decode-1", "api-0"), "ready")
    assert states() == ready
    bench.core.drain_worker("prefill-0")
    bench.metrics.worker_died("decode-1")
    bench.core.worker_lost("decode-1", bench.now)
    assert states() == ready | {"prefill-0": "draining", "decode-1": "dead"}
    bench.tick()  # prefill-0 has nothing left, and goes
    bench.now += 6
    assert states() == {"scheduler": "ready", "decode-0": "ready", "decode-1": "dead", "api-0": "dead"}
    assert ("prefill", "prefill-0") not in bench.values(m.START_TIME)


def test_each_api_server_says_how_its_journal_does() -> None:
    bench = Bench()
    assert bench.values(m.JOURNAL_UP) == {}
    for number, status in enumerate(
        [
            JournalStatus(is_up=True, lag_s=0.1, num_unjournaled=0),
            JournalStatus(is_up=False, lag_s=2.5, num_unjournaled=7),
        ]
    ):
        heartbeat = Heartbeat(api_server=f"api-{number}", figures=Figures(), journal=status)
        bench.metrics.heartbeat(heartbeat)
    assert bench.values(m.JOURNAL_UP) == {("api-0",): 1, ("api-1",): 0}
    assert bench.values(m.JOURNAL_LAG) == {("api-0",): 0.1, ("api-1",): 2.5}
    assert bench.values(m.UNJOURNALED) == {("api-0",): 0, ("api-1",): 7}


def test_every_series_is_there_before_anything_happens() -> None:
    """A rate begins with the second value of a series: the first event must not be the first value."""
    bench = Bench()
    text = render(bench.metrics.figures(bench.core), {"model": "m"})
    zero = {
        (sample.name, *sample.labels.values())
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.value == 0
    }
    assert ("purefill_batches_total", "m", "timeout") in zero
    assert ("purefill_requeues_total", "m", "preempted") in zero
    assert ("purefill_requests_total", "m", "stop") in zero
    assert ("purefill_time_to_first_token_seconds_count", "m") in zero

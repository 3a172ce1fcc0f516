from __future__ import annotations

from scheduler.batching.cost_model import CostModel
from scheduler.batching.former import BatchFormer
from scheduler.batching.policies import FixedPolicy
from scheduler.core import QueueLimits, SchedulerCore
from scheduler.messages import DecodeWorkerInfo, JournalStatus, ModelInfo, PoolHandle
from scheduler.metrics import SchedulerMetrics


def decode_info(name: str) -> DecodeWorkerInfo:
    return DecodeWorkerInfo(
        name=name,
        model=ModelInfo(
            name="m", max_model_len=64, vocab_size=9, eos_token_ids=(0,), dtype="float32", num_parameters=1
        ),
        pool=PoolHandle(
            decode_worker=name,
            transport="shm",
            address="",
            incarnation=1,
            num_pages=8,
            page_size=4,
            size_bytes=0,
        ),
        max_num_seqs=2,
        device="cpu",
        load_seconds=0.0,
        weights_bytes=0,
    )


def core_with(metrics: SchedulerMetrics) -> SchedulerCore:
    cost_model = CostModel.proportional([16])
    former = BatchFormer(FixedPolicy(max_requests=1, timeout_s=0.0, cost_model=cost_model), cost_model)
    return SchedulerCore(former, QueueLimits(max_requests=1, max_tokens=1), metrics)


def test_each_api_server_says_how_its_journal_does() -> None:
    metrics = SchedulerMetrics()
    core = core_with(metrics)
    assert "purefill_journal_up{" not in metrics.render(core)
    metrics.journal_status("api-0", JournalStatus(is_up=True, lag_s=0.1, num_unjournaled=0))
    metrics.journal_status("api-1", JournalStatus(is_up=False, lag_s=2.5, num_unjournaled=7))
    text = metrics.render(core)
    assert 'purefill_journal_up{api_server="api-0"} 1.0' in text
    assert 'purefill_journal_up{api_server="api-1"} 0.0' in text
    assert 'purefill_journal_lag_seconds{api_server="api-1"} 2.5' in text
    assert 'purefill_unjournaled_requests{api_server="api-1"} 7.0' in text


def test_the_pages_of_a_worker_that_died_are_shown_no_more() -> None:
    metrics = SchedulerMetrics()
    core = core_with(metrics)
    for name in ("decode-0", "decode-1"):
        core.add_decode_worker(decode_info(name))
    page_line = 'purefill_kv_pages{pool="decode",state="free",worker="decode-1"} 7.0'
    assert page_line in metrics.render(core)
    core.worker_lost("decode-1", 0.0)
    text = metrics.render(core)
    assert "decode-1" not in text
    assert page_line.replace("decode-1", "decode-0") in text

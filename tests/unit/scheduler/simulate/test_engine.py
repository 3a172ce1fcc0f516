from __future__ import annotations

import pytest

from scheduler.errors import ConfigError
from scheduler.simulate.collector import Slo
from scheduler.simulate.fleet import Failures, FleetSettings
from scheduler.simulate.synthetic import SyntheticLoad
from scheduler.simulate.traces import Arrival
from tests.unit.scheduler.simulate.helpers import costs, run


def test_one_request_takes_hold_prefill_and_one_step_a_token() -> None:
    (times,), collector = run([Arrival(0.0, 100, 5)])
    assert times.first_token_s == pytest.approx(0.020 + 0.015)
    assert times.last_token_s == pytest.approx(0.035 + 4 * 0.005)
    assert times.outcome == "length"
    assert collector.itl.count == 4
    assert collector.reasons == {"timeout": 1}


def test_messages_and_http_are_on_the_way_of_the_first_token() -> None:
    (times,), _ = run([Arrival(0.0, 100, 2)], of=costs(message_s=0.002, http_s=0.004))
    assert times.first_token_s == pytest.approx(0.004 + 0.020 + 0.002 + 0.015)
    # The decode worker has the sequence two messages after the prefill.
    assert times.last_token_s - times.first_token_s == pytest.approx(2 * 0.002 + 0.005)


def test_a_full_batch_leaves_at_once_and_its_sequences_share_the_steps() -> None:
    ended, collector = run([Arrival(0.0, 16, 11) for _ in range(8)])
    assert collector.batch_requests == {8: 1}
    assert {round(t.first_token_s or 0, 9) for t in ended} == {0.015}
    assert {round(t.last_token_s, 9) for t in ended} == {round(0.015 + 10 * 0.005, 9)}


def test_a_sequence_that_joins_waits_for_the_step_under_way() -> None:
    settings = FleetSettings(max_batch_requests=1, prefill_workers=2)
    arrivals = [Arrival(0.0, 64, 100), Arrival(0.0025, 64, 2)]
    ended, _ = run(arrivals, settings)
    second = ended[0]
    assert second.first_token_s == pytest.approx(0.0125)
    # Steps end each 5 ms from 10 ms on: it joins at 15 ms.
    assert second.last_token_s == pytest.approx(0.020)


def test_context_makes_each_step_longer_than_the_last() -> None:
    (times,), collector = run([Arrival(0.0, 100, 4)], of=costs(decode_seconds_per_context_token=1e-5))
    steps = [0.005 + 1e-5 * tokens for tokens in (101, 102, 103)]
    assert times.last_token_s == pytest.approx(0.035 + sum(steps))
    assert collector.decode_busy_s == pytest.approx(sum(steps))


def test_long_prompts_are_cut_as_a_worker_cuts_them_and_attention_counts() -> None:
    seconds, padding = costs().prefill([512 + 100], max_slots=8)
    assert (seconds, padding) == (pytest.approx(0.050 + 0.015), 28)
    # Two prompts that do not fit into one pass are not cut to fill it.
    assert costs().prefill([300, 300], max_slots=8)[0] == pytest.approx(0.050 + 0.050)
    with_pairs, _ = costs(attention_seconds_per_pair=1e-6).prefill([512], max_slots=8)
    assert with_pairs == pytest.approx(0.050 + 1e-6 * (512**2 / 2 - 512**2 / 16))


def test_when_pages_lack_the_core_lets_the_youngest_wait_and_all_come_to_their_end() -> None:
    arrivals = [Arrival(0.001 * i, 40, 150) for i in range(12)]
    settings = FleetSettings(max_batch_requests=4)
    ended, collector = run(arrivals, settings, of=costs(num_pages=30))
    assert [t.outcome for t in ended] == ["length"] * 12
    assert collector.requeues["preempted"] > 0
    # Each token but the first of a request has one gap, whatever it went through.
    assert collector.itl.count == 12 * 149


def test_workers_that_die_lose_no_request_and_no_token() -> None:
    load = SyntheticLoad(kind="poisson", rate=40, requests=400, prompt=60, output=60)
    settings = FleetSettings(
        prefill_workers=3,
        decode_workers=3,
        failures=Failures(mtbf_s=2.0, repair_s=0.5),
        max_queued_requests=10_000,
    )
    ended, collector = run(load.arrivals(1), settings)
    assert collector.num_deaths > 10
    assert collector.requeues["worker_lost"] > 0
    assert len(ended) == 400
    assert {t.outcome for t in ended} <= {"length", "worker_failed"}
    assert collector.num_completed > 380
    without, _ = run(load.arrivals(1), FleetSettings(prefill_workers=3, decode_workers=3))
    assert sum(t.last_token_s for t in ended) > sum(t.last_token_s for t in without)


def test_while_the_only_worker_of_a_kind_is_away_requests_wait_for_it() -> None:
    load = SyntheticLoad(kind="poisson", rate=10, requests=200, prompt=60, output=30)
    settings = FleetSettings(failures=Failures(mtbf_s=4.0, repair_s=1.0))
    ended, collector = run(load.arrivals(1), settings)
    assert collector.num_deaths > 3
    assert "unavailable" not in collector.outcomes
    assert max((t.first_token_s or 0) - t.arrival_s for t in ended) > 0.5


def test_what_does_not_fit_is_turned_away_as_in_the_service() -> None:
    arrivals = [Arrival(0.0, 3000, 5), *(Arrival(0.0, 10, 5) for _ in range(5))]
    _, collector = run(arrivals, FleetSettings(max_queued_requests=3))
    assert collector.outcomes == {"invalid": 1, "length": 3, "overloaded": 2}


def test_the_slo_counts_requests_that_keep_every_limit() -> None:
    arrivals = [Arrival(0.0, 100, 5), Arrival(1.0, 500, 5)]
    _, collector = run(arrivals, slo=Slo(ttft_s=0.05, itl_s=0.006))
    assert collector.num_good == 1
    _, collector = run(arrivals, slo=Slo(ttft_s=0.1, itl_s=0.004))
    assert collector.num_good == 0


def test_a_worker_beside_another_on_one_device_makes_both_slower() -> None:
    arrivals = [Arrival(0.0, 64, 100), Arrival(0.1, 500, 1)]
    alone, _ = run(arrivals)
    beside, _ = run(arrivals, of=costs(prefill_slowdown=2.0, decode_slowdown=2.0))
    assert beside[0].first_token_s == pytest.approx((alone[0].first_token_s or 0) + 0.05)
    # For 100 ms steps take 10 ms: ten steps are lost.
    assert beside[1].last_token_s == pytest.approx(alone[1].last_token_s + 0.05)


@pytest.mark.parametrize("slowdown", [1.0, 2.0])
def test_a_batch_that_is_sent_ahead_begins_when_the_one_before_it_is_done(slowdown: float) -> None:
    arrivals = [Arrival(0.0, 64, 1), Arrival(0.001, 64, 1), Arrival(0.002, 64, 1)]
    shared = costs(prefill_slowdown=slowdown, decode_slowdown=slowdown, message_s=0.002)
    ended, _ = run(arrivals, FleetSettings(max_batch_requests=1), of=shared)
    # None of them decodes: the device is prefill's alone, without a gap.
    assert [t.first_token_s for t in ended] == [pytest.approx(t) for t in (0.012, 0.022, 0.032)]


def test_a_cost_model_without_a_bucket_for_all_sequences_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"must have a bucket of 128 sequences \(max_num_seqs\), the largest is 64"
    ):
        run([Arrival(0.0, 1, 1)], FleetSettings(max_num_seqs=128))


def test_prompts_that_begin_alike_are_computed_from_there_on() -> None:
    """The first of two at once is computed alone, the second after it; a third, much later, finds both blocks too."""
    arrivals = [Arrival(at, 2 * 512 + 100, 5, (1, 2, 3 + i)) for i, at in enumerate((0.0, 0.0, 1.0))]
    whole, rest = 0.050 + 0.050 + 0.015, 0.015
    ended, collector = run(arrivals)
    times = sorted((t.first_token_s or 0.0) - t.arrival_s for t in ended)
    assert times == pytest.approx([0.020 + rest, whole, whole + rest])
    assert (collector.num_cached_tokens, collector.num_query_tokens) == (2 * 2 * 512, 3 * 1124)
    _, collector = run(arrivals, FleetSettings(prefix_cache=False))
    assert collector.num_cached_tokens == 0


def test_what_is_cached_is_not_computed() -> None:
    assert costs().prefill([1124, 612], max_slots=8, cached=[1024, 512]) == (0.050, 512 - 200)
    with_pairs, _ = costs(attention_seconds_per_pair=1e-6).prefill([1024], max_slots=8, cached=[512])
    assert with_pairs == pytest.approx(0.050 + 1e-6 * ((1024**2 - 512**2) / 2 - 512**2 / 16))

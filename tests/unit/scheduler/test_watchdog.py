from __future__ import annotations

from scheduler.watchdog import Watchdog


def test_a_worker_that_finishes_nothing_is_named_once() -> None:
    watchdog = Watchdog(timeout_s=10)
    assert watchdog.overdue({"busy", "hung"}, 0) == {}
    watchdog.progressed("busy", 8)
    assert watchdog.overdue({"busy", "hung"}, 10).keys() == {"hung"}
    assert watchdog.overdue({"busy", "hung"}, 17) == {}
    watchdog.progressed("hung", 18)
    assert watchdog.overdue({"busy", "hung"}, 28).keys() == {"busy", "hung"}


def test_time_without_work_does_not_count() -> None:
    watchdog = Watchdog(timeout_s=10)
    watchdog.overdue({"a"}, 0)
    assert watchdog.overdue(set(), 9) == {}
    assert watchdog.overdue({"a"}, 11) == {}
    assert watchdog.overdue({"a"}, 20) == {}
    assert watchdog.overdue({"a"}, 21).keys() == {"a"}

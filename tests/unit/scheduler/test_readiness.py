from __future__ import annotations

from scheduler.readiness import ProgressWatch


def test_work_that_does_not_go_on_is_a_problem_after_the_limit() -> None:
    watch = ProgressWatch(stall_s=60)
    assert watch.problem(1000) is None
    watch.update(2, now=1000)
    assert watch.problem(1059) is None
    watch.progressed(1050)
    watch.update(1, now=1055)
    assert watch.problem(1109) is None
    problem = watch.problem(1110)
    assert problem is not None
    assert "no step was finished for 60 s" in problem
    watch.progressed(1111)
    assert watch.problem(1111) is None


def test_idle_time_does_not_count() -> None:
    watch = ProgressWatch(stall_s=60)
    watch.update(1, now=0)
    watch.update(0, now=10)
    watch.progressed(11)  # a report that comes late begins nothing
    assert watch.problem(500) is None
    watch.update(1, now=500)
    assert watch.problem(559) is None
    assert watch.problem(560) is not None

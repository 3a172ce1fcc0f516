"""What a worker shows of itself at its node's Prometheus endpoint of Ray. The scheduler counts the same apart."""

from __future__ import annotations

import threading

from scheduler.messages import HandoffResult, PrefillResult, StepReport
from scheduler.observe.ray_export import PERIOD_S, RayMirror
from scheduler.observe.registry import Registry
from scheduler.observe.workers import count_handoff, count_prefill, count_step, declare_worker


class WorkerFigures:
    """Owns the figures of one worker since its process began, and the thread that shows them. Any thread may count."""

    def __init__(self, pool: str, name: str, *, model: str, peak_flops: float | None = None) -> None:
        self._registry = Registry()
        self._lock = threading.Lock()
        self._peak_flops = peak_flops
        self._mirror = RayMirror({"model": model})
        declare_worker(self._registry, pool, name)
        threading.Thread(target=self._publish, name="figures", daemon=True).start()

    def prefilled(self, result: PrefillResult) -> None:
        """Count a batch, and its pages if it is known what became of them."""
        with self._lock:
            count_prefill(self._registry, result, self._peak_flops)
            if result.handoff is not None and not result.handoff_pending:
                count_handoff(self._registry, result.handoff)

    def handed_off(self, handoff: HandoffResult) -> None:
        """Count pages that arrived."""
        with self._lock:
            count_handoff(self._registry, handoff)

    def stepped(self, report: StepReport) -> None:
        """Count a decode step."""
        with self._lock:
            count_step(self._registry, report)

    def _publish(self) -> None:
        pause = threading.Event()
        while not pause.wait(PERIOD_S):
            with self._lock:
                figures = self._registry.figures()
            self._mirror.publish(figures)

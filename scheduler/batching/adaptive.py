"""The adaptive policy: hold a batch exactly as long as holding it pays.

Let k requests of n tokens wait and one worker be idle; c(t) is what a batch of t tokens takes. What is
compared is the time at which each request, those that wait and those that are expected, has its first token.

*Go now.* The k have their tokens after c(n). Those that arrive meanwhile wait for a worker to be idle, which
is after f = c(n), or earlier if another worker is about to be; then they leave together. If a of them, of m
tokens each, are expected within f, the sum over all requests is

    go = k c(n) + a (f + c(a m))

*Hold for j of the a.* If the j-th comes after w_j, then k + j requests leave together, and the others after
them:

    hold_j = (k + j) (w_j + c(n + j m)) + (a - j) (w_j + c(n + j m) + c((a - j) m))

*The rule.* Let p_j be the probability that j come in time. If they do not come, the k have waited v_j for
nothing. It pays to hold for the next arrival if for some j the expected saving exceeds the expected loss:

    p_j (go - hold_j) > (1 - p_j) k v_j

The decision is made anew at each arrival, and when nobody came for twice the expected wait. It follows that
a batch leaves at once

- when another worker is idle: the next request would go there, and has nothing to gain;
- when the bucket is saturated: c(n + m) - c(n) is then what the next one costs alone, so nothing is saved;
- when nobody is expected before the batch would be done (a = 0);
- under a steady stream in which more are expected during the batch anyway: they leave together whether or
  not the first of them is waited for, so that holding only idles the worker. While all workers are busy,
  gathering is free.

It pays to hold within a burst, and when the next request is nearly certain to come within a small part of
c(n). Two bounds always hold: `timeout_s` after the oldest request's arrival, and the time at which a request
would miss its deadline.

*Sharing.* With several workers the question is also how many of the waiting to take. If K wait, and this
worker takes k of them, the others start on the rest in r seconds (0 if more than one worker is idle, else
when the next is). Each of v other workers that are idle takes a part of it, or the next one all. Each second
of work delays those who come meanwhile, λ c(N) / W requests for each of the W workers. So it takes the k of
least

    k c(k m) + (K - k) (r + c((K - k) m / v)) + λ c(N) / W · (c(k m) + v c((K - k) m / v))

unless more wait than all idle workers, and one more, could hold: then each takes a full batch. And if this
worker would be done before another is idle, it takes all.

What is expected comes from the gaps between the last arrivals (`arrivals`), whatever their distribution. For
Poisson arrivals the optimal policy of one batch server is known to be a threshold on the queue (Deb and
Serfozo, 1973); for costs of the kind that graphs have, a fixed part and one that grows with the tokens, that
threshold is one request up to high loads, which is why a steady stream is not held up.
"""

from __future__ import annotations

from scheduler.batching.arrivals import Arrivals, share_and_mean
from scheduler.batching.cost_model import CostModel
from scheduler.batching.policies import BatchView, Dispatch, Hold, QueueView, check_limits, dispatch_if_due

_PATIENCE = 2.0
"""A hold ends when nobody came for so many times the expected wait."""


class AdaptivePolicy:
    """Holds a batch only while the next arrivals are expected to gain more than those who wait lose."""

    may_resize = True

    def __init__(
        self, *, max_requests: int, timeout_s: float, max_tokens: int | None = None, cost_model: CostModel
    ) -> None:
        """`max_requests` is what a captured graph holds; `timeout_s` bounds the hold. Raises `ValueError`."""
        check_limits(max_requests, timeout_s, max_tokens)
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self._timeout_s = timeout_s
        self._cost = cost_model
        self._arrivals = Arrivals()

    @property
    def enough_tokens(self) -> int:
        """Tokens from which on more are no cheaper per token, or the user's bound if that is less."""
        saturation = self._cost.saturation_tokens
        return saturation if self.max_tokens is None else min(saturation, self.max_tokens)

    def arrived(self, now: float, num_tokens: int) -> None:
        """A request of `num_tokens` tokens arrived."""
        self._arrivals.observe(now, num_tokens)

    def most_requests(self, queue: QueueView) -> int:
        """Return how many requests the next batch may have: fewer if other workers had better take the rest."""
        workers, total, most = queue.workers, queue.num_requests, self.max_requests
        num_workers = workers.num_idle + workers.num_busy
        if num_workers < 2 or not 1 < total <= most * (workers.num_idle + 1):
            return most
        rest_in, all_s = 0.0, self._cost.seconds(queue.num_tokens)
        if workers.num_idle < 2 and workers.next_idle_at is not None:
            rest_in = max(0.0, workers.next_idle_at - queue.now)
        if rest_in >= all_s:
            return most
        num_others = max(1, workers.num_idle - 1)
        mean = queue.num_tokens / total
        price = self._arrivals.rate(queue.now) / num_workers * all_s

        def delay(k: int) -> float:
            first = self._cost.seconds(round(k * mean))
            rest = self._cost.seconds(round((total - k) * mean / num_others))
            worker_seconds = first + (num_others * rest if k < total else 0.0)
            return k * first + (total - k) * (rest_in + rest) + price * worker_seconds

        return min(range(min(total, most), 0, -1), key=delay)

    def decide(self, batch: BatchView) -> Dispatch | Hold:
        """Return whether a batch leaves now."""
        if batch.is_full:
            is_share = len(batch.requests) == batch.most_requests < self.max_requests
            return Dispatch("saturated" if batch.is_saturated else "idle" if is_share else "full")
        seconds = self._cost.seconds(batch.num_tokens)
        due = dispatch_if_due(batch, self._timeout_s, seconds)
        if isinstance(due, Dispatch):
            return due
        wait = self._wait_worth_taking(batch, seconds)
        return Dispatch("idle") if wait is None else Hold(min(batch.now + wait, due.until))

    def _wait_worth_taking(self, batch: BatchView, seconds: float) -> float | None:
        """Return for how many seconds at most to wait for the next arrival, or None if that does not pay."""
        if batch.workers.num_idle > 1:
            return None
        idle_in = seconds
        if batch.workers.next_idle_at is not None:
            idle_in = min(seconds, max(0.0, batch.workers.next_idle_at - batch.now))
        gaps, silence = self._arrivals.gaps(batch.now), self._arrivals.silence(batch.now)
        _, mean = share_and_mean(gaps, silence, silence + idle_in)
        horizon = min(idle_in, _PATIENCE * (mean - silence))
        p, mean = share_and_mean(gaps, silence, silence + horizon)
        if not p:
            return None
        first_in = mean - silence
        p_more, gap = share_and_mean(gaps, -1.0, idle_in)
        # After the next, gap follows gap until one is too long, or until time is up.
        num_more = min(p_more / (1 - p_more), (idle_in - first_in) / max(gap, 1e-9))
        a = min(1 + round(num_more), self.max_requests - len(batch.requests))
        cost, k, n, m = self._cost.seconds, len(batch.requests), batch.num_tokens, self._arrivals.mean_tokens
        go = k * seconds + a * (idle_in + cost(round(a * m)))
        for j in range(1, a + 1):
            waited = (j - 1) * gap
            done_in = first_in + waited + cost(round(n + j * m))
            hold = (k + j) * done_in + (a - j) * (done_in + cost(round((a - j) * m)))
            p_j = p * p_more ** (j - 1)
            if p_j * (go - hold) > (1 - p_j) * k * (waited + horizon):
                return horizon
        return None

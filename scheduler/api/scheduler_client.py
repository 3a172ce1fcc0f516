"""The engine behind the HTTP API: the Scheduler actor, which answers over Ray or a shorter way."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from scheduler.admission import Admission, Permit
from scheduler.api.engine import TokenRouter, TokenStream, first_indexes
from scheduler.api.errors import rejection_error
from scheduler.errors import PermissionDeniedError, UnavailableError
from scheduler.messages import (
    AbortReply,
    Figures,
    Heartbeat,
    JournalStatus,
    ModelInfo,
    Rejection,
    Request,
    SchedulerState,
    ServiceLoad,
    ServiceStatus,
    SubmitReply,
    TokenEvents,
)
from scheduler.observe.exposition import render
from scheduler.observe.registry import Registry
from scheduler.wire import Peer, RayPeer

_HEARTBEAT_S = 1.0
_PAUSE_S = 0.1
"""Between attempts to reach a scheduler that starts again."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Submission:
    """The sequences of one HTTP request on their way to the scheduler, and its answer."""

    requests: tuple[Request, ...]
    answer: asyncio.Future[Rejection | None]

    @property
    def request_ids(self) -> tuple[str, ...]:
        return tuple(request.request_id for request in self.requests)

    @property
    def accepted(self) -> bool:
        answer = self.answer
        return answer.done() and not answer.cancelled() and not answer.exception() and answer.result() is None


class SchedulerClient:
    """The `Engine` of an ApiServer. Owns the token streams of what it submitted; belongs to one event loop.

    What is submitted in one turn of the event loop travels in one message.
    """

    def __init__(
        self,
        scheduler: Any,
        *,
        name: str,
        model: ModelInfo,
        admission: Admission,
        registry: Registry,
        journal_status: Callable[[], JournalStatus] | None = None,
        answer_timeout_s: float = 10.0,
        submit_timeout_s: float = 60.0,
        short_way: Peer | None = None,
    ) -> None:
        """Talk to the actor handle `scheduler`, as the ApiServer `name`; `admission` has the queue's limits.

        What is sent often goes to the same actor by `short_way`, if there is one.

        What is counted in `registry` goes to the scheduler with each heartbeat and with each scrape, and what
        `journal_status` returns with each heartbeat. A scheduler that does not answer within
        `answer_timeout_s` counts as down until it does. `submit_timeout_s`: longest that it may take to accept a
        request.
        """
        self._scheduler = scheduler
        self._hot: Peer = short_way or RayPeer(scheduler)
        self._name = name
        self._life = time.time_ns()
        self._model = model
        self._router = TokenRouter()
        self._admission = admission
        self._journal_status = journal_status
        self._answer_timeout_s = answer_timeout_s
        self._submit_timeout_s = submit_timeout_s
        self._registry = registry
        self._submissions: list[_Submission] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._down = False
        self._accepted: dict[str, Request] = {}
        self._seen: SchedulerState | None = None
        self._is_draining = False

    @property
    def name(self) -> str:
        """Name of the ApiServer to which tokens are sent."""
        return self._name

    @property
    def model(self) -> ModelInfo:
        """The model that is served."""
        return self._model

    def admit(self, num_requests: int, num_chars: int, num_tokens: int) -> Permit:
        """Let requests begin, if the queue had room for them when the scheduler last said.

        Raises OverloadedError, and UnavailableError while nothing is accepted.
        """
        self._check_open()
        return self._admission.admit_text(num_requests, num_chars, time.monotonic(), num_tokens=num_tokens)

    async def submit(self, requests: Sequence[Request]) -> TokenStream:
        """Start all of the requests, or none, and return the stream of their tokens. Raises RequestError."""
        self._check_open()
        submission = _Submission(requests=tuple(requests), answer=asyncio.get_running_loop().create_future())
        # The first token may overtake the scheduler's answer, so the stream is there before the requests leave.
        stream = self._router.open(submission.request_ids, first_indexes(requests))
        if not self._submissions:
            asyncio.get_running_loop().call_soon(self._send_submissions)
        self._submissions.append(submission)
        try:
            async with asyncio.timeout(self._submit_timeout_s):
                rejection = await submission.answer
        except BaseException as error:
            self._router.close(submission.request_ids)
            if submission.accepted:  # given up in the moment between the answer and this line
                self._hot.post("cancel", submission.request_ids)
            if isinstance(error, TimeoutError):
                raise UnavailableError(
                    f"the scheduler did not accept the request within {self._submit_timeout_s:g} s"
                ) from None
            raise
        if rejection is not None:
            self._router.close(submission.request_ids)
            raise rejection_error(rejection)
        return stream

    async def cancel(self, request_ids: Sequence[str]) -> None:
        """End these requests, if they have not ended. Does not wait for the scheduler."""
        running = tuple(self._router.close(request_ids))
        if running:
            self._hot.post("cancel", running)

    async def abort(self, completion_id: str, key_digest: str) -> int:
        """End a completion, of whichever ApiServer; return how many sequences it had.

        Raises PermissionDeniedError if it belongs to another key, and UnavailableError.
        """
        reply: AbortReply = await self._answer(self._scheduler.abort.remote(completion_id, key_digest))
        # There may be room now, where what was last said of the queue left none.
        self._admission.update(reply.queue, time.monotonic())
        if reply.num_foreign and not reply.num_sequences:
            raise PermissionDeniedError(
                f"request {completion_id} was sent with another API key", param="completion_id"
            )
        return reply.num_sequences

    async def reset_prefix_cache(self) -> int:
        """Forget all cached blocks of tokens; return how many they were. Raises UnavailableError."""
        num_blocks: int = await self._answer(self._scheduler.reset_prefix_cache.remote())
        return num_blocks

    async def metrics(self) -> str:
        """Return the figures of the whole service in Prometheus' text format. Raises UnavailableError."""
        taken = self._registry.take()
        try:
            figures: Figures = await self._answer(self._scheduler.metrics.remote(taken))
        except UnavailableError as error:
            # A scheduler that is silent may still take them in.
            if isinstance(error.__cause__, RayActorError):
                self._registry.add(taken)
            raise
        # In a thread, so that requests go on meanwhile.
        return await asyncio.to_thread(render, figures, {"model": self._model.name})

    async def status(self) -> ServiceStatus:
        """Return what the service does, in one look. Raises UnavailableError."""
        status: ServiceStatus = await self._answer(self._scheduler.status.remote())
        return replace(status, problem="the service is stopping") if self._is_draining else status

    async def load(self) -> ServiceLoad:
        """Return how much the service has to do. Raises UnavailableError."""
        load: ServiceLoad = await self._answer(self._scheduler.load.remote())
        return load

    async def check_ready(self) -> None:
        """Raise UnavailableError if a worker is dead, work does not go on, or the service is about to stop."""
        self._check_draining()
        reason: str | None = await self._answer(self._scheduler.not_ready.remote())
        if reason is not None:
            raise UnavailableError(reason)

    async def check_health(self) -> None:
        """Raise UnavailableError if the scheduler did not answer the last heartbeat."""
        if self._down:
            raise _scheduler_down()

    def deliver(self, events: TokenEvents) -> None:
        """Hand tokens to the streams of their requests."""
        self._router.deliver(events)

    async def join(self) -> None:
        """Introduce this process, before it submits anything: what one of the same name had is ended.

        Waits while the scheduler starts again. Raises UnavailableError if it does not.
        """
        while True:
            try:
                self._seen = await self._beat()
                return
            except ActorUnavailableError:
                await asyncio.sleep(_PAUSE_S)
            except RayActorError as error:
                raise _scheduler_down() from error

    async def watch(self) -> None:
        """Keep in touch with the scheduler. Never returns.

        Once it starts again, or a worker has died, it is told what is served here and with which tokens so far. Once
        it is down for good, what waits for it fails. While it is silent, what waits for it waits on.
        """
        while True:
            pause_s = _HEARTBEAT_S
            try:
                state = await asyncio.wait_for(self._beat(), self._answer_timeout_s)
                self._down = False
                if state != self._seen:
                    self._seen = state
                    await self._resume()
            except TimeoutError:
                self._note_down(self._silent().message)
            except ActorUnavailableError:
                self._seen, pause_s = None, _PAUSE_S
            except RayActorError:
                self._note_down("the scheduler is down")
                self._router.fail_all(_scheduler_down())
            except RayError:
                logger.exception("the scheduler cannot take in what is served here; it is asked again")
                self._seen = None
            self._accepted = {i: request for i, request in self._accepted.items() if i in self._router}
            await asyncio.sleep(pause_s)

    async def _answer(self, call: Awaitable[Any]) -> Any:
        """Return the scheduler's answer. Raises UnavailableError if it is down or does not answer."""
        try:
            return await asyncio.wait_for(call, self._answer_timeout_s)
        except RayActorError as error:
            raise _scheduler_down() from error
        except TimeoutError:
            raise self._silent() from None

    def _silent(self) -> UnavailableError:
        return UnavailableError(f"the scheduler did not answer within {self._answer_timeout_s:g} s")

    async def _beat(self) -> SchedulerState:
        heartbeat = Heartbeat(
            api_server=self._name,
            figures=self._registry.take(),
            life=self._life,
            journal=None if self._journal_status is None else self._journal_status(),
        )
        try:
            state: SchedulerState = await self._scheduler.heartbeat.remote(heartbeat)
        except RayActorError:
            self._registry.add(heartbeat.figures)
            raise
        return state

    def _note_down(self, reason: str) -> None:
        if not self._down:
            logger.error("%s", reason)
        self._down = True

    async def _resume(self) -> None:
        """Tell the scheduler what is served here, with the tokens that have come."""
        requests = tuple(
            replace(request, output_token_ids=request.output_token_ids + token_ids)
            for request_id, token_ids in self._router.unfinished().items()
            if (request := self._accepted.get(request_id)) is not None
        )
        if not requests:
            return
        logger.info("asking the scheduler for the rest of %d requests", len(requests))
        await self._scheduler.resume.remote(requests)
        # Only now is it certain that a cancel comes after.
        over = tuple(request.request_id for request in requests if request.request_id not in self._router)
        if over:
            self._hot.post("cancel", over)

    async def drain(self, timeout_s: float) -> None:
        """Accept nothing any more, and wait until all that was accepted is answered, or the time is over."""
        self._is_draining = True
        with suppress(TimeoutError):
            await asyncio.wait_for(self._router.wait_until_empty(), timeout_s)

    def _check_draining(self) -> None:
        if self._is_draining:
            raise UnavailableError("the service is stopping")

    def _check_open(self) -> None:
        """Raise UnavailableError if nothing new can be accepted: it would wait for nobody knows how long."""
        self._check_draining()
        if self._down:
            raise _scheduler_down()

    def shut_down(self, reason: str) -> None:
        """Accept nothing any more, cancel every request, and end its stream with UnavailableError."""
        self._is_draining = True
        request_ids = self._router.fail_all(UnavailableError(reason))
        if request_ids:
            self._hot.post("cancel", tuple(request_ids))

    def _send_submissions(self) -> None:
        """Send what was submitted in this turn of the event loop, except what was given up already."""
        submissions = [submission for submission in self._submissions if not submission.answer.done()]
        self._submissions = []
        if submissions:
            answer = self._hot.call("submit", tuple(submission.requests for submission in submissions))
            task = asyncio.ensure_future(self._exchange(submissions, answer))
            # asyncio itself keeps no reference to a running task.
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _exchange(self, submissions: Sequence[_Submission], answer: Awaitable[SubmitReply]) -> None:
        """Wait for the scheduler's answers to submissions that went in one message, and hand them out."""
        try:
            reply = await answer
        except ActorUnavailableError:
            # It starts again, and is told of them as of what it had accepted.
            self._seen = None
            for submission in submissions:
                if not submission.answer.done():
                    self._is_accepted(submission)
            return
        except RayError as error:
            failure = _scheduler_down() if isinstance(error, RayActorError) else error
            for submission in submissions:
                if not submission.answer.done():
                    submission.answer.set_exception(failure)
            return
        self._admission.update(reply.queue, time.monotonic())
        for submission, rejection in zip(submissions, reply.rejections, strict=True):
            if not submission.answer.done():
                if rejection is None:
                    self._is_accepted(submission)
                else:
                    submission.answer.set_result(rejection)
            elif rejection is None:
                # The client went while the scheduler accepted. Only now is it certain that a cancel comes after.
                self._hot.post("cancel", submission.request_ids)

    def _is_accepted(self, submission: _Submission) -> None:
        # At once, not when its reader runs next: the scheduler may be asked to resume in between.
        self._accepted |= {request.request_id: request for request in submission.requests}
        submission.answer.set_result(None)


def _scheduler_down() -> UnavailableError:
    return UnavailableError("the scheduler is not running")

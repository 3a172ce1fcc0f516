"""OpenTelemetry spans of requests. Nothing of it is imported unless an endpoint is set."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Protocol

from scheduler.errors import ConfigError
from scheduler.observe.requests import RequestTimeline, SequenceTimes

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import SpanContext, Tracer

ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
_MISSING = "otlp_endpoint needs the OpenTelemetry packages: pip install 'purefill[otel]'"
_NS = 1_000_000_000


class SpanRecorder(Protocol):
    """Makes spans of a request that has been answered."""

    def record(
        self, timeline: RequestTimeline, *, name: str, answer_id: str, status: int, headers: Mapping[str, str]
    ) -> None:
        """Take in a request; `headers` may hold the client's ``traceparent`` and ``tracestate``."""

    def close(self) -> None:
        """Send what has not been sent."""


class OtelRecorder:
    """Owns the OpenTelemetry SDK of a process. Sampling and headers are set with its own OTEL_ variables.

    Spans are made when a request has ended: what it took is measured whether they are made or not.
    """

    def __init__(self, exporter: SpanExporter, *, model: str, api_server: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create(
            {
                "service.name": os.environ.get("OTEL_SERVICE_NAME", "purefill"),
                "service.version": version("purefill"),
                "service.instance.id": api_server,
            }
        )
        self._model = model
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._processor = BatchSpanProcessor(exporter)
        self._provider.add_span_processor(self._processor)
        self._tracer: Tracer = self._provider.get_tracer("purefill", version("purefill"))
        self._scope = InstrumentationScope("purefill", version("purefill"))
        self._propagator = TraceContextTextMapPropagator()

    def record(
        self, timeline: RequestTimeline, *, name: str, answer_id: str, status: int, headers: Mapping[str, str]
    ) -> None:
        """Make the span of a request, and one for each part of the way of each of its sequences."""
        from opentelemetry import trace

        ended_at = time.monotonic()
        # Spans want times since 1970; one clock for all of them keeps their order.
        offset_s = time.time() - ended_at
        span = self._tracer.start_span(
            name,
            context=self._propagator.extract(dict(headers)),
            kind=trace.SpanKind.SERVER,
            start_time=_ns(timeline.arrived_at + offset_s),
            attributes={
                "gen_ai.request.model": self._model,
                "gen_ai.response.id": answer_id,
                "gen_ai.usage.input_tokens": timeline.num_prompt_tokens,
                "gen_ai.usage.output_tokens": timeline.num_output_tokens,
                "gen_ai.response.finish_reasons": timeline.outcome.split(","),
                "http.response.status_code": status,
            },
        )
        if span.is_recording():
            parent = span.get_span_context()
            for choice, sequence in enumerate(timeline.sequences):
                for part, start, end in _parts(timeline, sequence):
                    self._add(parent, part, start + offset_s, end + offset_s, choice)
            self._add(parent, "detokenise", ended_at - timeline.text_s + offset_s, ended_at + offset_s, None)
            if any(sequence.outcome not in ("stop", "length", None) for sequence in timeline.sequences):
                span.set_status(trace.StatusCode.ERROR, timeline.outcome)
        span.end(end_time=_ns(ended_at + offset_s))

    def _add(self, parent: SpanContext, name: str, start: float, end: float, choice: int | None) -> None:
        """Make a span that is over already: at a tenth of what it costs to begin one and end it."""
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext

        context = SpanContext(
            parent.trace_id,
            self._provider.id_generator.generate_span_id(),
            is_remote=False,
            trace_flags=parent.trace_flags,
            trace_state=parent.trace_state,
        )
        self._processor.on_end(
            ReadableSpan(
                name,
                context=context,
                parent=parent,
                resource=self._provider.resource,
                attributes=None if choice is None else {"purefill.choice": choice},
                instrumentation_scope=self._scope,
                start_time=_ns(start),
                end_time=_ns(end),
            )
        )

    def close(self) -> None:
        """Send what has not been sent, for a few seconds at most."""
        self._provider.force_flush(3000)
        self._provider.shutdown()


def check_installed() -> None:
    """Raise `ConfigError` if spans cannot be sent because a package is missing."""
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError as error:
        raise ConfigError(_MISSING) from error


def make_recorder(endpoint: str, *, model: str, api_server: str) -> OtelRecorder:
    """Return what sends spans to an OTLP receiver over HTTP, such as ``http://127.0.0.1:4318``."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    url = endpoint.rstrip("/") + "/v1/traces"
    return OtelRecorder(OTLPSpanExporter(endpoint=url), model=model, api_server=api_server)


def _parts(timeline: RequestTimeline, sequence: SequenceTimes) -> Iterator[tuple[str, float, float]]:
    """Yield name, start and end of each part of a sequence's way.

    Workers and the scheduler report durations, which are laid out before and after the moment at which their token
    came here.
    """
    earliest = timeline.submitted_at
    for mark in sequence.marks:
        timing = mark.timing
        if timing.prefill_s:
            begins = max(earliest, mark.at - timing.prefill_s)
            held_from = max(earliest, begins - timing.held_s)
            yield "queue", max(earliest, held_from - timing.queued_s), held_from
            yield "hold", held_from, begins
            yield "prefill", begins, mark.at
            earliest = mark.at
    first, last = sequence.first_token_at, sequence.ended_at
    if first is None or last is None:
        return
    handoff_s = sum(mark.timing.handoff_s for mark in sequence.marks)
    decodes_from = min(last, first + handoff_s)
    if sequence.num_tokens > 1:
        yield "handoff", first, decodes_from
        yield "decode", decodes_from, last


def _ns(seconds: float) -> int:
    return int(seconds * _NS)

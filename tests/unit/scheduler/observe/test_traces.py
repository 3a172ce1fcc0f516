from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from queue import SimpleQueue

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from scheduler.api.app import AppSettings, create_app
from scheduler.api.tokenizer import Tokenizer
from scheduler.messages import Timing, TokenEvent
from scheduler.observe.registry import Registry
from scheduler.observe.requests import RequestTimeline
from scheduler.observe.traces import OtelRecorder, make_recorder
from tests.unit.scheduler.api.scripted import MODEL, ScriptedEngine, byte_tokenizer, complete, send

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


def spans_of(timeline: RequestTimeline, headers: dict[str, str]) -> tuple[ReadableSpan, ...]:
    """Return the spans that are made of a request, as they are exported."""
    exporter = InMemorySpanExporter()
    recorder = OtelRecorder(exporter, model="m", api_server="api-0")
    recorder.record(timeline, name="POST /v1/completions", answer_id="cmpl-1", status=200, headers=headers)
    recorder.close()
    return exporter.get_finished_spans()


def one_request(now: float) -> RequestTimeline:
    """A request that took 3 s until `now`: queued 0.5 s, held 0.25 s, prefilled 1 s, 0.125 s of handoff."""
    timeline = RequestTimeline(Registry(), now - 3.0)
    timeline.submitted([7], now - 2.75)
    first = Timing(queued_s=0.5, held_s=0.25, prefill_s=1.0)
    timeline.event(0, TokenEvent(request_id="r", index=0, token_id=1, timing=first), now - 1.0)
    second = Timing(handoff_s=0.125)
    timeline.event(0, TokenEvent(request_id="r", index=1, token_id=2, timing=second), now - 0.5)
    timeline.ended(0, "length", now)
    timeline.text_s = 0.0625
    return timeline


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def test_the_spans_of_a_request() -> None:
    *parts, root = spans_of(one_request(10.0), {"traceparent": TRACEPARENT})
    assert [part.name for part in parts] == ["queue", "hold", "prefill", "handoff", "decode", "detokenise"]
    expected = [0.5, 0.25, 1.0, 0.125, 0.875, 0.0625]
    assert [seconds(part) for part in parts] == pytest.approx(expected, abs=1e-6)
    for earlier, later in pairwise(parts[:5]):
        assert earlier.end_time == later.start_time
    assert root.name == "POST /v1/completions"
    assert root.parent is not None
    assert f"{root.context.trace_id:032x}" == TRACE
    assert f"{root.parent.span_id:016x}" == PARENT
    assert {part.parent.span_id for part in parts if part.parent} == {root.context.span_id}
    assert root.attributes is not None
    assert root.attributes["gen_ai.usage.input_tokens"] == 7
    assert root.attributes["gen_ai.usage.output_tokens"] == 2
    assert root.attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert root.status.is_ok


@pytest.mark.parametrize("traceparent", [None, "nonsense", TRACEPARENT[:-1] + "0"])
def test_contexts_that_are_none_or_not_sampled(traceparent: str | None) -> None:
    headers = {} if traceparent is None else {"traceparent": traceparent}
    spans = spans_of(one_request(10.0), headers)
    if traceparent is not None and traceparent.startswith("00"):
        assert not spans  # the client's trace is not kept, so nobody asks for its parts
    else:
        assert len(spans) == 7
        assert spans[-1].parent is None


def test_a_request_that_failed() -> None:
    timeline = RequestTimeline(Registry(), 1.0)
    timeline.submitted([4], 1.5)
    timeline.all_ended("worker_failed", 2.0)
    detokenise, root = spans_of(timeline, {})
    assert detokenise.name == "detokenise"
    assert not root.status.is_ok
    assert root.status.description == "worker_failed"


@contextmanager
def receiver() -> Iterator[tuple[str, SimpleQueue[ExportTraceServiceRequest]]]:
    """An OTLP receiver: its URL, and what it got."""
    received: SimpleQueue[ExportTraceServiceRequest] = SimpleQueue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.path == "/v1/traces"
            received.put(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", received
        server.shutdown()
        thread.join()


def test_an_answer_over_http_leaves_spans_at_a_receiver(bytes_tokenizer: Tokenizer) -> None:
    with receiver() as (url, received):
        recorder = make_recorder(url, model=MODEL.name, api_server="api-0")
        engine = ScriptedEngine(["ab", "cd"])
        app = create_app(engine, bytes_tokenizer, AppSettings(model_names=(MODEL.name,)), recorder=recorder)
        headers = {"traceparent": TRACEPARENT, "tracestate": "a=1"}
        body = {"model": MODEL.name, "prompt": "Hi", "n": 2}
        answer = send(app, "POST", "/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200
        assert complete(app, max_tokens=-1).status_code == 400  # not accepted: nothing to tell of it
        recorder.close()
        (resource,) = received.get(timeout=30).resource_spans
    spans = [span for scope in resource.scope_spans for span in scope.spans]
    (root,) = [span for span in spans if span.parent_span_id.hex() == PARENT]
    assert (root.name, root.trace_id.hex(), root.trace_state) == ("POST /v1/completions", TRACE, "a=1")
    attributes = {attribute.key: attribute.value for attribute in root.attributes}
    assert attributes["gen_ai.response.id"].string_value == answer.json()["id"]
    assert attributes["gen_ai.usage.output_tokens"].int_value == 4
    decodes = [span for span in spans if span.name == "decode"]
    assert sorted(span.attributes[0].value.int_value for span in decodes) == [0, 1]
    assert {attribute.key for attribute in resource.resource.attributes} >= {
        "service.name",
        "service.version",
    }


@pytest.fixture(scope="module")
def bytes_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))

"""Two scrapes of a service, ten seconds apart by what they say: for the terminal's and the page's figures alike."""

from __future__ import annotations

_TEMPLATE = """\
# TYPE purefill_queue_requests gauge
purefill_queue_requests{{model="tiny",class="0"}} 4.0
purefill_queue_requests{{model="tiny",class="5"}} 1.0
# TYPE purefill_queue_tokens gauge
purefill_queue_tokens{{model="tiny",class="0"}} 120.0
# TYPE purefill_live_requests gauge
purefill_live_requests{{model="tiny"}} 9.0
# TYPE purefill_build_info gauge
purefill_build_info{{model="tiny",version="0.1.0"}} 1.0
# TYPE purefill_start_time_seconds gauge
purefill_start_time_seconds{{model="tiny",pool="scheduler",worker="scheduler"}} 1700000000.0
purefill_start_time_seconds{{model="tiny",pool="prefill",worker="prefill-0"}} 1700000001.0
# TYPE purefill_batches_total counter
purefill_batches_total{{model="tiny",reason="full"}} {full}
purefill_batches_total{{model="tiny",reason="timeout"}} {timeout}
# TYPE purefill_requests_total counter
purefill_requests_total{{model="tiny",outcome="stop"}} {stop}
purefill_requests_total{{model="tiny",outcome="cancelled"}} 2.0
# TYPE purefill_rejections_total counter
{rejections}
# TYPE purefill_prefill_tokens_total counter
purefill_prefill_tokens_total{{model="tiny",pool="prefill",worker="prefill-0"}} {prefill_tokens}
# TYPE purefill_prefill_padding_tokens_total counter
purefill_prefill_padding_tokens_total{{model="tiny",pool="prefill",worker="prefill-0"}} {padding}
# TYPE purefill_output_tokens_total counter
purefill_output_tokens_total{{model="tiny",pool="decode",worker="decode-0"}} {output_tokens}
# TYPE purefill_prefill_batch_requests histogram
purefill_prefill_batch_requests_bucket{{model="tiny",reason="full",le="8.0"}} {batches}
purefill_prefill_batch_requests_bucket{{model="tiny",reason="full",le="+Inf"}} {batches}
purefill_prefill_batch_requests_sum{{model="tiny",reason="full"}} {batch_requests}
purefill_prefill_batch_requests_count{{model="tiny",reason="full"}} {batches}
# TYPE purefill_graph_replays_total counter
purefill_graph_replays_total{{model="tiny",pool="prefill",worker="prefill-0",bucket="512x8"}} {large}
purefill_graph_replays_total{{model="tiny",pool="prefill",worker="prefill-0",bucket="128x8"}} {small}
purefill_graph_replays_total{{model="tiny",pool="decode",worker="decode-0",bucket="8x8"}} {steps}
# TYPE purefill_eager_steps_total counter
purefill_eager_steps_total{{model="tiny",pool="prefill",worker="prefill-0",reason="too_long"}} {eager}
# TYPE purefill_time_to_first_token_seconds histogram
purefill_time_to_first_token_seconds_bucket{{model="tiny",le="0.1"}} 3.0
purefill_time_to_first_token_seconds_bucket{{model="tiny",le="0.2"}} {fast}
purefill_time_to_first_token_seconds_bucket{{model="tiny",le="+Inf"}} {all}
purefill_time_to_first_token_seconds_sum{{model="tiny"}} {all}
purefill_time_to_first_token_seconds_count{{model="tiny"}} {all}
# TYPE purefill_request_seconds histogram
purefill_request_seconds_bucket{{model="tiny",le="1.0"}} 3.0
purefill_request_seconds_bucket{{model="tiny",le="+Inf"}} 3.0
purefill_request_seconds_sum{{model="tiny"}} 1.5
purefill_request_seconds_count{{model="tiny"}} 3.0
# TYPE purefill_prefill_seconds histogram
purefill_prefill_seconds_bucket{{model="tiny",pool="prefill",worker="prefill-0",le="0.5"}} {batches}
purefill_prefill_seconds_bucket{{model="tiny",pool="prefill",worker="prefill-0",le="+Inf"}} {batches}
purefill_prefill_seconds_sum{{model="tiny",pool="prefill",worker="prefill-0"}} {prefill_s}
purefill_prefill_seconds_count{{model="tiny",pool="prefill",worker="prefill-0"}} {batches}
# TYPE purefill_decode_step_seconds histogram
purefill_decode_step_seconds_bucket{{model="tiny",pool="decode",worker="decode-0",le="0.05"}} {steps}
purefill_decode_step_seconds_bucket{{model="tiny",pool="decode",worker="decode-0",le="+Inf"}} {steps}
purefill_decode_step_seconds_sum{{model="tiny",pool="decode",worker="decode-0"}} {decode_s}
purefill_decode_step_seconds_count{{model="tiny",pool="decode",worker="decode-0"}} {steps}
# TYPE purefill_prefill_flops_total counter
purefill_prefill_flops_total{{model="tiny",pool="prefill",worker="prefill-0"}} {flops}
# TYPE purefill_device_peak_flops gauge
purefill_device_peak_flops{{model="tiny",pool="prefill",worker="prefill-0"}} 1000.0
# TYPE purefill_worker_restarts_total counter
purefill_worker_restarts_total{{model="tiny",pool="prefill",worker="prefill-0"}} 1.0
# TYPE purefill_workers gauge
purefill_workers{{model="tiny",pool="prefill",state="ready"}} 1.0
purefill_workers{{model="tiny",pool="decode",state="ready"}} 1.0
purefill_workers{{model="tiny",pool="decode",state="dead"}} 1.0
# TYPE purefill_kv_pages gauge
purefill_kv_pages{{model="tiny",pool="decode",worker="decode-0",state="used"}} 6.0
purefill_kv_pages{{model="tiny",pool="decode",worker="decode-0",state="reserved"}} 2.0
purefill_kv_pages{{model="tiny",pool="decode",worker="decode-0",state="free"}} 24.0
"""

_REJECTIONS = 'purefill_rejections_total{model="tiny",reason="overloaded"} 1.0'

BEFORE = _TEMPLATE.format(
    full=20, timeout=5, stop=10, rejections="", prefill_tokens=1000, padding=100, output_tokens=500, batches=25,
    batch_requests=100, large=20, small=5, steps=100, eager=0, fast=3, all=3, prefill_s=1, decode_s=2, flops=400,
)  # fmt: skip
AFTER = _TEMPLATE.format(
    full=40, timeout=10, stop=20, rejections=_REJECTIONS, prefill_tokens=1600, padding=300, output_tokens=2500,
    batches=50, batch_requests=200, large=40, small=10, steps=300, eager=2, fast=11, all=13, prefill_s=6,
    decode_s=10, flops=2400,
)  # fmt: skip

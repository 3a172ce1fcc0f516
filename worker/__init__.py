"""The GPU (or CPU) side of purefill: model, KV pages, prefill and decode."""

"""The HTTP side: an OpenAI-compatible API over an engine.

Owns connections and text, never a queue or a tensor.
"""

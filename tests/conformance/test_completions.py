"""The completions API as the official openai client, and plain HTTP, see it on a running service."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.support.service import Service

PROMPT = "Hello, my name is"


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def post(service: Service, **fields: Any) -> httpx.Response:
    body = {"model": service.model, "prompt": PROMPT, "max_tokens": 5, **fields}
    return httpx.post(f"{service.url}/v1/completions", json=body, timeout=120)


def test_one_prompt(service: Service, client: openai.OpenAI) -> None:
    answer = client.completions.create(model=service.model, prompt=PROMPT, max_tokens=5, temperature=0)
    (choice,) = answer.choices
    assert answer.id
    assert len(choice.text) >= 5
    assert choice.finish_reason == "length"
    assert choice.logprobs is None
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        5,
        5,
        10,
    )


def test_token_ids(service: Service, client: openai.OpenAI) -> None:
    answer = client.completions.create(model=service.model, prompt=[0] * 5, max_tokens=5, temperature=0)
    assert answer.choices[0].text
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 5


def test_a_stream_joins_to_the_plain_answer(service: Service, client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "model": service.model,
        "prompt": PROMPT,
        "max_tokens": 5,
        "temperature": 0,
    }
    plain = client.completions.create(**fields).choices[0]
    chunks = list(client.completions.create(**fields, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == plain.text
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [
        plain.finish_reason
    ]
    assert chunks[-1].choices[0].text
    assert all(chunk.usage is None for chunk in chunks)


def test_include_usage(service: Service, client: openai.OpenAI) -> None:
    *chunks, last = client.completions.create(
        model=service.model,
        prompt=PROMPT,
        max_tokens=5,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens == 10


def test_choices_differ_and_repeat_with_their_seed(service: Service, client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "model": service.model,
        "prompt": "What is an LLM?",
        "max_tokens": 12,
        "n": 3,
        "temperature": 1,
        "seed": 42,
    }
    answers = [client.completions.create(**fields) for _ in range(2)]
    assert [choice.index for choice in answers[0].choices] == [0, 1, 2]
    texts = [choice.text for choice in answers[0].choices]
    assert len(set(texts)) == 3
    assert [choice.text for choice in answers[1].choices] == texts
    streamed = ["", "", ""]
    reasons = []
    for chunk in client.completions.create(**fields, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
        reasons += [reason for reason in [chunk.choices[0].finish_reason] if reason]
    assert streamed == texts
    assert len(reasons) == 3


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("as_ids", [False, True])
def test_prompt_lists(service: Service, client: openai.OpenAI, n: int, as_ids: bool) -> None:
    """Choices are prompt-major, usage counts each prompt once, and a stream says the same."""
    prompt: Any = [[504, 3575, 282], [15, 16]] if as_ids else ["The capital of", "1 2"]
    fields = {"temperature": 0, "max_tokens": 4}
    answer = post(service, prompt=prompt, n=n, **fields).raise_for_status().json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * n))
    texts = [choice["text"] for choice in answer["choices"]]
    alone = [post(service, prompt=one, **fields).json() for one in prompt]
    assert texts == [one["choices"][0]["text"] for one in alone for _ in range(n)]
    assert answer["usage"]["prompt_tokens"] == sum(one["usage"]["prompt_tokens"] for one in alone)
    seen = dict.fromkeys(range(2 * n), "")
    *chunks, last = client.completions.create(
        model=service.model,
        prompt=prompt,
        n=n,
        max_tokens=4,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in chunks:
        seen[chunk.choices[0].index] += chunk.choices[0].text
    assert list(seen.values()) == texts
    assert last.usage is not None
    assert last.usage.model_dump(exclude_none=True) == answer["usage"]


def test_a_stop_string_cuts_the_text(service: Service) -> None:
    fields = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
    full = post(service, **fields).json()["choices"][0]["text"]
    stop = full[10:14]
    answer = post(service, stop=stop, **fields).json()
    assert answer["choices"][0]["text"] == full[: full.index(stop)]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] < 24


def test_the_end_token(service: Service) -> None:
    """An answer to a chat prompt ends by itself; `ignore_eos` and `min_tokens` go on."""
    chat = "<|im_start|>user\nSay hi.<|im_end|>\n<|im_start|>assistant\n"
    fields = {"prompt": chat, "temperature": 0, "max_tokens": 64}
    answer = post(service, **fields).json()
    num_tokens = answer["usage"]["completion_tokens"]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert "<|im_end|>" not in answer["choices"][0]["text"]
    ignoring = post(service, **fields, ignore_eos=True).json()
    assert ignoring["choices"][0]["finish_reason"] == "length"
    assert ignoring["usage"]["completion_tokens"] == 64
    longer = post(service, **fields, min_tokens=num_tokens + 5).json()
    assert longer["usage"]["completion_tokens"] >= num_tokens + 5


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": "nothing"}, 404, "model"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": "word " * 10000}, 400, "prompt"),
        ({"prompt": [999999]}, 400, "prompt"),
        ({"prompt": [[-1]]}, 400, "prompt"),
        ({"max_tokens": -1}, 400, "max_tokens"),
        ({"max_tokens": 10**6}, 400, "max_tokens"),
        ({"logprobs": 30}, 400, "logprobs"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests_leave_the_service_up(
    service: Service, fields: dict[str, Any], status: int, param: str, stream: bool
) -> None:
    answer = post(service, stream=stream, **fields)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert post(service, max_tokens=1).status_code == 200


def test_malformed_json(service: Service) -> None:
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{service.url}/v1/completions", content=b'{"model": ', headers=headers)
    assert answer.status_code == 400
    assert "JSON" in answer.json()["error"]["message"]
    assert post(service).status_code == 200


def test_the_client_raises_its_own_error_types(service: Service, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="nothing", prompt=PROMPT)
    with pytest.raises(openai.BadRequestError, match="max_tokens must be >= 0, got -1"):
        client.completions.create(model=service.model, prompt=PROMPT, max_tokens=-1)


def test_models_and_health(service: Service, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [service.model]
    assert httpx.get(f"{service.url}/health").status_code == 200
    assert httpx.head(f"{service.url}/metrics").status_code == 200

"""Chat, reports and structured output as the official openai client sees them on a running service."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.support.service import Service

HI: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say hi."}]


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_chat_and_its_stream(service: Service, client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "model": service.model,
        "messages": HI,
        "temperature": 0,
        "max_completion_tokens": 8,
        "logprobs": True,
        "top_logprobs": 5,
    }
    (choice,) = client.chat.completions.create(**fields).choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    # Greedy: the likeliest token is the one that was taken.
    assert [entry.top_logprobs[0].token for entry in choice.logprobs.content] == [
        entry.token for entry in choice.logprobs.content
    ]
    *chunks, last = client.chat.completions.create(
        **fields, stream=True, stream_options={"include_usage": True}
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == [
        choice.finish_reason
    ]
    assert last.choices == []
    assert last.usage is not None
    tokenized = httpx.post(f"{service.url}/tokenize", json={"messages": HI}).json()
    assert last.usage.prompt_tokens == tokenized["count"]
    text = httpx.post(f"{service.url}/detokenize", json={"tokens": tokenized["tokens"]}).json()["prompt"]
    assert text.endswith("<|im_start|>user\nSay hi.<|im_end|>\n<|im_start|>assistant\n")


def test_the_asynchronous_client(service: Service) -> None:
    async def run() -> tuple[str, str]:
        async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
            plain, stream = await asyncio.gather(
                client.chat.completions.create(model=service.model, messages=HI, temperature=0, max_tokens=5),
                client.chat.completions.create(
                    model=service.model, messages=HI, temperature=0, max_tokens=5, stream=True
                ),
            )
            parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
            return plain.choices[0].message.content or "", "".join(parts)

    plain, streamed = asyncio.run(run())
    assert plain
    assert streamed == plain


def test_structured_output(service: Service, client: openai.OpenAI) -> None:
    """What is asked for is there from the first token, which prefill chooses, to the last."""
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer", "maximum": 99}, "ok": {"type": "boolean"}},
        "required": ["age", "ok"],
        "additionalProperties": False,
    }
    chat = client.chat.completions.create(
        model=service.model,
        messages=HI,
        max_tokens=60,
        seed=1,
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": schema}},
    )
    found = json.loads(chat.choices[0].message.content or "")
    assert found.keys() == {"age", "ok"}
    assert isinstance(found["ok"], bool)
    assert chat.choices[0].finish_reason == "stop"
    for outputs, pattern in (
        ({"regex": "[0-9]{3}-[a-f]{2}"}, "[0-9]{3}-[a-f]{2}"),
        ({"choice": ["no", "yes"]}, "no|yes"),
    ):
        completion = client.completions.create(
            model=service.model,
            prompt="Answer: ",
            max_tokens=30,
            seed=1,
            extra_body={"structured_outputs": outputs},
        )
        assert re.fullmatch(pattern, completion.choices[0].text)
        assert completion.choices[0].finish_reason == "stop"


def test_settings_that_change_tokens(service: Service, client: openai.OpenAI) -> None:
    def text(**fields: Any) -> str:
        answer = client.completions.create(
            model=service.model, prompt="A A A A", max_tokens=6, temperature=0, **fields
        )
        return answer.choices[0].text

    token_ids = [
        httpx.post(f"{service.url}/tokenize", json={"prompt": word}).json()["tokens"][0]
        for word in (" dog", " cat")
    ]
    token_id = token_ids[0]
    assert text(logit_bias={str(token_id): 100}) == " dog" * 6
    both = {str(token_id): 100 for token_id in token_ids}
    penalised = text(logit_bias=both, frequency_penalty=2, presence_penalty=2)
    assert set(penalised.split()) == {"dog", "cat"}
    stop = {"stop_token_ids": [token_id]}
    assert text(logit_bias={str(token_id): 100}, extra_body=stop) == ""
    assert (
        text(logit_bias={str(token_id): 100}, extra_body={**stop, "include_stop_str_in_output": True})
        == " dog"
    )


def test_prompt_logprobs(service: Service) -> None:
    body = {"model": service.model, "prompt": ["Hello, my name", "The sky"], "max_tokens": 1}
    for num in (0, 1):
        answer = httpx.post(
            f"{service.url}/v1/completions", json={**body, "prompt_logprobs": num}, timeout=120
        )
        for choice in answer.raise_for_status().json()["choices"]:
            first, *rest = choice["prompt_logprobs"]
            assert first is None
            assert rest
            assert all(num <= len(entry) <= num + 1 for entry in rest)


def test_service_routes(service: Service, client: openai.OpenAI) -> None:
    assert client.models.retrieve(service.model).id == service.model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nothing")
    assert httpx.get(f"{service.url}/ready").status_code == 200
    assert httpx.get(f"{service.url}/load").json().keys() == {"server_load", "queue_requests", "queue_tokens"}
    answer = httpx.get(f"{service.url}/version", headers={"x-request-id": "mine"})
    assert answer.json()["version"]
    assert answer.headers["x-request-id"] == "mine"
    assert "/v1/chat/completions" in httpx.get(f"{service.url}/openapi.json").json()["paths"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"structured_outputs": {"regex": "["}}, "structured_outputs"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
            "response_format",
        ),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"logprobs": 21}, "logprobs"),
    ],
)
def test_bad_requests(service: Service, fields: dict[str, Any], param: str) -> None:
    body = {"model": service.model, "prompt": "Hi", "max_tokens": 1}
    answer = httpx.post(f"{service.url}/v1/completions", json={**body, **fields}, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert httpx.post(f"{service.url}/v1/completions", json=body, timeout=60).status_code == 200

"""Chat templates give what transformers gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from scheduler.api.chat_template import ChatTemplate
from scheduler.errors import ConfigError, InvalidRequestError
from scheduler.models import resolve_model

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TOOL_CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"é": [1, "<b>"]}}}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi <b>&</b> 'you'"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    [
        {"role": "user", "content": " Add 1 and 2.\n"},
        {"role": "assistant", "content": "", "tool_calls": [TOOL_CALL]},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
    ],
]
TEMPLATE = """{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
  [{{ message['role'] }}] {{ message.content | trim }}
    {% for call in message.tool_calls or [] %}
{{ call.function | tojson }}{{ call.function.arguments | tojson(indent=2) }}
    {% endfor %}
    {%- generation %}{{ eos_token }}{% endgeneration %}
{% endfor %}
{% if tools is none and add_generation_prompt %}>{{ enable_thinking }}{% endif %}"""


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_the_text_is_that_of_transformers(
    messages: list[dict[str, Any]], add_generation_prompt: bool
) -> None:
    folder = resolve_model("smollm2-135m", progress=print).path
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **TOKENS)
    smollm = ChatTemplate.from_folder(folder)
    assert smollm is not None
    sources = {
        TEMPLATE: ChatTemplate(TEMPLATE, TOKENS),
        (folder / "chat_template.jinja").read_text(): smollm,
    }
    for source, template in sources.items():
        expected = tokenizer.apply_chat_template(
            messages,
            chat_template=source,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            enable_thinking=False,
        )
        rendered = template.render(
            messages, {"enable_thinking": False}, add_generation_prompt=add_generation_prompt
        )
        assert rendered == expected


def test_templates_and_tokens_are_found_where_models_have_them(tmp_path: Path) -> None:
    assert ChatTemplate.from_folder(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text('{"chat_template": "{{ bos_token }}1", "bos_token": {"content": "<s>"}}')
    template = ChatTemplate.from_folder(tmp_path)
    assert template is not None
    assert template.render([], add_generation_prompt=True) == "<s>1"
    config.write_text(
        '{"chat_template": [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]}'
    )
    template = ChatTemplate.from_folder(tmp_path)
    assert template is not None
    assert template.render([], add_generation_prompt=True) == "d"
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ConfigError, match="is not valid"):
        ChatTemplate.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[5].content + 'x' }}", "messages"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ deep | tojson }}", "recursion"),
        ("{% for i in range(10**9) %}{% endfor %}", "[Rr]ange"),
    ],
)
def test_what_a_template_refuses_is_the_clients_to_know(source: str, message: str) -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidRequestError, match=message):
        ChatTemplate(source, {}).render(
            [{"role": "user", "content": "x"}], {"deep": deep}, add_generation_prompt=True
        )

"""Outputs that follow a grammar, on the tokenizer and the weights of the default model."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import Qwen3Config

from scheduler.errors import InvalidRequestError
from scheduler.messages import DecodeStart, Grammar, SamplingParams
from scheduler.models import resolve_model
from tests.unit.worker.tiny_models import SHAPE, Engines, LoadTiny, prompts_of
from worker.grammar import GrammarMatcher, Grammars
from worker.model import Model, ModelSource, load_model

EOS = 2
VOCAB_SIZE = 49152
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        "home": {"anyOf": [{"type": "null"}, {"const": "sea"}]},
    },
    "required": ["name", "age", "home"],
    "additionalProperties": False,
}
DATE = r"\d{4}-(0[1-9]|1[0-2])-[0-3][0-9]( at [a-c]{2,5}(\.|!))?"
CHOICES = ["yes", "no", 'may "be"', "été ☃", "yes indeed", "line\nbreak\\", "<|im_end|>"]
SCHEMA = Grammar(kind="json_schema", text=json.dumps(PERSON))
REGEX = Grammar(kind="regex", text=DATE)
CHOICE = Grammar(kind="choice", text=json.dumps(CHOICES))
OBJECT = Grammar(kind="json_object")


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve_model("smollm2-135m", progress=print).path


@pytest.fixture(scope="module")
def grammars(folder: Path) -> Grammars:
    return Grammars(folder, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def allowed_ids(matcher: GrammarMatcher) -> list[int]:
    bits = np.unpackbits(matcher.allowed().view(np.uint8), bitorder="little")
    return np.nonzero(bits)[0].tolist()  # type: ignore[no-any-return]


def matches(grammar: Grammar, text: str) -> bool:
    """Whether others than we and llguidance say that a text follows a grammar."""
    match grammar.kind:
        case "regex":
            return re.fullmatch(grammar.text, text) is not None
        case "choice":
            return text in json.loads(grammar.text)
        case "json_object":
            return isinstance(json.loads(text), dict)
        case "json_schema":
            jsonschema.validate(json.loads(text), json.loads(grammar.text))
            return True


@pytest.mark.parametrize("grammar", [SCHEMA, REGEX, CHOICE], ids=lambda grammar: grammar.kind)
def test_whatever_is_chosen_of_the_allowed_tokens_follows_the_grammar(
    grammars: Grammars, tokenizer: Tokenizer, grammar: Grammar
) -> None:
    chance = random.Random(1)
    texts = set()
    for _ in range(60):
        matcher = grammars.matcher(grammar)
        tokens: list[int] = []
        while EOS not in tokens:
            tokens.append(chance.choice(allowed_ids(matcher)))
            matcher.accept(tokens[-1:])
        # What is complete goes on with EOS alone.
        assert allowed_ids(matcher) == [EOS]
        text = tokenizer.decode(tokens[:-1], skip_special_tokens=False)
        assert matches(grammar, text), text
        texts.add(text)
    # Every choice can come up, and everything else comes up in many forms.
    assert texts == set(CHOICES) if grammar is CHOICE else len(texts) > 30


def test_eos_may_come_only_where_the_grammar_accepts(grammars: Grammars, tokenizer: Tokenizer) -> None:
    matcher = grammars.matcher(Grammar(kind="regex", text="ab|abc"))
    a, b, c = (tokenizer.token_to_id(letter) for letter in "abc")
    assert EOS not in allowed_ids(matcher)
    matcher.accept([a])
    assert set(allowed_ids(matcher)) == {b, tokenizer.token_to_id("bc")}
    matcher.accept([b])
    assert set(allowed_ids(matcher)) == {c, EOS}
    with pytest.raises(InvalidRequestError, match="regex"):
        matcher.accept([a])


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar(kind="json_schema", text='{"type": "foo"}'), "json_schema is not usable: .*foo"),
        (Grammar(kind="json_schema", text='{"type": '), "json_schema is not usable"),
        (Grammar(kind="json_schema", text='{"not": {}}'), "json_schema is not usable: .*not"),
        (Grammar(kind="regex", text="(a"), "regex is not usable: .*unclosed group"),
        (Grammar(kind="regex", text=r"(a)\1"), "regex is not usable: .*backreferences"),
        (Grammar(kind="regex", text=r"[^\x00-\U0010ffff]"), "regex"),
        (Grammar(kind="choice", text="[]"), "choice must be a JSON list"),
        (Grammar(kind="choice", text="[1]"), "choice must be a JSON list"),
        (Grammar(kind="choice", text="yes"), "choice must be a JSON list"),
    ],
)
def test_a_grammar_that_is_none_is_refused_by_name(
    grammars: Grammars, grammar: Grammar, message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        grammars.matcher(grammar).allowed()


def test_a_model_without_a_tokenizer_fails_the_request_alone(load_tiny: LoadTiny) -> None:
    model, _ = load_tiny(Qwen3Config(**SHAPE, head_dim=16))
    engines = Engines(model)
    prompt = prompts_of(5)[0]
    plain = SamplingParams(max_tokens=2, temperature=0.0)
    items = [engines.item("g", prompt, replace(plain, grammar=OBJECT)), engines.item("p", prompt, plain)]
    failed, right = engines.run_prefill(items).outcomes
    assert (failed.token_id, failed.error_label) == (None, "invalid")
    assert "no tokenizer" in (failed.error_message or "")
    assert right.token_id is not None


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return load_model(ModelSource(name="smollm2-135m", folder=folder, dtype="float32", max_model_len=512))


@pytest.fixture
def engines(model: Model) -> Engines:
    return Engines(model, capture_tokens=(16, 64), capture_slots=(4,))


GREEDY = SamplingParams(max_tokens=40, temperature=0.0, stop_token_ids=(EOS,))
PROMPT = "Ann is 31 years old and lives at the sea. The same as JSON, with the keys name, age and home:\n"


def complete(
    engines: Engines, tokenizer: Tokenizer, *samplings: SamplingParams, made: tuple[int, ...] = ()
) -> list[list[int]]:
    """Return the tokens that one batch of the same prompt gives, each with its own settings."""
    items = []
    for i, sampling in enumerate(samplings):
        item = engines.item(str(i), tokenizer.encode(PROMPT).ids, sampling)
        items.append(replace(item, request=replace(item.request, output_token_ids=made)))
    tokens: dict[str, list[int]] = {}
    for item, outcome in zip(items, engines.run_prefill(items).outcomes, strict=True):
        assert outcome.token_id is not None, outcome.error_message
        tokens[outcome.request_id] = [outcome.token_id]
        if outcome.finish_reason is None:
            start = DecodeStart(request=item.request, lease=item.lease, first_token_id=outcome.token_id)
            engines.decode.add(start)
    while engines.decode.has_work:
        for _, event in engines.decode.step().events:
            assert event.token_id is not None, event.error_message
            tokens[event.request_id].append(event.token_id)
    return list(tokens.values())


def test_the_models_outputs_follow_their_grammars_in_one_batch(
    engines: Engines, tokenizer: Tokenizer
) -> None:
    samplings = [
        replace(GREEDY, grammar=SCHEMA),
        replace(GREEDY, grammar=OBJECT, temperature=0.7, seed=3, frequency_penalty=0.2),
        replace(GREEDY, grammar=REGEX, temperature=1.2, top_p=0.9, seed=4),
        replace(GREEDY, grammar=CHOICE),
    ]
    together = complete(engines, tokenizer, *samplings)
    for sampling, tokens in zip(samplings, together, strict=True):
        assert sampling.grammar is not None
        assert tokens[-1] == EOS
        text = tokenizer.decode(tokens[:-1], skip_special_tokens=False)
        assert matches(sampling.grammar, text), text
    # Beside a plain request, which does not notice.
    (plain,) = complete(engines, tokenizer, replace(GREEDY, max_tokens=8))
    assert complete(engines, tokenizer, replace(GREEDY, max_tokens=8), samplings[0]) == [plain, together[0]]
    # Computed again after some of its tokens.
    done = len(together[0]) // 2
    again = complete(engines, tokenizer, samplings[0], made=tuple(together[0][:done]))
    assert again == [together[0][done:]]


def test_min_tokens_keeps_an_output_going_until_it_is_complete(
    engines: Engines, tokenizer: Tokenizer
) -> None:
    lengths = [len(range(low, high)) for low, high in ((0, 1), (0, 6), (0, 9))]
    grammar = Grammar(kind="regex", text="(a ?){0,6}b?")
    tokens = complete(
        engines, tokenizer, *(replace(GREEDY, grammar=grammar, min_tokens=length) for length in lengths)
    )
    for length, ids in zip(lengths, tokens, strict=True):
        text = tokenizer.decode(ids[:-1])
        assert ids[-1] == EOS
        assert re.fullmatch(grammar.text, text)
        # A complete output ends before that, for nothing could follow.
        assert len(ids) > length or text.endswith("b") or text.count("a") == 6
    assert len(tokens[1]) > 1


def test_an_output_that_may_not_stop_repeats_eos(engines: Engines, tokenizer: Tokenizer) -> None:
    grammar = Grammar(kind="choice", text='["yes"]')
    (tokens,) = complete(
        engines, tokenizer, replace(GREEDY, grammar=grammar, stop_token_ids=(), max_tokens=6)
    )
    text = tokens[: tokens.index(EOS)]
    assert tokenizer.decode(text) == "yes"
    assert tokens[len(text) :] == [EOS] * (6 - len(text))

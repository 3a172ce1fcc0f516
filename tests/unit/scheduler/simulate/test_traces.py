from __future__ import annotations

import gzip
from itertools import islice
from pathlib import Path

import pytest

from scheduler.errors import ConfigError
from scheduler.messages import Request, SamplingParams
from scheduler.request_trace import RequestTrace
from scheduler.simulate.synthetic import parse_load
from scheduler.simulate.traces import Arrival, played, read_trace
from tests.support.data import shared_file

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
OWN = "arrival_s,prompt_tokens,output_tokens\n"


def request(request_id: str, num_prompt: int = 4) -> Request:
    return Request(
        request_id=request_id,
        api_server="api-0",
        prompt_token_ids=(1,) * num_prompt,
        sampling=SamplingParams(max_tokens=9),
    )


def written(folder: Path, text: str, name: str = "t.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_azure_times_count_from_the_first_request(tmp_path: Path) -> None:
    rows = "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    first, second = read_trace(written(tmp_path, AZURE + rows))
    assert first == Arrival(0.0, 374, 44)
    assert second.time_s == pytest.approx(4.314579)


def test_mooncake_is_in_milliseconds_and_may_be_compressed(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write('{"timestamp": 500, "input_length": 6758, "output_length": 500, "hash_ids": [0, 7]}\n')
        file.write('{"timestamp": 3500, "input_length": 7322, "output_length": 490}\n')
    assert list(read_trace(path)) == [Arrival(0.0, 6758, 500, (0, 7)), Arrival(3.0, 7322, 490)]


def test_burstgpt_counts_a_failed_answer_as_one_token(tmp_path: Path) -> None:
    text = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    text += "5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,1087,0,1087,API log\n"
    assert list(read_trace(written(tmp_path, text))) == [Arrival(0.0, 472, 18), Arrival(40.0, 1087, 1)]


def test_what_a_service_writes_is_read_in_the_order_of_arrival(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    first, second, third = (request(f"r{i}", num_prompt=3 + i) for i in range(3))
    with path.open("a") as file:
        trace = RequestTrace(file)
        trace.accepted([first, second], 1000.25)
        trace.ended(second, 7)
        assert path.read_text() == OWN  # it waits for the first
        trace.accepted([third], 1000.0)  # the clock was set back
        trace.ended(request("unknown"), 1)
        trace.ended(first, 5)
        trace.ended(third, 9)
    with path.open("a") as file:
        again = RequestTrace(file)
        again.accepted([request("r9")], 1002.25)
        again.ended(request("r9"), 2)
    assert list(read_trace(path)) == [
        Arrival(0.0, 3, 5),
        Arrival(0.0, 4, 7),
        Arrival(0.0, 5, 9),
        Arrival(2.0, 4, 2),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        (OWN, "holds no request"),
        ("when,prompt\n1,2\n", r"line 1: unknown columns when,prompt; known are TIMESTAMP,ContextTokens"),
        ("arrival_s,prompt_tokens\n1,2\n", "line 1: column output_tokens is missing"),
        (OWN + "0,5,5\n1,-3,5\n", "line 3: prompt tokens must be >= 1, got -3"),
        (OWN + "0,5,-1\n", "line 2: answer tokens must be >= 0, got -1"),
        (OWN + "2,5,5\n3,5,5\n1,5,5\n", "line 4: times must not go back, got -1 s after 1 s"),
        (OWN + "0,5,five\n", "line 2: invalid literal"),
        (OWN + "nan,5,5\n", "line 2: time must be a finite number"),
        (OWN + "0,5\n", "line 2: "),
        (AZURE + "yesterday,5,5\n", "line 2: "),
        ('{"timestamp": 0, "input_length": 3}\n', "line 1: output_length must be a number, got None"),
        (
            '{"timestamp": 0, "input_length": 3, "output_length": 3}\n[]\n',
            "line 2: timestamp must be a number",
        ),
        ('{"timestamp": 0\n', "line 1: not JSON"),
    ],
)
def test_bad_input_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        list(read_trace(written(tmp_path, text)))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        list(read_trace(tmp_path / "none.csv"))


def test_a_trace_is_played_faster_and_again() -> None:
    arrivals = [Arrival(0.0, 1, 1), Arrival(2.0, 2, 2)]
    times = [a.time_s for a in played(lambda: iter(arrivals), speed_up=2, repeat=3, limit=5)]
    assert times == [0.0, 1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize(
    "name", ["AzureLLMInferenceTrace_code.csv.gz", "mooncake_conversation_trace.jsonl.gz"]
)
def test_the_public_traces_are_read(name: str) -> None:
    arrivals = list(islice(read_trace(shared_file("data", name)), 100))
    assert len(arrivals) == 100


@pytest.mark.parametrize("kind", ["poisson", "gamma", "onoff"])
def test_synthetic_loads_have_their_rate_and_repeat_with_their_seed(kind: str) -> None:
    load = parse_load(f"{kind}:rate=20,requests=4000,cv=2,on=1,off=1,prompt=100,output=10")
    arrivals = list(load.arrivals(3))
    assert arrivals == list(load.arrivals(3)) != list(load.arrivals(4))
    rate = len(arrivals) / arrivals[-1].time_s
    assert rate == pytest.approx(10 if kind == "onoff" else 20, rel=0.15)
    assert sum(a.num_prompt for a in arrivals) / len(arrivals) == pytest.approx(100, rel=0.1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("poisson:speed=3", "unknown setting speed; known are rate, requests"),
        ("poisson:rate=fast", "rate must be a number, got 'fast'"),
        ("poisson:rate=0", "rate must be > 0, got 0"),
        ("poisson:prompt=0", "prompt must be >= 1, got 0"),
        ("poisson:rate=inf", "rate must be > 0"),
    ],
)
def test_a_wrong_synthetic_load_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_load(text)


def test_the_ids_of_mooncakes_blocks_must_be_numbers(tmp_path: Path) -> None:
    row = '{"timestamp": 5, "input_length": 6, "output_length": 5, "hash_ids": ["a"]}'
    with pytest.raises(ConfigError, match=r"line 1: hash_ids must be a list of integers >= 0, got \['a'\]"):
        list(read_trace(written(tmp_path, row)))

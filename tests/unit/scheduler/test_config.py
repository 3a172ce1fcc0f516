from __future__ import annotations

import argparse
import pickle
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from scheduler.config import GraphConfig, ServeConfig
from scheduler.errors import ConfigError
from scheduler.journal.settings import JOURNAL_FORMS, host_of
from scheduler.options import add_serve_options, load_config

# Each field with a text that is not its default, as a command line or a variable gives it, and what it becomes.
SAMPLES: dict[str, tuple[str, object]] = {
    "model": ("org/name", "org/name"),
    "host": ("0.0.0.0", "0.0.0.0"),
    "port": ("0", 0),
    "metrics_port": ("8000", 8000),
    "max_batch_requests": ("4", 4),
    "batch_timeout_ms": ("2.5", 2.5),
    "batch_policy": ("fixed", "fixed"),
    "max_batch_tokens": ("512", 512),
    "prefill_workers": ("2", 2),
    "decode_workers": ("3", 3),
    "api_servers": ("2", 2),
    "tensor_parallel_size": ("2", 2),
    "prefill_tensor_parallel_size": ("4", 4),
    "decode_tensor_parallel_size": ("1", 1),
    "max_num_seqs": ("8", 8),
    "max_model_len": ("100", 100),
    "max_capture_tokens": ("64", 64),
    "graph_optimization_config": (
        '{"cudagraph_only_prefill": true, "cudagraph_capture_sizes_prefill": [64, 8]}',
        {"cudagraph_capture_sizes_prefill": [64, 8]},
    ),
    "graph_config": ('{"capture_slots": [2, 8]}', {"capture_slots": [2, 8]}),
    "device": ("cpu", "cpu"),
    "dtype": ("float32", "float32"),
    "load_format": ("dummy", "dummy"),
    "kv_memory": ("1.5GiB", 3 * 2**29),
    "prefix_cache": ("false", False),
    "handoff_transport": ("gloo", "gloo"),
    "decode_share": ("0.5", 0.5),
    "journal": ("rediss://user:secret@example:6380/1", "rediss://user:secret@example:6380/1"),
    "journal_ttl_s": ("3600", 3600.0),
    "journal_on_failure": ("continue", "continue"),
    "api_key": ("secret", ("secret",)),
    "max_body_size": ("1MiB", 2**20),
    "max_header_size": ("8KiB", 8192),
    "max_connections": ("100", 100),
    "max_concurrent_requests": ("50", 50),
    "client_timeout_s": ("5", 5.0),
    "request_timeout_s": ("2.5", 2.5),
    "cors_origin": ("https://a.example", ("https://a.example",)),
    "tls_cert_file": ("cert.pem", "cert.pem"),
    "tls_key_file": ("key.pem", "key.pem"),
    "max_queued_requests": ("7", 7),
    "max_queued_tokens": ("777", 777),
    "drain_timeout_s": ("0", 0.0),
    "request_log": ("requests.csv", "requests.csv"),
    "write_cost_model": ("costs.json", "costs.json"),
    "watchdog_timeout_s": ("60", 60.0),
    "ray_address": ("auto", "auto"),
    "prefill_resources": ('{"prefill": 1}', {"prefill": 1}),
    "decode_resources": ('{"decode": 0.5, "fast": 1}', {"decode": 0.5, "fast": 1}),
    "usage_stats": ("true", True),
    "log_level": ("debug", "debug"),
    "log_format": ("json", "json"),
    "log_prompts": ("true", True),
    "otlp_endpoint": ("http://127.0.0.1:4318", "http://127.0.0.1:4318"),
    "dashboard_port": ("8266", 8266),
}

COMPANIONS = {
    "tls_key_file": ("tls_cert_file",),
    "prefill_resources": ("decode_resources", "ray_address"),
    "decode_resources": ("prefill_resources", "ray_address"),
}
"""Other fields without which one is refused."""


def parse(*arguments: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_serve_options(parser)
    return vars(parser.parse_args(arguments))


def load(*arguments: str, environ: dict[str, str] | None = None, file: Path | None = None) -> ServeConfig:
    extra = () if file is None else ("--config", str(file))
    return load_config(parse(*extra, *arguments), environ or {})


def refusal(**values: object) -> str:
    with pytest.raises(ConfigError) as caught:
        ServeConfig.model_validate(values)
    return str(caught.value)


def test_every_field_has_a_sample() -> None:
    assert SAMPLES.keys() == ServeConfig.model_fields.keys()


@pytest.mark.parametrize("field", SAMPLES)
def test_a_field_is_the_same_from_each_source(field: str, tmp_path: Path) -> None:
    text, value = SAMPLES[field]
    others = COMPANIONS.get(field, ())
    with_it = [part for other in others for part in ("--" + other.replace("_", "-"), SAMPLES[other][0])]
    wanted = ServeConfig.model_validate({other: SAMPLES[other][1] for other in others} | {field: value})

    flag = "--" + field.replace("_", "-")
    switches = {"true": [flag], "false": [flag.replace("--", "--no-", 1)]}
    assert load(*with_it, *switches.get(text, [flag, text])) == wanted

    variable = "PUREFILL_API_KEYS" if field == "api_key" else f"PUREFILL_{field.upper()}"
    assert load(*with_it, environ={variable: text}) == wanted

    file = tmp_path / "purefill.yaml"
    file.write_text(f"{field}: {text}\n")
    assert load(*with_it, file=file) == wanted


def test_defaults_are_those_of_the_design() -> None:
    config = load()

    assert (config.model, config.port, config.metrics_port) == ("smollm2-135m", 8000, None)
    assert (config.max_batch_requests, config.batch_timeout_ms, config.batch_policy) == (8, 20, "fixed")
    assert (config.prefill_workers, config.decode_workers, config.api_servers) == (1, 1, 1)
    assert (config.max_num_seqs, config.journal, config.usage_stats) == (64, "memory", False)


def test_command_line_wins_over_environment_over_file(tmp_path: Path) -> None:
    file = tmp_path / "purefill.yaml"
    file.write_text("port: 1\nmax_num_seqs: 11\nbatch_timeout_ms: 5\nmax_model_len:\n")
    environ = {"PUREFILL_PORT": "2", "PUREFILL_MAX_NUM_SEQS": "12", "PUREFILL_CONFIG": str(file)}

    config = load("--port", "3", environ=environ)

    assert (config.port, config.max_num_seqs, config.batch_timeout_ms) == (3, 12, 5)
    assert config.max_model_len is None


def test_config_option_wins_over_config_variable(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text(f"model: from-{name}\n")

    config = load(file=tmp_path / "a", environ={"PUREFILL_CONFIG": str(tmp_path / "b")})

    assert config.model == "from-a"


def test_several_api_keys() -> None:
    assert load("--api-key", "a", "--api-key", "b,c").api_key == ("a", "b,c")
    assert load(environ={"PUREFILL_API_KEYS": "a, b"}).api_key == ("a", "b")
    assert load(environ={"PUREFILL_API_KEYS": ""}).api_key == ()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batch_timeout_ms": -1}, "batch_timeout_ms must be >= 0, got -1"),
        ({"batch_timeout_ms": "-1"}, "batch_timeout_ms must be >= 0, got -1"),
        ({"batch_timeout_ms": "soon"}, "batch_timeout_ms must be a number, got 'soon'"),
        ({"batch_timeout_ms": "nan"}, "batch_timeout_ms must be a finite number, got 'nan'"),
        ({"max_batch_requests": 0}, "max_batch_requests must be >= 1, got 0"),
        ({"max_num_seqs": 1.5}, "max_num_seqs must be a whole number, got 1.5"),
        ({"max_num_seqs": True}, "max_num_seqs must not be true or false, got True"),
        ({"max_model_len": 1}, "max_model_len must be >= 2, got 1"),
        ({"port": 65536}, "port must be <= 65535, got 65536"),
        ({"metrics_port": -1}, "metrics_port must be >= 0, got -1"),
        ({"otlp_endpoint": "host:4318"}, "otlp_endpoint must match https?://.+, got 'host:4318'"),
        ({"device": "gpu"}, "device must be 'auto', 'cpu' or 'cuda', got 'gpu'"),
        ({"usage_stats": "maybe"}, "usage_stats must be true or false, got 'maybe'"),
        ({"model": ""}, "model must not be empty, got ''"),
        ({"kv_memory": "0"}, "kv_memory must be >= 1, got 0"),
        (
            {"kv_memory": "4GB"},
            "kv_memory must be a size such as 4GiB, 512MiB or a number of bytes, got '4GB'",
        ),
        ({"graph_config": []}, "graph_config must be a JSON object, got []"),
        ({"graph_config": {"capture_tokens": []}}, "graph_config.capture_tokens must not be empty, got []"),
        (
            {"graph_config": '{"capture_tokens": [8, 0]}'},
            "graph_config.capture_tokens.1 must be >= 1, got 0",
        ),
        (
            {"graph_config": {"capture_token": [8]}},
            "unknown key in graph_config: capture_token; did you mean capture_tokens?",
        ),
        ({"max_num_seq": 5}, "unknown setting max_num_seq; did you mean max_num_seqs?"),
        ({"nothing_like_it": 5}, "unknown setting nothing_like_it"),
        (
            {"max_batch_requests": 8, "max_num_seqs": 4},
            "max_batch_requests must be <= max_num_seqs, which is 4, got 8",
        ),
        (
            {"max_capture_tokens": 64, "graph_config": {"capture_tokens": [8]}},
            "max_capture_tokens and graph_config.capture_tokens cannot both be set",
        ),
        (
            {"max_model_len": 100, "max_queued_tokens": 99},
            "max_queued_tokens must be >= max_model_len, which is 100, got 99",
        ),
        (
            {"graph_config": {"capture_slots": [8]}, "graph_optimization_config": {}},
            "graph_config and graph_optimization_config cannot both be set",
        ),
        ({"journal": "disk"}, f"journal must be {JOURNAL_FORMS}; with rediss for TLS"),
        ({"journal": "redis://"}, f"journal must be {JOURNAL_FORMS}; with rediss for TLS"),
        (
            {"journal": "redis+sentinel://a:1"},
            "journal must be redis+sentinel://HOST:PORT,HOST:PORT/SERVICE or .../SERVICE/DATABASE",
        ),
        ({"prefill_resources": {"a": 1}}, "prefill_resources and decode_resources must both be set, or none"),
        (
            {"prefill_resources": {"a": 1}, "decode_resources": {"b": 1}},
            "prefill_resources and decode_resources need ray_address",
        ),
        (
            {"prefill_resources": {"GPU": 1}, "decode_resources": {"b": 1}, "ray_address": "auto"},
            "prefill_resources and decode_resources must be custom resources, got GPU",
        ),
        ({"decode_resources": '{"a": 0}'}, "decode_resources.a must be > 0, got 0"),
        ({"decode_resources": "[]"}, "decode_resources must be a JSON object, got []"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be >= 1, got 0"),
        (
            {"decode_tensor_parallel_size": 2, "handoff_transport": "gloo"},
            "handoff_transport must be auto, shm or cuda_ipc with tensor_parallel_size > 1, got gloo",
        ),
        (
            {
                "tensor_parallel_size": 2,
                "prefill_resources": {"a": 1},
                "decode_resources": {"b": 1},
                "ray_address": "auto",
            },
            "prefill_resources and decode_resources cannot be set with tensor_parallel_size > 1: all workers are on "
            "one host then",
        ),
    ],
)
def test_a_wrong_value_is_refused_in_one_line(values: dict[str, object], message: str) -> None:
    assert refusal(**values) == message


def test_graph_config_that_is_no_json_is_refused_in_one_line() -> None:
    message = refusal(graph_config="{oops\n}")

    assert message.startswith("graph_config must be JSON (")
    assert "\n" not in message


def test_messages_say_which_source_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "purefill.yaml"
    file.write_text("port: -1\n")

    with pytest.raises(ConfigError, match=rf"^port must be >= 0, got -1 \(in {file}\)$"):
        load(file=file)
    with pytest.raises(ConfigError, match=r"^port must be >= 0, got -2 \(from PUREFILL_PORT\)$"):
        load(file=file, environ={"PUREFILL_PORT": "-2"})
    with pytest.raises(ConfigError, match=r"^port must be >= 0, got -3$"):
        load("--port=-3", file=file, environ={"PUREFILL_PORT": "-2"})


def test_unknown_names_in_file_and_environment_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "purefill.yaml"
    file.write_text("batch_timeout: 5\n")

    with pytest.raises(ConfigError, match=r"^unknown setting batch_timeout; did you mean batch_timeout_ms\?"):
        load(file=file)
    with pytest.raises(ConfigError, match=r"^unknown variable PUREFILL_PROT; did you mean PUREFILL_PORT\?$"):
        load(environ={"PUREFILL_PROT": "1"})
    assert load(environ={"PUREFILL_CACHE": "/x", "OTHER_PORT": "1"}) == ServeConfig()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a: [", "is not YAML: "),
        ("- port", "must hold names and values, got ['port']"),
        ("\x00", "is not YAML: "),
    ],
)
def test_a_broken_file_is_refused_in_one_line(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "purefill.yaml"
    file.write_text(content)

    with pytest.raises(ConfigError) as caught:
        load(file=file)

    assert str(caught.value).startswith(f"config file {file} {message}")
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_refused_and_an_empty_one_is_not(tmp_path: Path) -> None:
    file = tmp_path / "purefill.yaml"

    with pytest.raises(ConfigError, match=f"^config file {file} cannot be read: No such file or directory$"):
        load(file=file)
    file.touch()
    assert load(file=file) == ServeConfig()


@pytest.mark.parametrize(
    ("fastdeploy", "wanted"),
    [
        ({}, GraphConfig()),
        ({"use_cudagraph": True, "cudagraph_only_prefill": True}, GraphConfig()),
        ({"cudagraph_capture_sizes_prefill": [8, 512]}, GraphConfig(capture_tokens=(8, 512))),
        (
            {"cudagraph_capture_sizes_prefill": [8, 64, 512], "max_capture_shape_prefill": 64},
            GraphConfig(capture_tokens=(8, 64)),
        ),
        ({"max_capture_shape_prefill": 32}, GraphConfig(capture_tokens=(16, 24, 32))),
    ],
)
def test_fastdeploy_keys_become_a_graph_config(fastdeploy: dict[str, Any], wanted: GraphConfig) -> None:
    config = ServeConfig.model_validate({"graph_optimization_config": fastdeploy})

    assert config.graph_config == wanted


def test_fastdeploy_decode_only_graphs_are_refused() -> None:
    message = refusal(graph_optimization_config={"cudagraph_only_prefill": False})

    assert message == "graph_optimization_config.cudagraph_only_prefill must be True, got False"


def test_secrets_stay_out_of_messages_and_logs() -> None:
    assert "hunter2" not in refusal(api_key=["hunter2", ""])
    assert "hunter2" not in refusal(journal="rediss:hunter2@127.0.0.1")
    assert "hunter2" not in repr(ServeConfig(api_key=("hunter2",), journal="redis://:hunter2@example"))
    assert host_of("rediss://user:hunter2@example:1/2?password=hunter2") == "rediss://example:1/2"


def test_a_config_is_frozen_and_travels_between_processes() -> None:
    config = ServeConfig(graph_config=GraphConfig(capture_tokens=(16, 64)))

    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(ValidationError, match="frozen"):
        config.port = 1  # type: ignore[misc]

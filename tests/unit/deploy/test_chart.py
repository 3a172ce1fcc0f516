"""What the chart makes of its examples, and of wrong values."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import helm_python
import promql_parser
import pytest
import yaml

from scheduler.cli import _parsers
from scheduler.config import ServeConfig
from scheduler.options import load_config
from tests.unit.deploy.chart import (
    CHART,
    EXAMPLES,
    FULLNAME,
    Manifest,
    container_of,
    example,
    one,
    pod_templates,
    render,
    variables_of,
)
from tests.unit.deploy.schemas import kuberay_errors, kubernetes_errors
from tests.unit.deploy.test_dashboards import LABELS, dashboards, rules, selectors

CUSTOM = {"RayCluster", "ServiceMonitor", "PodMonitor", "PrometheusRule", "ScaledObject", "HTTPRoute"}
"""Kinds that Kubernetes itself does not know."""
MAX_NAME = 63


def config_of(objects: list[Manifest]) -> ServeConfig:
    """Return the settings that the front end's file gives `purefill serve`, as the real program reads them."""
    values = yaml.safe_load(one(objects, "ConfigMap", f"{FULLNAME}-config")["data"]["purefill.yaml"])
    return load_config({**values, "ray_address": "auto"}, {})


@pytest.fixture(scope="module", params=[None, *EXAMPLES], ids=str)
def objects(request: pytest.FixtureRequest) -> list[Manifest]:
    return render({} if request.param is None else example(request.param))


@pytest.fixture(scope="module")
def everything() -> list[Manifest]:
    return render(example("several-nodes"))


@pytest.mark.parametrize("name", [None, *EXAMPLES], ids=str)
def test_helm_finds_nothing_wrong(name: str | None) -> None:
    report = helm_python.lint(CHART, {} if name is None else example(name), strict=True)
    assert report["errors"] == []
    assert [item for item in report["messages"] if item["severity"] > 1] == []


def test_every_object_is_one_that_kubernetes_takes(objects: list[Manifest]) -> None:
    for item in objects:
        if item["kind"] not in CUSTOM:
            assert kubernetes_errors(item) == []


def test_the_cluster_is_one_that_kuberay_takes(objects: list[Manifest]) -> None:
    assert kuberay_errors(one(objects, "RayCluster")) == []


def test_pods_of_the_cluster_are_pods_that_kubernetes_takes(objects: list[Manifest]) -> None:
    for name, template in pod_templates(objects).items():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": template["spec"]}
        assert kubernetes_errors(pod) == []


def test_names_and_labels_fit() -> None:
    for item in render(
        example("several-nodes"), release="a-release-whose-name-is-as-long-as-helm-allows-it-to-b"
    ):
        # KubeRay appends the group and two random parts.
        room = 23 if item["kind"] == "RayCluster" else 0
        assert len(item["metadata"]["name"]) + room <= MAX_NAME
        labels = item["metadata"]["labels"].values()
        assert all(re.fullmatch(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", text) for text in labels)


def test_the_front_end_is_started_as_the_real_program_takes_it(objects: list[Manifest]) -> None:
    container = container_of(pod_templates(objects)["frontend"])
    assert container["command"] == ["/bin/bash", "-c"]
    words = shlex.split(container["args"][0])
    serve = words[words.index("purefill") + 1 :]
    options = vars(_parsers()[0].parse_args(serve))
    mounts = {item["mountPath"] for item in container["volumeMounts"]}
    assert options == {
        "command": "serve",
        "config": "/etc/purefill/purefill.yaml",
        "ray_address": "auto",
    }
    assert "/etc/purefill" in mounts
    assert config_of(objects).host == "0.0.0.0"


def test_hooks_and_model_containers_run_what_the_real_program_knows(objects: list[Manifest]) -> None:
    parser, _ = _parsers()
    for name, template in pod_templates(objects).items():
        if name in ("head", "redis"):
            continue
        for init in template["spec"].get("initContainers", []):
            assert init["command"][0] == "purefill"
            assert parser.parse_args(init["command"][1:]).name == config_of(objects).model
        if name != "frontend":
            hook = container_of(template)["lifecycle"]["preStop"]["exec"]["command"]
            leave = parser.parse_args(hook[1:])
            grace = template["spec"]["terminationGracePeriodSeconds"]
            assert (leave.command, leave.timeout_s) == ("leave", config_of(objects).drain_timeout_s)
            assert grace >= leave.timeout_s + 20


def test_ray_start_gets_options_that_ray_has(objects: list[Manifest]) -> None:
    from ray.scripts.scripts import start

    known = {flag for option in start.params for flag in option.opts}
    for name, template in pod_templates(objects).items():
        if name != "redis":
            flags = re.findall(r"(--[a-z-]+)=?", container_of(template)["args"][0].split("purefill serve")[0])
            assert "--node-ip-address" in flags
            assert set(flags) <= known


def test_workers_need_what_their_pods_bring(objects: list[Manifest]) -> None:
    config = config_of(objects)
    places = {"purefill_prefill": 0.0, "purefill_decode": 0.0}
    cluster = one(objects, "RayCluster")
    for group in cluster["spec"]["workerGroupSpecs"]:
        if match := re.search(r"--resources='(\{.*?\})'", container_of(group["template"])["args"][0]):
            for name, count in yaml.safe_load(match[1]).items():
                places[name] += count * group["replicas"]
    assert set(config.prefill_resources) | set(config.decode_resources) == places.keys()
    assert places["purefill_prefill"] >= config.prefill_workers
    assert places["purefill_decode"] >= config.decode_workers


def test_workers_ask_for_gpus_and_the_head_and_front_end_do_not() -> None:
    templates = pod_templates(render(example("two-prefill-six-decode")))
    gpus = {
        name: container_of(template)["resources"]["limits"].get("nvidia.com/gpu", 0)
        for name, template in templates.items()
    }
    assert gpus == {"head": 0, "frontend": 0, "prefill": 1, "decode": 1, "shared": 1, "redis": 0}
    assert "--num-gpus=0" in container_of(templates["head"])["args"][0]
    assert "--num-gpus=1" in container_of(templates["prefill"])["args"][0]


def test_a_trial_without_gpus_asks_for_none() -> None:
    objects = render(example("cpu-trial"))
    (shared,) = [
        group
        for group in one(objects, "RayCluster")["spec"]["workerGroupSpecs"]
        if group["replicas"] and group["groupName"] != "frontend"
    ]
    assert "gpu" not in str(container_of(shared["template"])["resources"])
    assert config_of(objects).device == "cpu"


def test_ports_agree(everything: list[Manifest]) -> None:
    front = container_of(pod_templates(everything)["frontend"])
    ports = {item["name"]: item["containerPort"] for item in front["ports"]}
    assert ports["http"] == config_of(everything).port
    assert str(ports["metrics"]) == variables_of(front)["RAY_METRICS_PORT"]
    for probe in ("startupProbe", "readinessProbe"):
        assert front[probe]["httpGet"] == {"path": "/health", "port": "http"}
    service = one(everything, "Service")
    assert service["spec"]["ports"][0]["targetPort"] == "http"
    monitor = one(everything, "ServiceMonitor")["spec"]
    assert monitor["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    labels = pod_templates(everything)["frontend"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    (backend,) = one(everything, "HTTPRoute")["spec"]["rules"][0]["backendRefs"]
    assert backend == {"name": service["metadata"]["name"], "port": service["spec"]["ports"][0]["port"]}


def test_rays_metrics_are_scraped_from_every_ray_pod(everything: list[Manifest]) -> None:
    monitor = one(everything, "PodMonitor", f"{FULLNAME}-ray")["spec"]
    assert [endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]] == ["metrics"]
    for name, template in pod_templates(everything).items():
        container = container_of(template)
        assert monitor["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items(), name
        assert {"name": "metrics", "containerPort": 8080} in container["ports"]
        assert '--metrics-export-port="$RAY_METRICS_PORT"' in container["args"][0]


def test_probes_look_at_ports_that_ray_is_told_to_open(everything: list[Manifest]) -> None:
    for name, template in pod_templates(everything).items():
        container = container_of(template)
        variables = variables_of(container)
        expected: object = int(variables["RAY_NODE_PORT"])
        if name == "head":
            expected = "gcs-server"
            assert {"name": expected, "containerPort": int(variables["RAY_GCS_PORT"])} in container["ports"]
        if name != "frontend":
            assert container["livenessProbe"]["tcpSocket"]["port"] == expected
            assert container["readinessProbe"]["tcpSocket"]["port"] == expected


def test_every_metric_that_scaling_and_records_ask_for_exists(everything: list[Manifest]) -> None:
    groups = one(everything, "PrometheusRule")["spec"]["groups"]
    queries = [rule["expr"] for rule in groups[0]["rules"]]
    for pool in ("prefill", "decode"):
        triggers = one(everything, "ScaledObject", f"{FULLNAME}-{pool}")["spec"]["triggers"]
        queries += [trigger["metadata"]["query"] for trigger in triggers]
    assert len(queries) == 5
    for query in queries:
        for selector in selectors(promql_parser.parse(query)):
            labels = {matcher.name for matcher in selector.matchers.matchers}
            assert labels <= {*LABELS[selector.name], "namespace", "service"}


def test_the_chart_has_all_dashboards_and_rules(everything: list[Manifest]) -> None:
    groups = one(everything, "PrometheusRule")["spec"]["groups"]
    assert [rule for group in groups[1:] for rule in group["rules"]] == rules()
    found = {
        name: json.loads(text)
        for item in everything
        if "grafana_dashboard" in item["metadata"]["labels"]
        for name, text in item["data"].items()
    }
    assert found == dashboards()


def test_scaling_targets_a_deployment_of_the_same_pods(everything: list[Manifest]) -> None:
    templates = pod_templates(everything)
    for pool in ("prefill", "decode"):
        scaled = one(everything, "ScaledObject", f"{FULLNAME}-{pool}")["spec"]
        deployment = one(everything, "Deployment", scaled["scaleTargetRef"]["name"])
        assert "replicas" not in deployment["spec"]
        group, elastic = container_of(templates[pool]), container_of(templates[f"{pool}-elastic"])
        assert elastic["args"] == group["args"]
        assert set(variables_of(elastic)) - set(variables_of(group)) == {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN"}
        assert deployment["spec"]["selector"]["matchLabels"].items() <= (
            templates[f"{pool}-elastic"]["metadata"]["labels"].items()
        )


def test_changing_replicas_changes_no_running_pod() -> None:
    few, many = render({"decode": {"replicas": 1}}), render({"decode": {"replicas": 7}})
    assert pod_templates(few) == pod_templates(many)


def test_changing_settings_replaces_the_front_end() -> None:
    one_way, other = (render({"config": {"max_num_seqs": number}}) for number in (8, 16))
    before, after = pod_templates(one_way), pod_templates(other)
    assert before["frontend"] != after["frontend"]
    assert before["decode"] == after["decode"]


def test_every_container_is_confined(objects: list[Manifest]) -> None:
    for template in pod_templates(objects).values():
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["automountServiceAccountToken"] is False
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert re.search(r":[\w.-]+$|@sha256:", container["image"])
            assert not container["image"].endswith(":latest")


def test_ray_processes_get_no_secret_of_the_service() -> None:
    front = container_of(pod_templates(render({"apiKeys": {"keys": ["k" * 16]}}))["frontend"])
    secret = {name for name, source in variables_of(front).items() if isinstance(source, dict)} - {"POD_IP"}
    secret |= {name for name, value in variables_of(front).items() if "PASSWORD" in str(value)}
    assert secret == {"PUREFILL_API_KEYS", "PUREFILL_JOURNAL", "REDIS_PASSWORD"}
    before_ray = front["args"][0].split("ray start")[0]
    assert all(f"-u {name} " in before_ray for name in secret)


def test_no_secret_stands_in_a_manifest_that_is_none() -> None:
    objects = render({"apiKeys": {"keys": ["sesame-sesame-sesame"]}})
    others = [item for item in objects if item["kind"] != "Secret"]
    assert "sesame" not in str(others)
    assert one(objects, "Secret", f"{FULLNAME}-api-keys")["stringData"] == {
        "api-keys": "sesame-sesame-sesame"
    }


def test_redis_serves_the_journal_and_the_head() -> None:
    objects = render()
    front = variables_of(container_of(pod_templates(objects)["frontend"]))
    assert front["PUREFILL_JOURNAL"] == f"redis://:$(REDIS_PASSWORD)@{FULLNAME}-redis:6379/1"
    assert ServeConfig(journal=front["PUREFILL_JOURNAL"].replace("$(REDIS_PASSWORD)", "secret"))
    tolerance = one(objects, "RayCluster")["spec"]["gcsFaultToleranceOptions"]
    assert tolerance["redisAddress"] == f"redis://{FULLNAME}-redis:6379"
    without = render(example("cpu-trial"))
    assert "gcsFaultToleranceOptions" not in one(without, "RayCluster")["spec"]
    assert "PUREFILL_JOURNAL" not in variables_of(container_of(pod_templates(without)["frontend"]))


def test_only_the_front_end_and_rays_metrics_are_open_to_others(everything: list[Manifest]) -> None:
    policies = [item["spec"] for item in everything if item["kind"] == "NetworkPolicy"]
    opened = {
        port["port"] for policy in policies for rule in policy["ingress"] for port in rule.get("ports", [])
    }
    assert opened == {"http", "metrics"}


def test_budgets_protect_each_pool(everything: list[Manifest]) -> None:
    budgets = {
        tuple(item["spec"]["selector"]["matchExpressions"][0]["values"])
        for item in everything
        if item["kind"] == "PodDisruptionBudget"
    }
    assert budgets == {(name, f"{name}-elastic") for name in ("frontend", "prefill", "decode", "shared")}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"image": {"tag": "latest"}}, "image/tag"),
        ({"image": {"digest": "md5:0"}}, "image/digest"),
        ({"prefil": {"replicas": 2}}, "'prefil' not allowed"),
        ({"decode": {"replicas": -1}}, "decode/replicas"),
        ({"decode": {"replicas": "two"}}, "decode/replicas.*want integer"),
        ({"decode": {"gpu": 1}}, "'gpu' not allowed"),
        ({"prefill": {"gpuResource": "gpu"}}, "prefill/gpuResource"),
        ({"config": {"port": 9000}}, "config/port"),
        ({"apiKeys": {"keys": ["short"]}}, "apiKeys/keys/0.*minLength"),
        ({"modelCache": {"type": "nfs"}}, "modelCache/type.*'emptyDir', 'persistentVolumeClaim', 'hostPath'"),
        ({"frontend": {"waitFor": {"prefill": 0}}}, "frontend/waitFor/prefill"),
        ({"externalRedis": {"gcsAddress": "redis"}}, "externalRedis/gcsAddress"),
        ({"prefill": {"autoscaling": {"targetBusy": 1.5}}}, "prefill/autoscaling/targetBusy.*maximum"),
        ({"ray": {"upgradeStrategy": "Rolling"}}, "ray/upgradeStrategy"),
        ({"drainTimeoutSeconds": "30s"}, "drainTimeoutSeconds.*want integer"),
    ],
)
def test_a_wrong_value_is_refused_by_name(values: dict[str, Any], message: str) -> None:
    with helm_python.Chart.load(CHART) as chart, pytest.raises(helm_python.HelmValuesError, match=message):
        chart.validate_schema(values)


def test_a_pool_without_places_is_refused() -> None:
    with pytest.raises(helm_python.HelmRenderError, match=r"prefill\.places must have at least one"):
        render({"prefill": {"places": {"prefill": 0, "decode": 0}}})


def test_settings_that_the_program_refuses_are_settings_that_the_chart_leaves_to_it() -> None:
    """Every setting of the program is either the chart's own, or may stand in `config`."""
    schema = helm_python.Chart.load(CHART).schema
    assert schema is not None
    settings = schema["properties"]["config"]["properties"]
    own = {name for name, allowed in settings.items() if allowed is False}
    assert own <= ServeConfig.model_fields.keys()
    set_by_chart = yaml.safe_load(one(render(), "ConfigMap", f"{FULLNAME}-config")["data"]["purefill.yaml"])
    assert set_by_chart.keys() <= own

"""The chart makes what golden/ says, and refuses what its schema does not know."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from tokenfleet.producer.gateway.settings import GatewaySettings
from tokenfleet.worker.settings import WorkerSettings

EXAMPLES = ("minimal", "production")
OLDEST, NEWEST = "1.27", "1.34"
"""Versions of Kubernetes whose schemas the objects are held against."""


@pytest.fixture(scope="module", params=EXAMPLES)
def objects(request: Any, render: ModuleType, example: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = render.documents(example(request.param))
    return found


def of(objects: list[dict[str, Any]], kind: str, suffix: str = "") -> dict[str, Any]:
    (found,) = [
        one for one in objects if one["kind"] == kind and one["metadata"]["name"].endswith(suffix)
    ]
    return found


def pod(objects: list[dict[str, Any]], component: str) -> dict[str, Any]:
    spec: dict[str, Any] = of(objects, "Deployment", component)["spec"]["template"]["spec"]
    return spec


def variables(pod: dict[str, Any]) -> dict[str, str | None]:
    return {one["name"]: one.get("value") for one in pod["containers"][0]["env"]}


def test_the_golden_files_are_what_the_chart_makes(
    render: ModuleType, deploy: Path, tmp_path: Path
) -> None:
    render.main(tmp_path)
    for name in EXAMPLES:
        golden = (deploy / "helm" / "golden" / f"{name}.yaml").read_text()
        assert (tmp_path / f"{name}.yaml").read_text() == golden, (
            "if the change is meant: python deploy/helm/render.py"
        )


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_every_object_is_valid_kubernetes(objects: list[dict[str, Any]], version: str) -> None:
    import kubernetes_validate

    ours = [
        one for one in objects if one["apiVersion"].count(".") == 0 or "k8s.io" in one["apiVersion"]
    ]
    assert len(ours) >= 7
    for one in ours:
        kubernetes_validate.validate(one, version, strict=True)
    others = {one["kind"] for one in objects if one not in ours}
    assert others <= {"ServiceMonitor", "PrometheusRule", "ScaledObject", "TriggerAuthentication"}


@pytest.fixture(scope="module")
def production(render: ModuleType, example: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = render.documents(example("production"))
    return found


def test_what_ops_holds_is_deployed_as_it_is(production: list[dict[str, Any]], root: Path) -> None:
    rules = yaml.safe_load((root / "ops/alerts/tokenfleet.yaml").read_text())
    assert of(production, "PrometheusRule")["spec"] == rules
    for name in ("fleet", "worker"):
        data = of(production, "ConfigMap", f"-{name}")["data"]
        (text,) = data.values()
        assert json.loads(text) == json.loads((root / f"ops/dashboards/{name}.json").read_text())


def test_pods_have_longer_to_end_than_they_need_to_drain(objects: list[dict[str, Any]]) -> None:
    worker = pod(objects, "worker")
    grace = float(variables(worker)["TOKENFLEET_GRACE_S"] or 0)
    assert worker["terminationGracePeriodSeconds"] >= grace + 15
    gateway = pod(objects, "gateway")
    grace = float(variables(gateway)["TOKENFLEET_GATEWAY_GRACE_S"] or 0)
    delay = float(variables(gateway)["TOKENFLEET_GATEWAY_DRAIN_DELAY_S"] or 0)
    assert delay > 0, "nodes send requests for a while after a pod was told to end"
    assert gateway["terminationGracePeriodSeconds"] >= delay + grace + 5


def test_pods_can_do_nothing_that_they_need_not(objects: list[dict[str, Any]]) -> None:
    for component in ("worker", "gateway"):
        spec = pod(objects, component)
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["automountServiceAccountToken"] is False
        (container,) = spec["containers"]
        may = container["securityContext"]
        assert may["readOnlyRootFilesystem"] is True
        assert may["allowPrivilegeEscalation"] is False
        assert may["capabilities"] == {"drop": ["ALL"]}


def test_the_model_is_mounted_and_cannot_be_changed(objects: list[dict[str, Any]]) -> None:
    spec = pod(objects, "worker")
    (volume,) = [v for v in spec["volumes"] if v["name"] == "model"]
    assert volume["persistentVolumeClaim"]["readOnly"] is True
    (mount,) = [m for m in spec["containers"][0]["volumeMounts"] if m["name"] == "model"]
    assert mount["readOnly"] is True
    assert (variables(spec)["TOKENFLEET_MODEL"] or "").startswith(mount["mountPath"])


def test_every_variable_is_a_setting(objects: list[dict[str, Any]]) -> None:
    settings = {f"TOKENFLEET_{name.upper()}" for name in WorkerSettings.model_fields}
    assert variables(pod(objects, "worker")).keys() <= settings | {"OMP_NUM_THREADS"}
    shared = {"TOKENFLEET_REDIS_URL", "TOKENFLEET_NAMESPACE", "TOKENFLEET_PARTITIONS"}
    settings = {f"TOKENFLEET_GATEWAY_{name.upper()}" for name in GatewaySettings.model_fields}
    assert variables(pod(objects, "gateway")).keys() <= settings | shared


def test_a_worker_computes_with_the_cores_of_its_pod(render: ModuleType, example: Any) -> None:
    def threads(**worker: Any) -> Any:
        values = {**example("minimal"), "worker": worker}
        (container,) = pod(render.documents(values), "worker")["containers"]
        found = [one for one in container["env"] if one["name"] == "OMP_NUM_THREADS"]
        return found[0] if found else None

    of_the_pod = {"resourceFieldRef": {"resource": "requests.cpu"}}
    assert threads(resources={"requests": {"cpu": "4"}})["valueFrom"] == of_the_pod
    assert threads(env={"OMP_NUM_THREADS": "3"})["value"] == "3"
    assert threads(resources={"requests": {"cpu": None}}) is None, "0 is no number of threads"


def test_the_worker_accepts_the_settings_it_is_given(objects: list[dict[str, Any]]) -> None:
    given = variables(pod(objects, "worker"))
    values = {
        name.removeprefix("TOKENFLEET_").lower(): value
        for name, value in given.items()
        if value and name.startswith("TOKENFLEET_")
    }
    settings = WorkerSettings(**values)  # type: ignore[arg-type]  # pydantic reads the words
    assert settings.health_port == 8080
    assert settings.served_name == values["model_name"]


def test_budgets_services_and_monitors_select_the_pods(objects: list[dict[str, Any]]) -> None:
    labels = {
        part: of(objects, "Deployment", part)["spec"]["template"]["metadata"]["labels"]
        for part in ("worker", "gateway")
    }
    for part, mine in labels.items():
        for kind, path in (("PodDisruptionBudget", "matchLabels"), ("Service", None)):
            selector = of(objects, kind, part)["spec"]["selector"]
            selector = selector[path] if path else selector
            assert selector.items() <= mine.items()
            other = labels["gateway" if part == "worker" else "worker"]
            assert not selector.items() <= other.items()
    if any(one["kind"] == "ServiceMonitor" for one in objects):
        monitor = of(objects, "ServiceMonitor")["spec"]
        ports = set()
        for part in labels:
            service = of(objects, "Service", part)
            wanted = monitor["selector"]["matchLabels"]
            assert wanted.items() <= service["metadata"]["labels"].items()
            ports |= {port["name"] for port in service["spec"]["ports"]}
        assert {endpoint["port"] for endpoint in monitor["endpoints"]} == ports
        assert variables(pod(objects, "gateway"))["TOKENFLEET_GATEWAY_METRICS"] == "open"


def test_scaling_counts_running_jobs_of_every_partition(
    production: list[dict[str, Any]],
) -> None:
    from tokenfleet.producer.keys import Keys

    spec = of(production, "ScaledObject")["spec"]
    keys = [trigger["metadata"]["listName"] for trigger in spec["triggers"]]
    assert keys == [Keys("prod", p).live("qwen3-8b") for p in range(4)]
    assert spec["advanced"]["scalingModifiers"]["formula"] == "p0 + p1 + p2 + p3"
    assert [trigger["name"] for trigger in spec["triggers"]] == ["p0", "p1", "p2", "p3"]
    assert "replicas" not in of(production, "Deployment", "worker")["spec"], "KEDA's to say"
    assert (
        spec["scaleTargetRef"]["name"] == of(production, "Deployment", "worker")["metadata"]["name"]
    )


def test_who_scrapes_reaches_whatever_is_scraped(
    production: list[dict[str, Any]], example: Any
) -> None:
    wanted = example("production")["networkPolicy"]
    for part, callers in (("worker", []), ("gateway", wanted["gatewayFrom"])):
        (rule,) = of(production, "NetworkPolicy", part)["spec"]["ingress"]
        assert rule["from"] == [*callers, *wanted["metricsFrom"]]


def changed(values: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    made = deepcopy(values)
    *way, last = path.split(".")
    spot = made
    for part in way:
        spot = spot.setdefault(part, {})
    spot[last] = value
    return made


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("worker.slots", "many"),
        ("worker.slots", 0),
        ("worker.extraTerminationSeconds", 0),
        ("worker.env", {"PATH": "/x"}),
        ("worker.envs", {}),
        ("redis.url", "http://redis"),
        ("redis.url", ""),
        ("redis.namespace", "a:b"),
        ("model.claimName", ""),
        ("model.path", "/etc"),
        ("model.name", "a b"),
        ("gateway.anonymousTenant", ""),
        ("autoscaling", {"enabled": True}),
        ("image.pullPolicy", "Sometimes"),
        ("telemetry.otlpEndpoint", "collector:4317"),
    ],
)
def test_a_wrong_value_stops_the_install_by_name(
    render: ModuleType, example: Any, path: str, value: Any
) -> None:
    import helm_python

    with pytest.raises(helm_python.HelmError) as refused:
        render.documents(changed(example("minimal"), path, value))
    named = {*path.split("."), *(value if isinstance(value, dict) else ())}
    assert any(name in str(refused.value) for name in named)


def test_every_value_is_in_the_schema_and_every_schema_entry_has_a_default(deploy: Path) -> None:
    chart = deploy / "helm" / "tokenfleet"
    values = yaml.safe_load((chart / "values.yaml").read_text())
    schema = json.loads((chart / "values.schema.json").read_text())

    def compare(values: dict[str, Any], schema: dict[str, Any], path: str) -> None:
        known = schema["properties"].keys() - {"global"}
        assert values.keys() == known, path
        for name, value in values.items():
            below = schema["properties"][name]
            if isinstance(value, dict) and "properties" in below:
                assert below["additionalProperties"] is False, f"{path}.{name}"
                compare(value, below, f"{path}.{name}")

    compare(values, schema, "")


def test_helm_lint_has_nothing_to_say(deploy: Path, render: ModuleType, example: Any) -> None:
    import helm_python

    found = helm_python.lint(str(deploy / "helm" / "tokenfleet"), example("production"))
    assert [m for m in found["messages"] if m["severity"] > 1] == []

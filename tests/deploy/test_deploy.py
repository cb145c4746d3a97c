"""What cannot be run where there is no container engine is linted and held against its schema."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from fnmatch import fnmatch
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tokenfleet.engine import EngineConfig
from tokenfleet.producer.gateway.settings import GatewaySettings
from tokenfleet.worker.settings import WorkerSettings

YAML_RULES = "{extends: relaxed, rules: {line-length: {max: 140}, commas: disable}}"


def tool(name: str) -> str:
    """A program of this environment."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    assert found is not None, f"{name} is not installed"
    return found


def run(*arguments: str | Path) -> str:
    done = subprocess.run(
        [str(a) for a in arguments], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


VARIABLE = re.compile(r"\$\{\w+:([-?])([^}]*)\}")


@pytest.fixture(scope="module")
def compose(deploy: Path) -> dict[str, Any]:
    """The file as compose reads it where MODEL_DIR is /srv/model and nothing else is set."""
    text = (deploy / "compose.yaml").read_text()
    text = VARIABLE.sub(lambda found: found[2] if found[1] == "-" else "/srv/model", text)
    read: dict[str, Any] = yaml.safe_load(text)
    return read


def test_the_dockerfile_passes_its_linter(deploy: Path) -> None:
    run(tool("hadolint"), deploy / "Dockerfile")


def test_every_yaml_file_passes_its_linter(root: Path) -> None:
    files = [
        *(root / "ops").glob("*.yaml"),
        *(root / "ops/alerts").glob("*.yaml"),
        *(root / "deploy").glob("*.yaml"),
        *(root / "deploy/grafana").glob("*.yaml"),
        *(root / "deploy/helm/examples").glob("*.yaml"),
        root / "deploy/helm/tokenfleet/values.yaml",
        root / "deploy/helm/tokenfleet/Chart.yaml",
    ]
    assert len(files) > 10
    run(tool("yamllint"), "-d", YAML_RULES, *files)


def test_the_image_runs_as_nobody_special_and_holds_no_model(deploy: Path) -> None:
    text = (deploy / "Dockerfile").read_text()
    last = text[text.rindex("\nFROM ") :]
    assert re.search(r"^USER 10001:10001$", last, re.MULTILINE)
    assert re.search(r"^HEALTHCHECK ", last, re.MULTILINE)
    assert last.count("COPY ") == 1, "the environment alone"
    assert text.count("FROM python:") == text.count("\nFROM ")
    assert all(re.search(r":\d+\.\d+\.\d+-", line) for line in re.findall(r"^FROM .*", text, re.M))
    assert text.count("-c deploy/constraints.txt") == text.count("RUN pip install")


@pytest.mark.parametrize("index", ["", "https://download.pytorch.org/whl/cpu"])
def test_a_cuda_image_takes_the_triton_that_its_torch_names(
    index: str, deploy: Path, tmp_path: Path
) -> None:
    """PyPI's torch pins another one than the constraints do; no installer could satisfy both."""
    (tmp_path / "deploy").mkdir()
    made = tmp_path / "deploy" / "constraints.txt"
    given = (deploy / "constraints.txt").read_text()
    made.write_text(given)
    text = (deploy / "Dockerfile").read_text()
    (command,) = re.findall(r"^RUN (if .*triton.*)$", text, re.M)
    assert text.index(command) < text.index("RUN pip install")
    run("env", f"TORCH_INDEX={index}", "sh", "-c", f"cd '{tmp_path}' && {command}")
    assert ("triton==" in made.read_text()) == bool(index)
    assert made.read_text().count("==") == given.count("==") - (not index)


def test_a_wheel_made_of_what_the_image_copies_has_every_file(root: Path, tmp_path: Path) -> None:
    copied = re.findall(r"^COPY (?!--)(.*) \S+$", (root / "deploy/Dockerfile").read_text(), re.M)
    names = [name for line in copied for name in line.split()]
    allowed = [
        line[1:]
        for line in (root / "deploy/Dockerfile.dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    assert set(names) <= set(allowed)
    listed = ("ls-files", "--cached", "--others", "--exclude-standard", "--deduplicate")
    files = run("git", "-C", root, *listed, "--", *names).split()
    for file in files:
        target = tmp_path / "src" / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / file, target)
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation")
    run(*pip, "-w", tmp_path / "out", tmp_path / "src")
    (wheel,) = (tmp_path / "out").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        inside = {
            name.removeprefix("tokenfleet/")
            for name in archive.namelist()
            if name.startswith("tokenfleet/")
        }
    packages = {f for f in files if f.split("/")[0] in ("producer", "worker", "engine", "kernels")}
    assert {f for f in packages if not fnmatch(f, "*.md")} - inside == set()


def test_every_version_in_the_image_is_exact(deploy: Path) -> None:
    """On the platform of the test; a CUDA build of torch brings libraries of its own."""
    lines = (deploy / "constraints.txt").read_text().splitlines()
    pinned = {canonicalize_name(line.split("==")[0]) for line in lines if "==" in line}
    wanted, seen = [("tokenfleet", "worker"), ("tokenfleet", "gateway")], set()
    while wanted:
        name, extra = wanted.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        for text in requires(name) or ():
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                wanted += [(canonicalize_name(needed.name), e) for e in needed.extras or {""}]
    names = {name for name, _ in seen} - {"tokenfleet"}
    assert len(names) > 40
    assert names - pinned == set()


def test_the_compose_file_is_one(compose: dict[str, Any]) -> None:
    from compose_spec import ComposeSpecification, PyCompose

    resolved = json.dumps(compose)
    PyCompose.from_json(resolved)
    ComposeSpecification.model_validate(compose)
    assert {"redis", "worker", "gateway", "collector", "prometheus", "grafana"} <= set(
        compose["services"]
    )


def test_every_image_in_compose_has_an_exact_version(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert re.search(r":v?\d+\.\d+\.\d+", service["image"]), name


def test_every_file_that_compose_mounts_is_there(compose: dict[str, Any], deploy: Path) -> None:
    made_by_the_user = {"./keys.toml"}
    mounts = [
        volume.split(":")[0]
        for service in compose["services"].values()
        for volume in service.get("volumes", [])
    ]
    mounts += [secret["file"] for secret in compose["secrets"].values()]
    paths = {mount for mount in mounts if mount.startswith(".")} - made_by_the_user
    assert len(paths) > 5
    for path in paths:
        assert (deploy / path).exists(), path
    named = {m for m in mounts if not m.startswith((".", "/"))}
    assert named == compose["volumes"].keys()


def test_every_container_is_hardened_and_has_time_to_drain(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
    worker, gateway = compose["services"]["worker"], compose["services"]["gateway"]
    grace_s = float(worker["environment"]["TOKENFLEET_GRACE_S"])
    assert _seconds(worker["stop_grace_period"]) >= grace_s + 15
    settings = GatewaySettings(anonymous_tenant="t")
    assert _seconds(gateway["stop_grace_period"]) >= settings.drain_delay_s + settings.grace_s + 15
    assert any(volume.endswith(":/models:ro") for volume in worker["volumes"])


def test_compose_speaks_of_settings_that_exist(compose: dict[str, Any]) -> None:
    worker = {f"TOKENFLEET_{name.upper()}" for name in WorkerSettings.model_fields}
    assert compose["services"]["worker"]["environment"].keys() <= worker | {"OMP_NUM_THREADS"}
    gateway = {f"TOKENFLEET_GATEWAY_{name.upper()}" for name in GatewaySettings.model_fields}
    given = compose["services"]["gateway"]["environment"].keys()
    assert given <= gateway | {"TOKENFLEET_REDIS_URL"}


def test_redis_in_compose_keeps_what_it_accepted(compose: dict[str, Any]) -> None:
    command = " ".join(compose["services"]["redis"]["command"])
    assert "--appendonly yes" in command
    assert "--maxmemory-policy noeviction" in command


@pytest.mark.parametrize("unit", ["tokenfleet-worker@.service", "tokenfleet-gateway.service"])
def test_units_are_valid_and_hardened(deploy: Path, tmp_path: Path, unit: str) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip(
            "systemd-analyze is not installed; apt-get install systemd checks the units too"
        )
    text = (deploy / "systemd" / unit).read_text()
    file = tmp_path / unit
    file.write_text(text.replace("/opt/tokenfleet/bin/tokenfleet", "/bin/true"))
    run("systemd-analyze", "verify", "--man=no", file)
    run("systemd-analyze", "security", "--offline=true", "--threshold=20", file)


def test_the_workers_unit_leaves_a_cards_devices_alone(deploy: Path) -> None:
    """ProtectClock allows one device, which before systemd 253 forbids all others."""
    text = (deploy / "systemd" / "tokenfleet-worker@.service").read_text()
    for setting in ("PrivateDevices", "ProtectClock", "DeviceAllow", "DevicePolicy"):
        assert re.search(rf"^{setting}=", text, re.MULTILINE) is None


def test_with_the_gpu_file_a_worker_has_a_card_and_serves_on_nothing_else(
    deploy: Path, compose: dict[str, Any]
) -> None:
    from compose_spec import ComposeSpecification

    over = yaml.safe_load((deploy / "compose.gpu.yaml").read_text())
    ComposeSpecification.model_validate(over)
    ((name, worker),) = over["services"].items()
    assert worker["image"] == compose["services"][name]["image"] + "-cuda"
    assert worker["build"]["args"] == {"TORCH_INDEX": ""}  # as the Dockerfile says
    told = {k.removeprefix("TOKENFLEET_").lower(): v for k, v in worker["environment"].items()}
    assert told.pop("device") == "cuda"
    config = EngineConfig(".", **{name: int(value) for name, value in told.items()})
    assert config.max_num_seqs > EngineConfig(".").max_num_seqs
    (card,) = worker["deploy"]["resources"]["reservations"]["devices"]
    assert card == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}


def test_the_unit_waits_longer_than_the_drain(deploy: Path) -> None:
    for unit, grace in (
        ("tokenfleet-worker@.service", "TOKENFLEET_GRACE_S"),
        ("tokenfleet-gateway.service", "TOKENFLEET_GATEWAY_GRACE_S"),
    ):
        text = (deploy / "systemd" / unit).read_text()
        given = re.search(rf"{grace}=(\d+)", text)
        patience = re.search(r"^TimeoutStopSec=(\d+)", text, re.MULTILINE)
        assert given is not None
        assert patience is not None
        assert int(patience[1]) >= int(given[1]) + 15


def _seconds(text: str) -> float:
    assert text.endswith("s")
    return float(text[:-1])

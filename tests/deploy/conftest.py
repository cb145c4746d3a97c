"""Where deploy/ is, and the chart as helm's own engine renders it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml


@pytest.fixture(scope="session")
def root() -> Path:
    return Path(__file__).parents[2]


@pytest.fixture(scope="session")
def deploy(root: Path) -> Path:
    return root / "deploy"


@pytest.fixture(scope="session")
def render(deploy: Path) -> ModuleType:
    """deploy/helm/render.py."""
    pytest.importorskip("helm_python", reason="helm-python-sdk has no wheel for this platform")
    spec = importlib.util.spec_from_file_location("render", deploy / "helm" / "render.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def example(deploy: Path) -> Any:
    """example(name): the values of one of the chart's examples."""

    def load(name: str) -> dict[str, Any]:
        found: dict[str, Any] = yaml.safe_load(
            (deploy / "helm" / "examples" / f"{name}.yaml").read_text()
        )
        return found

    return load

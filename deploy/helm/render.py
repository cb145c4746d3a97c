"""Renders the chart with the values in examples/, as golden/ keeps them.

    python deploy/helm/render.py [FOLDER]      golden/ when no folder is given

Helm's own engine does it (the Go SDK as a library: package helm-python-sdk). What the chart takes
from ops/ as it is, is shown by its name only, so that a golden file changes when the chart does.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import helm_python
import yaml

HERE = Path(__file__).parent
OPS = HERE.parents[1] / "ops"
RELEASE, NAMESPACE = "llm", "serving"


def documents(values: dict[str, Any]) -> list[dict[str, Any]]:
    """The objects of a release with these values, in the order of their kinds and names.

    Raises:
        helm_python.HelmError: the values are not the schema's, or a template fails.
    """
    with helm_python.Chart.load(str(HERE / "tokenfleet")) as chart:
        rendered = chart.render(values, name=RELEASE, namespace=NAMESPACE)
    texts = (text for path, text in rendered.items() if path.endswith(".yaml"))
    found = [one for text in texts for one in yaml.safe_load_all(text) if one]
    return sorted(found, key=lambda one: (one["kind"], one["metadata"]["name"]))


def without_ops(document: dict[str, Any]) -> dict[str, Any]:
    """The same with what comes from ops/ named instead of quoted."""
    if document["kind"] == "PrometheusRule":
        rules = yaml.safe_load((OPS / "alerts" / "tokenfleet.yaml").read_text())
        if document["spec"] == rules:
            return {**document, "spec": "ops/alerts/tokenfleet.yaml"}
    if document["kind"] == "ConfigMap":
        data = {name: _dashboard(name, text) for name, text in document["data"].items()}
        return {**document, "data": data}
    return document


def _dashboard(name: str, text: str) -> str:
    file = OPS / "dashboards" / name.removeprefix("tokenfleet-")
    same = file.is_file() and json.loads(file.read_text()) == json.loads(text)
    return f"ops/dashboards/{file.name}" if same else text


def main(folder: Path) -> None:
    for example in sorted((HERE / "examples").glob("*.yaml")):
        values = yaml.safe_load(example.read_text())
        text = yaml.safe_dump_all([without_ops(one) for one in documents(values)], width=120)
        (folder / example.name).write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "golden")

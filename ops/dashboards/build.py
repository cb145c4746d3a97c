"""Writes fleet.json and worker.json, the dashboards that Grafana imports.

    python ops/dashboards/build.py

What people edit are fleet.py and worker.py; a test compares the files with what this makes of them.
"""

from __future__ import annotations

from pathlib import Path

from fleet import FLEET
from panel import as_json

from worker import WORKER

DASHBOARDS = {"fleet.json": FLEET, "worker.json": WORKER}


def main() -> None:
    for name, dashboard in DASHBOARDS.items():
        (Path(__file__).parent / name).write_text(as_json(dashboard))


if __name__ == "__main__":
    main()

"""ops/telemetry.md and the code name the same spans, events, attributes and metrics."""

from __future__ import annotations

import re
from pathlib import Path
from unittest.mock import Mock

from tokenfleet.producer import semconv
from tokenfleet.producer.gateway.metrics import GatewayMetrics
from tokenfleet.worker.observing.metrics import About, Instruments
from tokenfleet.worker.observing.prometheus import VLLM_NAMES

PAGE = (Path(__file__).parents[2] / "ops" / "telemetry.md").read_text()


def of(prefix: str) -> dict[str, str]:
    found = {k: v for k, v in vars(semconv).items() if k.isupper() and isinstance(v, str)}
    return {name: value for name, value in found.items() if name.startswith(prefix)}


def test_every_metric_that_is_made_is_on_the_page_with_its_kind() -> None:
    made: dict[str, str] = {}

    class Spy:
        def __getattr__(self, kind: str) -> object:
            def create(name: str, *_: object, **options: object) -> Mock:
                suffix = "_seconds" if options.get("unit") == "s" else ""
                made[name.replace(".", "_") + suffix] = kind.removeprefix("create_")
                return Mock()

            return create

    Instruments(Spy(), About("m", 1))  # type: ignore[arg-type]  # only its create_ methods are called
    kinds = {"observable_counter": "counter", "histogram": "histogram", "observable_gauge": "gauge"}
    expected = {
        (f"{name}_total" if kinds[kind] == "counter" else name, kinds[kind])
        for name, kind in made.items()
    }
    expected |= {
        (f"{name}_total" if kind == "counter" else name, kind)
        for name, kind in GatewayMetrics([]).kinds().items()
    }
    rows = set(re.findall(r"^\| `((?:gen_ai|tokenfleet)_\w+)` \| (\w+) \|", PAGE, re.MULTILINE))
    assert rows == expected


def test_every_event_and_every_attribute_of_ours_is_on_the_page() -> None:
    for name in (*of("EVENT_").values(), *of("JOB_").values()):
        assert f"`{name}`" in PAGE, name


def test_every_name_for_vllm_dashboards_is_on_the_page() -> None:
    named = {name.removesuffix("_total") for name in re.findall(r"`(vllm:\w+)`", PAGE)}
    assert named == {name for names in VLLM_NAMES.values() for name in names}

"""Labels of metrics are few, and never a job or a tenant."""

from __future__ import annotations

ALLOWED = {
    *("model", "state", "priority", "phase", "finish_reason", "worker", "version", "le"),
    *("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model", "error_type"),
    *("tokenfleet_job_priority", "route", "status"),
}


def test_no_metric_has_a_label_that_grows_with_the_load(shown: dict[str, set[str]]) -> None:
    assert len(shown) > 30
    assert set.union(*shown.values()) == ALLOWED


def test_the_workers_name_is_on_one_metric_alone(shown: dict[str, set[str]]) -> None:
    named = {name for name, labels in shown.items() if labels & {"worker", "version"}}
    assert named == {"tokenfleet_worker_info"}

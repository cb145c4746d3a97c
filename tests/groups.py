"""Which tests go to one process of xdist together; each of the others goes to whichever is free.

Not by the mark xdist_group: xdist writes it into an id that pytest 9 does not read.
"""

from __future__ import annotations

from typing import Any

import pytest

GROUPS = {
    "tests/engine/test_smollm2": "smollm2",  # all that use the one engine
    "tests/kernels/gpu/test_aot.py": "aot",  # one process compiles for all of these
    "tests/fleet/": "waiting",  # for other processes and for time to pass: one after the other,
    "tests/redis/": "waiting",  # beside those that compute
}
"""By the beginning of a test's id. The largest groups are begun first."""


def group_of(test_id: str) -> str:
    found = (group for beginning, group in GROUPS.items() if test_id.startswith(beginning))
    return next(found, test_id)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class InGroups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return InGroups(config, log)

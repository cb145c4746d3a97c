"""Whether the span of a job that came in a batch is kept: what its producer decided, decides.

A job submitted alone continues its producer's trace, and the parent's flag holds. A job out of a
batch starts a trace of its own and only links to the producer's; without this its sampling would be
drawn again.
"""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Sampler, SamplingResult
from opentelemetry.trace import Link, SpanKind, TraceState
from opentelemetry.util.types import Attributes


class FollowsLink(Sampler):
    """Sampler of spans without a parent: a remote link's flag, or else `root` (default: keep)."""

    def __init__(self, root: Sampler | None = None) -> None:
        self._root = root or ALWAYS_ON

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        chosen = self._root
        for link in links or ():
            if link.context.is_valid and link.context.is_remote:
                chosen = ALWAYS_ON if link.context.trace_flags.sampled else ALWAYS_OFF
                break
        return chosen.should_sample(
            parent_context, trace_id, name, kind, attributes, links, trace_state
        )

    def get_description(self) -> str:
        return f"FollowsLink{{root:{self._root.get_description()}}}"

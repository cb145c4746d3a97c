"""One job's tokens on their way to the log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenfleet.engine.request import EngineRequest
from tokenfleet.engine.sampling_params import SamplingParams
from tokenfleet.engine.text import TextDelta
from tokenfleet.producer import protocol
from tokenfleet.producer.protocol import Event, JobRequest
from tokenfleet.worker.claims import flat
from tokenfleet.worker.drafts import new_draft, pack_draft
from tokenfleet.worker.engine_link.engine_process import StepEvent
from tokenfleet.worker.jobs import MOVES, Ending, Job, Stage, arrived, take
from tokenfleet.worker.queue import ClaimedJob

CLAIMED = ClaimedJob(
    id="01a229b5-2b7c-78d9-9279-9720b0a05fc7.0",
    attempt=1,
    request=JobRequest(model="m", prompt="x"),
    offset=0,
    logged=(),
    failures=0,
    priority="default",
    deadline_ms=None,
    submitted_ms=1_000,
    claimed_ms=1_500,
)


class Letters:
    """Ids are letters; `hold` of them wait inside, as before a possible stop string."""

    def __init__(self, hold: int = 0) -> None:
        self._hold = hold
        self._held = ""

    def push(self, token_ids: Sequence[int], *, ended: bool) -> TextDelta:
        self._held += "".join(map(chr, token_ids))
        cut = len(self._held) if ended else max(0, len(self._held) - self._hold)
        text, self._held = self._held[:cut], self._held[cut:]
        return TextDelta(text, None, len(token_ids))


def running(claimed: ClaimedJob = CLAIMED, *, n: int = 1, hold: int = 0) -> Job:
    job = Job(claimed, now=100.0)
    params = SamplingParams(n=n, max_tokens=1000)
    request = EngineRequest(job.engine_id, [1], params)
    job.prepared(request, job.replayed([Letters(hold) for _ in range(n)]))
    job.ready()
    job.move(Stage.RUNNING)
    return job


def say(job: Job, text: str, reason: str | None = None, choice: int = 0) -> None:
    job.apply(StepEvent(job.engine_id, choice, list(map(ord, text)), reason))


def taken(job: Job) -> list[Event]:
    """What the job gives to the log, read as a subscriber would."""
    take([job])
    return [Event.unpack(payload) for payload in job.in_flight[1::2]]


steps = st.lists(
    st.tuples(
        st.integers(0, 2), st.text("abcdef", min_size=1, max_size=3), st.sampled_from("-tax")
    ),
    max_size=40,
)


@given(steps, st.integers(0, 4))
def test_events_follow_each_other_and_hold_every_token_once(
    plan: list[tuple[int, str, str]], hold: int
) -> None:
    """t: a flush arrives; x: its reply is lost; a: a claim elsewhere takes over from the log."""
    claimed = replace(CLAIMED, request=JobRequest(model="m", prompt="x"))
    job = running(claimed, n=3, hold=hold)
    log: list[Event] = []
    said = ["", "", ""]
    for choice, text, fate in plan:
        say(job, text, choice=choice)
        said[choice] += text
        if fate == "-":
            continue
        known = len(log)
        sent = taken(job)
        log += [e for e in sent if e.end > sum(len(x.token_ids) for x in log)]
        if fate != "x":
            arrived([job])
            assert known + len(sent) >= len(log)
        if fate == "a":
            offset = sum(len(e.token_ids) for e in log)
            attempt = job.claimed.attempt + 1
            job = running(
                replace(claimed, attempt=attempt, offset=offset, logged=tuple(log)), n=3, hold=hold
            )
    for choice in range(3):
        say(job, "!", "length", choice)
        said[choice] += "!"
    assert job.ending == Ending("finished")
    start = sum(len(e.token_ids) for e in log)
    log += [e for e in taken(job) if e.end > start]
    offset = 0
    for event in log:
        assert event.offset == offset
        offset = event.end
    for choice, whole in enumerate(said):
        mine = [e for e in log if e.choice == choice]
        assert "".join(e.text for e in mine) == whole
        assert "".join(chr(t) for e in mine for t in e.token_ids) == whole
        assert job.result().choices[choice].text == whole
        assert job.result().choices[choice].finish_reason == "length"


def test_events_once_handed_out_keep_their_boundaries() -> None:
    job = running()
    say(job, "ab")
    (first,) = taken(job)
    say(job, "cd")
    assert taken(job)[0] == first
    assert [(e.offset, e.text) for e in taken(job)] == [(0, "ab"), (2, "cd")]


def test_what_is_logged_again_is_what_has_arrived_and_not_what_is_on_its_way() -> None:
    logged = (Event(0, attempt=1, token_ids=(1, 2), text="ab"), Event(2, attempt=1, text="held"))
    job = running(replace(CLAIMED, attempt=2, offset=2, logged=logged))
    say(job, "c")
    arrived_events = taken(job)
    arrived([job])
    say(job, "d")
    take([job])
    assert (job.logged, job.history) == (3, flat([*logged, *arrived_events]))


@pytest.mark.parametrize("choice", [0, 1, 200])
@pytest.mark.parametrize("token_ids", [(), (0,), (127, 128, 255, 256, 65_535, 65_536, 2**31)])
@pytest.mark.parametrize("text", ["", "a", "é漢🙂" * 100])
def test_a_draft_is_packed_as_its_event(choice: int, token_ids: tuple[int, ...], text: str) -> None:
    draft = new_draft(choice, 3)
    draft.offset, draft.text = 70_000, text
    draft.token_ids += token_ids
    assert pack_draft(draft) == draft.event().pack()
    assert Event.unpack(pack_draft(draft)) == Event(70_000, choice, 3, token_ids, text)


def test_the_first_ending_stands_and_late_tokens_are_ignored() -> None:
    job = running()
    say(job, "a")
    job.end(Ending("cancelled"))
    job.end(Ending("expired"))
    say(job, "b")
    assert job.ending == Ending("cancelled")
    assert [e.text for e in taken(job)] == ["a"]


@pytest.mark.parametrize("stage", list(Stage))
@pytest.mark.parametrize("to", list(Stage))
def test_stages_move_along_the_table_only(stage: Stage, to: Stage) -> None:
    job = Job(CLAIMED)
    job.stage = stage
    if to in MOVES[stage]:
        job.move(to)
        assert job.stage is to
    else:
        with pytest.raises(RuntimeError, match=f"from {stage} to {to}"):
            job.move(to)


def test_times_are_counted_from_submission_by_the_servers_clock() -> None:
    job = running(replace(CLAIMED, deadline_ms=4_500))
    assert job.deadline_at == 103.0
    job.first_token_at = 101.0
    timings = job.result(now=102.0).timings
    assert timings == protocol.Timings(queue_s=0.5, first_token_s=1.5, total_s=2.5)


@pytest.mark.parametrize(
    ("reason", "ends_as"), [("cancelled", "cancelled"), ("error", "error"), ("length", "stop")]
)
def test_half_a_character_becomes_a_stop_string_only_where_the_output_ended_by_itself(
    reason: str, ends_as: str
) -> None:
    class Half(Letters):
        def push(self, token_ids: Sequence[int], *, ended: bool) -> TextDelta:
            return TextDelta("", "\ufffd" if ended else None, len(token_ids))

    job = running()
    job.choices[0].stream = Half()
    say(job, "\xc3")
    assert not job.apply(StepEvent(job.engine_id, 0, [], reason))
    (event,) = taken(job)
    assert event.finish_reason == ends_as
    assert event.stop == ("\ufffd" if ends_as == "stop" else None)


def test_logprobs_and_prompt_logprobs_travel_with_their_tokens() -> None:
    job = running()
    job.apply(StepEvent(job.engine_id, 0, [97], None, [{97: -0.1}], [None, {120: -2.0}]))
    job.apply(StepEvent(job.engine_id, 0, [98], "length", [{98: -0.2, 99: -1.7}]))
    (event,) = taken(job)
    assert event.logprobs == ({97: -0.1}, {98: -0.2, 99: -1.7})
    assert event.prompt_logprobs == (None, {120: -2.0})
    result = job.result()
    assert result.logprobs == event.logprobs
    assert result.prompt_logprobs == event.prompt_logprobs
    assert Event.unpack(event.pack()) == event

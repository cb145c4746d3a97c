"""Frames between the two processes, and the sender that never waits."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tokenfleet.engine.request import CoreEvent, EngineRequest
from tokenfleet.engine.sampling_params import SamplingParams
from tokenfleet.engine.stats import StepStats
from tokenfleet.worker.engine_link import frames
from tokenfleet.worker.engine_link.outbox import TOO_LARGE, Outbox


@pytest.fixture
def pipe() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    with ours, theirs:
        yield ours, theirs


def read_all(sock: socket.socket, outbox: Outbox) -> list[frames.Frame]:
    buffer = frames.FrameBuffer()
    found: list[frames.Frame] = []
    while True:
        try:
            found += buffer.feed(sock.recv(1 << 16))
        except BlockingIOError:
            if not outbox.pending:
                return found
        outbox.flush()


def test_what_nobody_reads_merges_into_one_event_a_choice(
    pipe: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pipe
    outbox = Outbox(ours)
    steps = 50_000
    for step in range(steps):
        outbox.put([CoreEvent("a", choice, [step]) for choice in (0, 1)], StepStats(step=step), 3)
    assert outbox.pending
    read = read_all(theirs, outbox)
    assert len(read) < steps / 2
    for choice in (0, 1):
        got = [t for f in read for e in f[1] if e[1] == choice for t in e[2]]
        assert got == list(range(steps))
    assert frames.unpack_stats(read[-1][2]).step == steps - 1


def test_merged_events_keep_their_logprobs_their_end_and_their_preemptions(
    pipe: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pipe
    outbox = Outbox(ours)
    filler = "x" * 4000
    for _ in range(200):  # fills the socket
        outbox.put_frame("filler", filler)
    outbox.put(
        [CoreEvent("a", 0, [1], None, [{1: -0.5}], [None, {7: -1.0}])],
        StepStats(preempted_ids=["b"]),
        0,
    )
    outbox.put([CoreEvent("a", 0, [2], "stop", [{2: -0.25}])], StepStats(preempted_ids=["c"]), 1)
    step = next(f for f in read_all(theirs, outbox) if f[0] == frames.STEP)
    assert step[1] == [
        ["a", 0, [1, 2], "stop", [{1: -0.5}, {2: -0.25}], [None, {7: -1.0}], None, None]
    ]
    assert frames.unpack_stats(step[2]).preempted_ids == ["b", "c"]
    assert step[3] == 1


def test_what_no_frame_holds_comes_in_several_and_what_fits_none_is_refused_alone(
    pipe: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 4_000)
    ours, theirs = pipe
    outbox = Outbox(ours)
    sizes = {"a": 100, "b": 100, "huge": 500, "c": 100, "d": 1}
    events = [
        CoreEvent(id, 0, [1], prompt_logprobs=[{7: -1.0}] * size) for id, size in sizes.items()
    ]
    outbox.put(events, StepStats(step=3, preempted_ids=["e"]), 2)
    outbox.put([CoreEvent("b", 0, [2])], StepStats(step=4), 1)
    read = read_all(theirs, outbox)
    steps = [f for f in read if f[0] == frames.STEP]
    said = [(e[0], e[2], len(e[5] or ())) for f in steps for e in f[1]]
    assert said == [(id, [1], n) for id, n in sizes.items() if id != "huge"] + [("b", [2], 0)]
    assert [id for f in steps for id in frames.unpack_stats(f[2]).preempted_ids] == ["e"]
    assert [f[3] for f in steps] == [2] * (len(steps) - 1) + [1]
    ((id, code, why),) = [f[1:] for f in read if f[0] == frames.REFUSED]
    assert (id, code) == ("huge", TOO_LARGE)
    assert "at most 4000 at once" in why


@pytest.mark.parametrize("piece", [1, 3, 7, 1000])
def test_frames_survive_any_cut(piece: int) -> None:
    sent = [["add", index, "x" * index] for index in range(20)]
    stream = b"".join(frames.encode(*frame) for frame in sent)
    buffer = frames.FrameBuffer()
    got = [
        frame
        for at in range(0, len(stream), piece)
        for frame in buffer.feed(stream[at : at + piece])
    ]
    assert got == sent


def test_a_frame_of_absurd_length_is_refused() -> None:
    with pytest.raises(ValueError, match="exceeds"):
        list(frames.FrameBuffer().feed(b"\xff\xff\xff\xff"))


@pytest.mark.parametrize(
    "request_",
    [
        EngineRequest("a", [1, 2]),
        EngineRequest(
            "b",
            (3,),
            SamplingParams(
                max_tokens=None,
                stop=("x", "y"),
                stop_token_ids=(4,),
                logit_bias={5: -1.5},
                seed=2**64 - 1,
                n=3,
                logprobs=0,
                structured_outputs={"json": {"type": "object"}},
            ),
            resume=((1, 2), (), (3,)),
            ended=frozenset({0, 2}),
            priority=2,
            cache_salt="s",
        ),
    ],
)
def test_a_request_comes_out_as_it_went_in(request_: EngineRequest) -> None:
    (frame,) = frames.FrameBuffer().feed(frames.encode("add", frames.pack_request(request_)))
    back = frames.unpack_request(frame[1])
    assert back.params == request_.params
    assert tuple(back.prompt_token_ids) == tuple(request_.prompt_token_ids)
    assert (back.id, back.resume, back.ended, back.priority, back.cache_salt) == (
        request_.id,
        request_.resume,
        request_.ended,
        request_.priority,
        request_.cache_salt,
    )


class Slow:
    """A socket that takes few bytes at once, but always some."""

    def __init__(self) -> None:
        self.taken = b""
        self.buffers: list[object] = []
        """Where the bytes lay."""

    def send(self, data: bytes | memoryview) -> int:
        self.taken += data[: 1 << 16]
        self.buffers.append(memoryview(data).obj)
        return min(len(data), 1 << 16)


def test_what_is_left_of_a_large_frame_is_not_copied_with_each_piece_that_leaves() -> None:
    sock = Slow()
    outbox = Outbox(sock)  # type: ignore[arg-type]  # as much of one as is needed
    filler = "x" * (1 << 20)
    outbox.put_frame("filler", filler)
    assert not outbox.pending
    assert list(frames.FrameBuffer().feed(sock.taken)) == [["filler", filler]]
    assert len(sock.buffers) == 17
    assert all(buffer is sock.buffers[0] for buffer in sock.buffers)

"""Frames of an engine process, cut where they arrive."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from tokenfleet.worker.engine_link import frames
from tokenfleet.worker.engine_link.hearing import MOST_WAITING, Hearing


@pytest.fixture
async def ends() -> AsyncIterator[tuple[Hearing, socket.socket]]:
    """The worker's end, listening, and the engine process's."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    ours.setblocking(False)
    transport, hearing = await asyncio.get_running_loop().create_connection(Hearing, sock=ours)
    yield hearing, theirs
    transport.close()
    theirs.close()
    await hearing.closed


def numbered(number: int) -> bytes:
    return frames.encode(frames.CRASHED, number)


async def test_frames_in_pieces_are_handed_out_once_and_in_order(
    ends: tuple[Hearing, socket.socket],
) -> None:
    hearing, theirs = ends
    stream = b"".join(numbered(number) for number in range(20))
    heard: list[frames.Frame] = []
    for start in range(0, len(stream), 7):
        theirs.send(stream[start : start + 7])
        await asyncio.sleep(0)
    while len(heard) < 20:
        heard += await hearing.take()
    assert heard == [[frames.CRASHED, number] for number in range(20)]


async def test_who_does_not_listen_makes_the_engine_wait_and_loses_nothing(
    ends: tuple[Hearing, socket.socket],
) -> None:
    hearing, theirs = ends
    sent = [[frames.CRASHED, f"{number:<4096}"] for number in range(1000)]
    stream = b"".join(frames.encode(kind, message) for kind, message in sent)
    sending = asyncio.ensure_future(asyncio.get_running_loop().sock_sendall(theirs, stream))
    while hearing.transport.is_reading():  # noqa: ASYNC110  # a transport has no event
        await asyncio.sleep(0)
    assert not sending.done()
    heard = await hearing.take()
    assert MOST_WAITING < len(heard) < len(sent)
    while len(heard) < len(sent):
        heard += await hearing.take()
    assert heard == sent
    await sending


async def test_the_frames_before_an_end_are_heard_and_then_none(
    ends: tuple[Hearing, socket.socket],
) -> None:
    hearing, theirs = ends
    theirs.send(numbered(1))
    theirs.close()
    assert await hearing.take() == [[frames.CRASHED, 1]]
    assert await hearing.take() == []


async def test_the_frames_before_what_is_no_frame_are_heard_and_then_it_is_said(
    ends: tuple[Hearing, socket.socket],
) -> None:
    hearing, theirs = ends
    theirs.send(numbered(1) + frames.LENGTH.pack(frames.MAX_FRAME_BYTES + 1))
    assert await hearing.take() == [[frames.CRASHED, 1]]
    for _ in range(2):
        with pytest.raises(ValueError, match=str(frames.MAX_FRAME_BYTES + 1)):
            await hearing.take()

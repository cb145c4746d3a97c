"""`tokenfleet batch status|watch|resume|results|cancel`: about a batch that was begun.

A batch is named by its output file, or by its input where the output has the usual name.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tokenfleet.worker.commands import base, batch_base
from tokenfleet.worker.commands.base import Broker, Output, OutputOption
from tokenfleet.worker.commands.batch_base import Begun, Way

if TYPE_CHECKING:
    from tokenfleet.producer.client import AsyncClient


def batch_status(batch: Begun, output: OutputOption = Output.TEXT) -> None:
    """Show how far a batch is, from its files alone."""
    batch_base.print_glance(batch_base.opened(batch, output), output)


def batch_watch(
    batch: Begun,
    way: Way = batch_base.WAY,
    broker: Broker = base.BROKER,
    output: OutputOption = Output.TEXT,
) -> None:
    """Follow a batch to its end; where no process is at it, take it up."""
    begun = batch_base.opened(batch, output)

    async def work(client: AsyncClient) -> int:
        from tokenfleet.producer.batch import Phase
        from tokenfleet.worker.commands.batch_view import follow

        async with asyncio.timeout(way.timeout_s):
            glance = await follow(begun, plain=way.plain)
        if glance.phase in (Phase.COMPLETED, Phase.CANCELLED):
            return batch_base.print_summary(await asyncio.to_thread(begun.summary), output)
        base.note("no process is at it: this one takes it up")
        await asyncio.to_thread(begun.check_input)
        return await batch_base.run_batch(begun, client, output, way)

    base.run(base.with_client(work, broker), output)


def batch_resume(
    batch: Begun,
    way: Way = batch_base.WAY,
    broker: Broker = base.BROKER,
    output: OutputOption = Output.TEXT,
) -> None:
    """Go on with a batch that was killed, interrupted, submitted or cancelled."""
    begun = batch_base.opened(batch, output)
    batch_base.checked(begun.check_input, output)
    batch_base.run_to_end(begun, output, broker, way)


def batch_results(
    batch: Begun,
    broker: Broker = base.BROKER,
    output: OutputOption = Output.TEXT,
) -> None:
    """Write the results that are there by now, and what they come to."""
    begun = batch_base.opened(batch, output)

    async def work(client: AsyncClient) -> int:
        from tokenfleet.producer.batch import BatchBusy

        try:
            found = await begun.collect(client)
        except BatchBusy:  # whoever is at it collects
            found = await asyncio.to_thread(begun.summary)
        return batch_base.print_summary(found, output)

    base.run(base.with_client(work, broker), output)


def batch_cancel(
    batch: Begun,
    broker: Broker = base.BROKER,
    output: OutputOption = Output.TEXT,
) -> None:
    """End the jobs of all lines that are not done; `resume` runs them after all."""
    begun = batch_base.opened(batch, output)

    async def work(client: AsyncClient) -> int:
        await begun.cancel(client)
        batch_base.print_glance(begun, output)
        return base.OK

    base.run(base.with_client(work, broker), output)

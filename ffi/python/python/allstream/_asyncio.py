"""Awaiting a `Work` on a loop of asyncio's."""

import asyncio


def awaited(work):
    """What `await work` runs: ends at once where the work is done."""
    if not work.done():
        loop = asyncio.get_running_loop()
        future = loop.create_future()

        def tell():
            if not future.done():
                future.set_result(None)

        def over(_):
            # allstream's thread calls this, at any time: the loop may be closed by then.
            try:
                loop.call_soon_threadsafe(tell)
            except RuntimeError:
                pass

        work._tell(over)
        yield from future
    return work.result()

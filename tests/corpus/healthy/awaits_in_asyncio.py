"""Each rank sleeps in an event loop, and calls the others from a thread of it."""
# /// healthy
# ranks = 2
# hang_timeout = 1.5
# ///

import asyncio

import numpy as np

from rankwise import collectives

x = np.ones(4)


async def main() -> None:
    for _ in range(8):
        await asyncio.sleep(0.4)
        await asyncio.to_thread(collectives.all_reduce, x)


asyncio.run(main())

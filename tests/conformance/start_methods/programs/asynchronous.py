"""asyncio with a subprocess, threads of an executor, and a nested run of functions."""

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

rank = os.environ["RANK"]


async def main():
    process = await asyncio.create_subprocess_exec("cat", stdin=-1, stdout=-1)
    text, _ = await process.communicate(b"through cat")
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(2) as pool:
        sums = await asyncio.gather(*(loop.run_in_executor(pool, np.sum, [i, 1]) for i in range(3)))
    print(rank, text.decode(), process.returncode, [int(each) for each in sums])


asyncio.run(main())

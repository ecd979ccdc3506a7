"""Fails if four ranks come to a file in one of 24 orders: the last one first, and so on.

Each appends a line, and nothing says in which order; the program is sure that it is another one.
"""

from pathlib import Path

import rankwise
from rankwise import collectives

lines = Path("lines.txt")
if rankwise.rank() == 0:
    lines.write_text("")
collectives.barrier()
with lines.open("a") as file:
    file.write(f"{rankwise.rank()}\n")
collectives.barrier()
order = lines.read_text().split()
assert order != ["3", "2", "1", "0"], f"the ranks came in the order {', '.join(order)}"

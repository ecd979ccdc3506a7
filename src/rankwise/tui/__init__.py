"""`rankwise top`: how the ranks of the runs on this machine are, as text or live in a terminal.

Each module has one part: `looks` finds out what there is to know, `picture` makes rows of it, of
which `text` makes lines and `app` a screen. Only `app` needs textual (the extra `tui`).
"""

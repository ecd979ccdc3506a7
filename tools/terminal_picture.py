"""Draws what a command prints on a terminal, as an SVG for the documentation.

    python tools/terminal_picture.py docs/images/failure.svg "make demo" -- make demo

The command really runs, on a pseudo-terminal, so that colours and widths are what a person sees.
Times and paths differ from run to run: draw anew when the output changes, not when the clock did.
"""

import argparse
import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text


def output_on_terminal(command: list[str], columns: int) -> tuple[str, int]:
    """Run a command on a terminal of that many columns; return what it wrote, and its exit code."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm-256color"}
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        written = bytearray()
        while chunk := _read(ours):
            written += chunk
    os.close(ours)
    return written.decode(errors="replace").replace("\r\n", "\n"), process.returncode


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # how Linux says that nobody has the other end any more
        return b""


def picture(text: str, title: str, columns: int) -> str:
    """An SVG that needs nothing from anywhere: viewers use their own fixed-width font."""
    console = Console(record=True, width=columns, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(text), end="\n\n")
    svg = console.export_svg(title=title)
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"\s*<!--.*?-->\s*", "\n", svg, flags=re.DOTALL)
    # Or some viewers trim the indentation of each piece of text.
    return svg.replace("<svg ", '<svg xml:space="preserve" ', 1)


def main() -> None:
    """Read the command line, run the command, write the picture."""
    parser = argparse.ArgumentParser(description="Draw what a command prints on a terminal.")
    parser.add_argument("--home", action="append", default=[], help="shown as ~")
    parser.add_argument("--columns", type=int, default=106)
    parser.add_argument("file", type=Path)
    parser.add_argument("title")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    text, status = output_on_terminal(options.command, options.columns)
    for home in options.home:
        text = text.replace(home, "~")
    options.file.write_text(picture(text.rstrip("\n"), options.title, options.columns) + "\n")
    print(f"wrote {options.file}; the command's exit code was {status}")
    sys.exit(status)


if __name__ == "__main__":
    main()

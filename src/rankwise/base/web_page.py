"""Parts of the pages that runs leave: one HTML file each, with everything inline.

The page of a simulated run and that of a real one are made of these. Pictures are SVG written here,
and nothing is fetched: a page can be mailed. Text of a caller is escaped; what it hands in as HTML
says so.
"""

from collections.abc import Callable, Iterable, Sequence
from html import escape

# Shades at the edges of .scroll show that there is more beside: the first two gradients move with
# the content and cover the shades at its ends.
_STYLE = """
:root { color-scheme: light dark; --ink: #1d2733; --soft: #5f6f84; --line: #d5dde8;
  --paper: #ffffff; --card: #f6f8fb; --accent: #2f6fb5; --shade: #1d273355; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4eaf2; --soft: #9aa9bd; --line: #344255;
  --paper: #141b24; --card: #1c2530; --accent: #6ba5e4; --shade: #000000cc; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 14px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 1140px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 36px 0 10px; }
p.about, p.note { color: var(--soft); margin: 0 0 12px; max-width: 78ch; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 8px; padding: 12px;
  background:
    linear-gradient(to right, var(--card) 40%, transparent) 0 0 / 48px 100% no-repeat local,
    linear-gradient(to left, var(--card) 40%, transparent) 100% 0 / 48px 100% no-repeat local,
    linear-gradient(to right, var(--shade), transparent) 0 0 / 16px 100% no-repeat scroll,
    linear-gradient(to left, var(--shade), transparent) 100% 0 / 16px 100% no-repeat scroll,
    var(--card); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--soft); font-weight: 600; }
th, td { padding: 4px 10px; border-bottom: 1px solid var(--line); white-space: nowrap; }
tr:last-child td { border-bottom: 0; } td.wrap { white-space: normal; min-width: 24em; }
.bar { display: inline-block; height: 9px; background: var(--accent); border-radius: 2px;
  min-width: 1px; vertical-align: middle; }
.bar-cell { width: 40%; min-width: 80px; }
svg { min-width: 900px; width: 100%; height: auto; display: block; }
svg text:not([fill]) { fill: var(--soft); } svg text.strong { fill: var(--ink); }
div + p.note { margin-top: 8px; } h3 { font-size: 15px; margin: 20px 0 2px; }
pre { font: 12px/1.45 ui-monospace, monospace; margin: 0 0 12px; }
@media (prefers-color-scheme: dark) { svg .cube { fill: #263548; } svg .on-cube { fill: #c3d0e2; } }
@media (max-width: 600px) { main { padding: 20px 12px 40px; } .scroll { padding: 8px; }
  th, td { padding: 4px 7px; } .bar-cell { width: 25%; } }
"""

# Colours of the notebook's own theme: it may be dark where the system is light.
_SCOPED = """
.rankwise { --line: #8fa3bf66; --soft: inherit; --card: transparent; max-width: 1140px; }
.rankwise table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
.rankwise th, .rankwise td { padding: 3px 10px; border-bottom: 1px solid var(--line);
  text-align: left; white-space: nowrap; }
.rankwise td.wrap { white-space: normal; min-width: 24em; }
.rankwise .scroll { overflow-x: auto; } .rankwise svg { max-width: 100%; height: auto; }
.rankwise svg text:not([fill]) { fill: currentColor; }
"""

LEFT, WIDTH, ROW = 130, 880, 15
"""Of a chart: where its strips begin, how long they are, and how far apart."""
_CELL_MOST, _WRAPPED = 60, ' class="wrap"'
"""A cell of more characters is folded."""
BINS = 160
"""How many parts of the time a strip shows."""


def document(title: str, sections: Iterable[str], head: str = "") -> str:
    """The whole page; `title` is that of its tab, `sections` are HTML, and so is more `head`."""
    body = "\n".join(sections)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n{head}</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def fragment(sections: Iterable[str]) -> str:
    """The same style for a cell of a notebook, where it must not reach the rest of the page."""
    body = "\n".join(sections)
    return f'<div class="rankwise"><style>{_SCOPED}</style>\n{body}\n</div>'


def table(rows: Sequence[Sequence[str]]) -> str:
    """A table of cells; the first row has the names of the columns."""
    head, *body = (
        "".join(
            f"<{tag}{_WRAPPED if len(cell) > _CELL_MOST else ''}>{escape(cell)}</{tag}>"
            for cell in row
        )
        for row, tag in zip(rows, ("th", *["td"] * len(rows)), strict=False)
    )
    lines = "".join(f"<tr>{row}</tr>\n" for row in body)
    return f'<div class="scroll"><table><tr>{head}</tr>\n{lines}</table></div>'


def facts_table(facts: Iterable[tuple[str, str]]) -> str:
    """A table of names, each with a sentence that may be long."""
    rows = "".join(
        f'<tr><th>{escape(name)}</th><td class="wrap">{escape(sentence)}</td></tr>\n'
        for name, sentence in facts
    )
    return f'<div class="scroll"><table>{rows}</table></div>'


def svg(width: int, height: int, lines: Sequence[str], label: str) -> str:
    """A picture of these elements."""
    return "\n".join(
        [
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
                f'role="img" aria-label="{label}" font-family="system-ui, sans-serif" '
                'font-size="11">'
            ),
            *lines,
            "</svg>",
        ]
    )


def strip(name: str, colour: str, shares: Sequence[float], y: int, what: str = "busy") -> list[str]:
    """A row of a timeline: the larger the share of a part of the time, the stronger its colour."""
    step = WIDTH / len(shares)
    lines = [
        f'<text x="0" y="{y + 10}">{escape(name)}</text>',
        (
            f'<rect x="{LEFT}" y="{y}" width="{WIDTH}" height="{ROW - 3}" fill="{colour}" '
            'opacity="0.07"/>'
        ),
    ]
    start = 0
    while start < len(shares):
        stop = start + 1
        level = round(shares[start], 2)
        while stop < len(shares) and round(shares[stop], 2) == level:
            stop += 1
        if level:
            lines.append(
                f'<rect x="{LEFT + start * step:.1f}" y="{y}" width="{(stop - start) * step:.1f}" '
                f'height="{ROW - 3}" fill="{colour}" opacity="{0.25 + 0.75 * level:.2f}">'
                f"<title>{escape(name)}: {100 * level:.0f} % {what}</title></rect>"
            )
        start = stop
    return lines


def time_axis(end: int, y: int, in_words: Callable[[int], str]) -> list[str]:
    """The axis below strips; `in_words` says an instant."""
    lines = [f'<line x1="{LEFT}" y1="{y}" x2="{LEFT + WIDTH}" y2="{y}" stroke="#8fa3bf"/>']
    for fifth in range(6):
        x = LEFT + WIDTH * fifth / 5
        anchor = "start" if not fifth else "end" if fifth == 5 else "middle"
        lines.append(f'<line x1="{x}" y1="{y}" x2="{x}" y2="{y + 5}" stroke="#8fa3bf"/>')
        lines.append(
            f'<text x="{x}" y="{y + 18}" text-anchor="{anchor}">'
            f"{in_words(end * fifth // 5) if fifth else 0}</text>"
        )
    return lines


def busy_shares(slices: Iterable[tuple[int, int]], end: int, bins: int) -> list[float]:
    """In how much of each of `bins` equal parts of the time something was going on, 0 to 1."""
    shares = [0.0] * bins
    if not end:
        return shares
    covered = 0
    for start, stop in sorted(slices):
        begin = max(start, covered)
        if stop <= begin:
            continue
        covered = stop
        first, last = begin * bins // end, min(bins, -(-stop * bins // end)) - 1
        for index in range(first, last + 1):
            low, high = index * end / bins, (index + 1) * end / bins
            shares[index] += (min(stop, high) - max(begin, low)) * bins / end
    return [min(1.0, max(0.0, share)) for share in shares]

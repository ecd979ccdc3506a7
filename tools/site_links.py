"""A hook of MkDocs: links that leave docs/ lead to the project's source, wherever that is."""

import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **_others: Any) -> str:
    """Rewrite the links of a page; `pyproject.toml` is the one place that knows the address."""
    metadata = tomllib.loads((_ROOT / "pyproject.toml").read_text())
    source = metadata["project"]["urls"]["Source"]
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def rewritten(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[1]))
        return link[0] if target.startswith("docs/") else f"]({source}/{target}{link[2] or ''})"

    return _LINK.sub(rewritten, markdown)

"""A hook of MkDocs: a link that leaves docs/ becomes the path of the file in a checkout.

The project has no public address that the site could link to.
"""

import posixpath
import re
from typing import Any

_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!\w+:|#)([^)#\s]+)(?:#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **_others: Any) -> str:
    """Replace the links of a page that leave docs/."""
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def rewritten(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[2]))
        if target.startswith("docs/"):
            return link[0]
        if target.endswith(link[1]):
            return f"`{target}` (in a checkout)"
        return f"{link[1]} (`{target}` in a checkout)"

    return _LINK.sub(rewritten, markdown)

"""A hook of mkdocs for links that only work in the repository.

A link from docs/ to a file outside of it becomes the path of that file, which the site does not
hold. A link to a folder leads to its first page.
"""

import logging
import re
from pathlib import Path
from typing import Any

log = logging.getLogger("mkdocs.hooks.docs_links")
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Replace links that leave docs/; a warning, which fails the build, where there is no such
    file.
    """
    docs = Path(config["docs_dir"]).resolve()
    folder = (docs / page.file.src_uri).parent

    def replaced(match: re.Match[str]) -> str:
        text, target = match[1], match[2].partition("#")[0]
        if not target or ":" in target:
            return match[0]
        path = (folder / target).resolve()
        if path.is_relative_to(docs):
            first = min(path.glob("*.md"), default=None) if path.is_dir() else None
            return f"[{text}]({target.rstrip('/')}/{first.name})" if first else match[0]
        if not path.exists():
            log.warning("%s links to %s, which does not exist", page.file.src_uri, target)
            return match[0]
        name = f"`{path.relative_to(docs.parent)}`"
        return name if text.strip("`") in (path.name, name.strip("`")) else f"{text} ({name})"

    return LINK.sub(replaced, markdown)

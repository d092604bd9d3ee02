"""Help mkdocs: the site has CHANGELOG.md of the checkout as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def on_page_markdown(markdown: str, page: Any, **others: Any) -> str:  # noqa: ANN401 - of mkdocs
    """Put CHANGELOG.md behind what changes.md has; its links lead from the checkout's root."""
    if page.file.src_uri != "changes.md":
        return markdown
    changes = (Path(__file__).parent.parent / "CHANGELOG.md").read_text()
    return markdown + changes.partition("\n")[2].replace("](docs/", "](")

"""Write HTML whose texts are escaped by construction. Pure; imports nothing of ours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import final

_VOID = ("input", "meta", "br")


@final
class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


Piece = str | Html | None
Pieces = Piece | Iterable[Piece]


def el(tag: str, *inner: Pieces, **attributes: object) -> Html:
    """Write an element; texts and values of attributes are escaped, None is left out.

    A trailing underscore of an attribute's name is dropped, and others become hyphens.
    """
    shown = (
        f' {name.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    start = f"<{tag}{''.join(shown)}>"
    return Html(start if tag in _VOID else f"{start}{join(*inner)}</{tag}>")


def join(*pieces: Pieces) -> Html:
    """Put pieces one after the other, escaping what is plain text."""
    text = ""
    for piece in pieces:
        if isinstance(piece, Html):
            text += piece
        elif isinstance(piece, str):
            text += escape(piece)
        elif piece is not None:
            text += join(*piece)
    return Html(text)


def card(title: str, *inner: Pieces, note: str | None = None, class_: str = "") -> Html:
    """Write a section of the page with a heading; nothing where it would be empty."""
    body = join(*inner)
    if not body:
        return body
    head = el("h2", title, note and el("small", note))
    return el("section", head, body, class_=f"card {class_}".strip())


def table(head: Sequence[Piece], rows: Iterable[Sequence[Piece]], class_: str = "") -> Html:
    """Write a table that scrolls by itself where it is wide."""
    first = el("thead", el("tr", (el("th", cell, scope="col") for cell in head)))
    body = el("tbody", (el("tr", (el("td", cell) for cell in row)) for row in rows))
    return el("div", el("table", first, body), class_=f"wide {class_}".strip())

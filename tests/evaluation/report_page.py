"""A page as its reader meets it: what is seen, what is folded away, and the data in it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any


class Elements(HTMLParser):
    """Every element with its attributes; the text a reader sees, and that which is folded away."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.folds, self.silent = 0, 0
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.folded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.folds += tag == "details"
        self.silent += tag in ("script", "style")
        self.add(*(value or "" for name, value in attrs if name in ("aria-label", "title", "alt")))

    def handle_endtag(self, tag: str) -> None:
        self.folds -= tag == "details"
        self.silent -= tag in ("script", "style")

    def handle_data(self, data: str) -> None:
        if not self.silent:
            self.add(data)

    def add(self, *texts: str) -> None:
        (self.folded if self.folds else self.open).extend(text.strip() for text in texts if text.strip())

    def of(self, tag: str) -> Iterator[dict[str, str | None]]:
        return (attributes for name, attributes in self.elements if name == tag)

    @property
    def text(self) -> str:
        return " ".join([*self.open, *self.folded])


def embedded(page: str) -> dict[str, Any]:
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert "<" not in found
    return dict(json.loads(found))

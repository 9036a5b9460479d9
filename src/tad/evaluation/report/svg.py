"""matplotlib's SVG, made fit to stand inside an HTML page.

Colours of the light theme become CSS variables, so the page's theme decides; ids are made unique, since several charts share
a page; fonts are the page's; metadata, namespaces and fixed sizes go. Artists whose gid starts with `slot-` end up with that
as their class, for scripts and styles to find.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

from tad.evaluation.report.palette import LIGHT

_VARIABLES = {value: f"var(--{name})" for name, value in LIGHT.items()}
_COLOUR = re.compile(r"#[0-9a-f]{6}\b")
_FONT = re.compile(r"font:\s*((?:\d00 |bold )?[\d.]+px)[^;]*")
_REFERENCE = re.compile(r"url\(#([^)]+)\)")
CLASS = "slot-"


def fit_for_page(text: str, name: str, alt: str) -> str:
    """An `<svg>` element; `name` makes its ids its own, `alt` is read out by screen readers."""
    root = ElementTree.fromstring(re.sub(r"<!DOCTYPE[^>]*>", "", text))
    for parent in list(root.iter()):
        for child in list(parent):
            if _plain(child.tag) == "metadata":
                parent.remove(child)
    for element in root.iter():
        element.tag = _plain(element.tag)
        for key in list(element.attrib):
            value = element.attrib.pop(key)
            _put(element, _plain(key), value, name)
    for key in ("width", "height", "version", "id"):
        root.attrib.pop(key, None)
    root.set("role", "img")
    root.set("aria-label", alt)
    return ElementTree.tostring(root, encoding="unicode", short_empty_elements=False)


def _put(element: ElementTree.Element, key: str, value: str, name: str) -> None:
    if key == "id" and value.startswith(CLASS):
        element.set("class", value)
    elif key == "id":
        element.set("id", f"{name}-{value}")
    elif key == "href" and value.startswith("#"):
        element.set("href", f"#{name}-{value[1:]}")
    elif key == "style":
        styled = _COLOUR.sub(lambda found: _VARIABLES.get(found[0], found[0]), value)
        element.set("style", _FONT.sub(r"font: \1 var(--sans)", styled))
    else:
        element.set(key, _REFERENCE.sub(rf"url(#{name}-\1)", value))


def _plain(tag: str) -> str:
    return tag.rpartition("}")[2]

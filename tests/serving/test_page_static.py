"""The playground's files as they lie: nothing a strict policy would block, nothing from elsewhere, everything labelled."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import pytest

from tad.serving.app import PAGE

FOLDER = Path(str(files("tad.serving").joinpath("page")))
HTML, SCRIPT, STYLE = ((FOLDER / name).read_text() for name in ("index.html", "app.js", "style.css"))
VOID = {"meta", "link", "input", "br", "img", "hr"}
CONTROLS = {"input", "select", "textarea"}


@dataclass
class Element:
    tag: str
    attributes: dict[str, str]
    parents: list[Element]
    text: str = ""


class Reader(HTMLParser):
    """Every element with its text and what it stands in; unbalanced tags are an error."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Element] = []
        self.open: list[Element] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attrs}, list(self.open))
        assert len(element.attributes) == len(attrs), f"an attribute twice in {self.get_starttag_text()}"
        self.found.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open[-1].tag == tag, f"</{tag}> closes <{self.open[-1].tag}>, line {self.getpos()[0]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        for element in self.open:
            element.text += data


@pytest.fixture(scope="module")
def elements() -> list[Element]:
    reader = Reader()
    reader.feed(HTML)
    assert not reader.open
    return reader.found


def test_server_knows_exactly_the_files_of_the_page() -> None:
    assert {name for name, _ in PAGE.values()} == {path.name for path in FOLDER.iterdir()}


def test_no_script_or_style_is_inline(elements: list[Element]) -> None:
    for element in elements:
        assert not [name for name in element.attributes if name.startswith("on") or name == "style"]
        if element.tag in ("script", "style"):
            assert element.tag == "script"
            assert element.attributes["src"] == "app.js"
            assert not element.text.strip()


def test_no_address_points_elsewhere(elements: list[Element]) -> None:
    served = {path.removeprefix("/") for path in PAGE}
    ids = {element.attributes.get("id") for element in elements}
    for element in elements:
        for name in ("src", "href", "action", "srcset", "formaction"):
            address = element.attributes.get(name)
            if address is None or address.startswith("data:image/svg+xml,"):
                continue
            assert address in served or address.removeprefix("#") in ids, address
    for text in (HTML, SCRIPT, STYLE):
        found = re.findall(r"\w+:?//[\w.-]+", re.sub(r"^\s*//.*$", "", text, flags=re.M))
        assert set(found) <= {"http://www.w3.org"}, found  # the name space of the icon


def test_script_asks_this_server_only() -> None:
    assert set(re.findall(r"fetch\((.*?)[,)]", SCRIPT)) == {'"v1/models"', '"v1/chat/completions"'}
    for way in ("XMLHttpRequest", "WebSocket", "EventSource", "sendBeacon", "importScripts", "import("):
        assert way not in SCRIPT


def test_text_never_becomes_markup_or_code() -> None:
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", "srcdoc",
                "createContextualFragment", "parseFromString", 'setAttribute("style', "cssText"):  # fmt: skip
        assert way not in SCRIPT, way


def test_style_loads_nothing_and_defines_what_it_uses() -> None:
    assert "url(" not in STYLE
    assert "@import" not in STYLE
    used = set(re.findall(r"var\((--[\w-]+)\)", STYLE))  # one with a fallback may come from the script
    assert used <= set(re.findall(r"(--[\w-]+):", STYLE))
    assert STYLE.count("{") == STYLE.count("}")


def test_style_heeds_colour_scheme_motion_and_focus() -> None:
    for part in ("color-scheme: light dark", "prefers-reduced-motion", ":focus-visible", "forced-colors"):
        assert part in STYLE
    motion = re.sub(r"@media \(prefers-reduced-motion: no-preference\) \{(.|\n)*?\n\}", "", STYLE)
    assert "animation" not in motion
    assert "transition" not in motion
    assert "smooth" not in motion


def test_ids_are_unique(elements: list[Element]) -> None:
    ids = [element.attributes["id"] for element in elements if "id" in element.attributes]
    assert len(ids) == len(set(ids))


def test_every_control_has_a_name(elements: list[Element]) -> None:
    labels = {element.attributes.get("for"): element.text for element in elements if element.tag == "label"}
    for element in elements:
        about = element.attributes
        if element.tag in CONTROLS:
            around = [parent.text for parent in element.parents if parent.tag == "label"]
            named = [*around, labels.get(about.get("id", "-"), ""), about.get("aria-label", "")]
            assert any(text.strip() for text in named), about
        if element.tag == "button":
            assert element.text.strip() or about.get("aria-label"), about
        if element.tag == "button" and not about.get("aria-label"):
            assert re.search(r"[A-Za-z]{3}", element.text), f"a sign is no name: {element.text}"


def test_references_between_elements_hold(elements: list[Element]) -> None:
    ids = {element.attributes.get("id") for element in elements}
    for element in elements:
        for name in ("for", "aria-describedby", "aria-labelledby", "aria-controls"):
            if name in element.attributes:
                assert element.attributes[name] in ids, (name, element.attributes[name])


def test_page_says_its_language_title_and_landmarks(elements: list[Element]) -> None:
    by_tag = {
        tag: [e for e in elements if e.tag == tag] for tag in ("html", "title", "main", "h1", "section")
    }
    assert by_tag["html"][0].attributes["lang"] == "en"
    assert by_tag["title"][0].text.strip()
    assert len(by_tag["main"]) == len(by_tag["h1"]) == 1
    assert all(section.attributes.get("aria-label") for section in by_tag["section"])
    viewport = next(e.attributes["content"] for e in elements if e.attributes.get("name") == "viewport")
    assert "width=device-width" in viewport
    assert "scalable" not in viewport
    assert "maximum-scale" not in viewport


def test_status_is_announced_and_cells_are_not(elements: list[Element]) -> None:
    by_id = {element.attributes.get("id"): element for element in elements}
    assert by_id["status"].attributes["role"] == "status"
    assert by_id["error"].attributes["role"] == "alert"
    live = [e.attributes.get("id") for e in elements if "aria-live" in e.attributes]
    assert live == ["voice"]
    canvas = next(e for e in elements if e.attributes.get("class") == "canvas")
    assert canvas.attributes["tabindex"] == "0"


def test_script_names_only_elements_that_exist(elements: list[Element]) -> None:
    ids = {element.attributes.get("id") for element in elements}
    named = set(re.findall(r"\$\(\"([\w-]+)\"\)|clone\(\"([\w-]+)\"\)", SCRIPT))
    assert named
    assert {first or second for first, second in named} <= ids
    classes = {name for e in elements for name in e.attributes.get("class", "").split()}
    selected = set(re.findall(r"(?:part|querySelector)\(\"\.([\w-]+)", SCRIPT))
    assert selected
    assert selected <= classes


@pytest.mark.skipif(shutil.which("node") is None, reason="no node here to parse the script")
def test_script_parses() -> None:
    done = subprocess.run(
        ["node", "--input-type=module", "--check"], input=SCRIPT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr

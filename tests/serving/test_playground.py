"""The playground in a real browser, against a real server. Every test also fails on a console message or an outside request."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from live_server import Live, live

import tad
from tad.models import LM
from tad.serving import Settings
from tad.serving.card import model_card

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page, Route

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.slow

LENGTH = 64
QUESTION = (
    "Mia has 34 shells. Then she collects until she has 3 times as many. How many shells does Mia have now?"
)
expect = sync_api.expect
expect.set_options(timeout=60_000)


@pytest.fixture(scope="module")
def nano() -> LM:
    return tad.load("nano-llada", device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def site(nano: LM) -> Iterator[Live]:
    with live(nano) as running:
        yield running


@contextmanager
def watched(browser: Browser, url: str, allow: str = "^$", **options: Any) -> Iterator[Page]:
    """The open page; what it said on the console, and whom else it called, must be nothing (but for `allow`)."""
    said: list[str] = []
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
    page = context.new_page()
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: said.append(request.url) if is_outside(request.url, url) else None)
    page.goto(url)
    expect(page.locator("#run")).to_be_enabled()
    yield page
    context.close()
    assert [text for text in said if not re.search(allow, text)] == []


def is_outside(address: str, url: str) -> bool:
    return not address.startswith((url + "/", "data:", f"blob:{url}/"))


@pytest.fixture
def page(browser: Browser, site: Live) -> Iterator[Page]:
    with watched(browser, site.url) as found:
        yield found


def prompt(page: Page) -> Locator:
    return page.get_by_role("textbox", name="Prompt")


def set_length(page: Page, tokens: int = LENGTH) -> None:
    page.locator("summary").click()
    page.get_by_label("Max tokens").fill(str(tokens))


def ask(page: Page, question: str = QUESTION, decoder: str = "tad") -> None:
    prompt(page).fill(question)
    page.locator(".decoder").first.select_option(decoder)
    page.get_by_role("button", name="Send", exact=True).click()


def done(page: Page) -> None:
    expect(page.locator("#status")).to_contain_text("Done.")


def revealed(page: Page, lane: int = 0) -> int:
    return page.locator(".turn:not(.past) .lane").nth(lane).locator(".canvas .cell:not(.mask)").count()


@pytest.fixture
def answered(page: Page) -> Page:
    """With the answer to the question on it."""
    set_length(page)
    ask(page)
    done(page)
    return page


# Watching


def test_example_is_one_click_away_and_answers_as_generate_does(page: Page, nano: LM, site: Live) -> None:
    set_length(page)
    examples = model_card(site.app.state.validator)["tad"]["examples"]
    page.get_by_role("button", name=examples[0]["title"]).click()
    done(page)
    alone = tad.generate(nano, examples[0]["prompt"], gen_length=LENGTH)
    assert page.locator(".question").text_content() == examples[0]["prompt"]
    assert page.locator(".answer").text_content() == alone.text
    assert page.locator(".forwards").text_content() == str(alone.forwards)
    assert page.locator(".tpf").text_content() == f"{alone.tpf:.2f}"
    assert float(page.locator(".rate").text_content() or "") > 0


def test_tokens_appear_while_it_decodes(page: Page) -> None:
    set_length(page)
    ask(page, decoder="one-by-one")
    expect(page.locator(".canvas .cell.new")).to_have_count(1)
    counts = [revealed(page)]
    while page.locator("#stop").is_visible():
        page.wait_for_timeout(30)
        counts.append(revealed(page))
    done(page)
    counts.append(revealed(page))
    assert len(set(counts)) > 5
    assert counts == sorted(counts)
    assert counts[0] < LENGTH == counts[-1]


def test_cells_stand_in_blocks_and_the_active_ones_are_marked(answered: Page, site: Live) -> None:
    page = answered
    events = site.events(QUESTION, reveals=True, max_tokens=LENGTH)
    reveals = [data for name, data in events if name == "reveal"]
    assert page.locator(".block").count() == LENGTH // 32
    for reveal in reveals[:-1]:
        page.locator("#scrub").fill(str(reveal["forward"]))
        marked = [i for i, box in enumerate(page.locator(".block").all()) if "active" in (box.get_attribute("class") or "")]  # fmt: skip
        assert marked == reveal["blocks"]
        assert page.locator(".canvas .cell.new").count() == len(reveal["positions"])


def test_colours_follow_step_or_confidence(answered: Page, nano: LM) -> None:
    page = answered
    row = tad.generate(nano, QUESTION, gen_length=LENGTH).decoded
    tones = "cells => cells.map(cell => Number(cell.style.getPropertyValue('--t')))"
    by_step = page.locator(".canvas .cell").evaluate_all(tones)
    assert by_step == pytest.approx([max(0, step - 1) / max(1, row.forwards - 1) for step in row.steps], abs=1e-3)  # fmt: skip
    colour = page.locator(".canvas .cell").first.evaluate("cell => getComputedStyle(cell).backgroundColor")
    page.get_by_label("confidence").check()
    assert page.locator(".canvas .cell").evaluate_all(tones) == pytest.approx(row.confidence, abs=2e-3)
    assert colour != page.locator(".canvas .cell").first.evaluate("cell => getComputedStyle(cell).backgroundColor")  # fmt: skip
    expect(page.locator("#scale")).to_contain_text("confidence 0")


# Replaying


def test_scrubber_replays_by_keyboard_and_moves_no_cell(answered: Page, nano: LM) -> None:
    page, place = answered, "cells => cells.flatMap(cell => [cell.offsetLeft, cell.offsetTop])"
    steps = tad.generate(nano, QUESTION, gen_length=LENGTH).decoded.steps
    after = page.locator(".canvas .cell").evaluate_all(place)
    page.get_by_label("Forward", exact=True).focus()
    page.keyboard.press("Home")
    assert revealed(page) == 0
    assert page.locator(".canvas .cell").evaluate_all(place) == pytest.approx(after, abs=2)
    for forward in range(1, max(steps)):
        page.keyboard.press("ArrowRight")
        assert page.locator("#where").text_content() == f"{forward} / {max(steps)}"
        assert revealed(page) == sum(0 < step <= forward for step in steps)
    page.keyboard.press("End")
    assert revealed(page) == LENGTH


def test_play_runs_to_the_end_and_pauses(answered: Page) -> None:
    page = answered
    page.get_by_label("Forwards per second").select_option("15")
    page.get_by_role("button", name="Play").click()
    expect(page.get_by_role("button", name="Pause")).to_be_visible()
    last = page.locator("#scrub").get_attribute("max")
    assert int(page.locator("#scrub").input_value()) < int(last or 0)
    expect(page.get_by_role("button", name="Play")).to_be_visible()
    assert page.locator("#scrub").input_value() == last
    page.get_by_role("button", name="One forward back").click()
    assert page.locator("#scrub").input_value() == str(int(last or 0) - 1)


# Comparing


def test_two_decoders_side_by_side(page: Page, nano: LM) -> None:
    set_length(page)
    page.get_by_label("Compare side by side").check()
    assert page.locator(".decoder").nth(1).input_value() == "one-by-one"
    ask(page)
    done(page)
    rows = [tad.generate(nano, QUESTION, decoder=name, gen_length=LENGTH) for name in ("tad", "one-by-one")]
    for lane, row in enumerate(rows):
        assert page.locator(".answer").nth(lane).text_content() == row.text
        assert page.locator(".forwards").nth(lane).text_content() == str(row.forwards)
    boxes = [lane.bounding_box() for lane in page.locator(".lane").all()]
    assert boxes[0]["y"] == boxes[1]["y"]
    assert page.locator("#settings legend").all_text_contents() == ["First", "Second"]
    for name in ("First: tad", "Second: one-by-one"):
        expect(page.get_by_role("article", name=name)).to_be_visible()
        expect(page.get_by_role("application", name=f"Canvas of {name}")).to_be_visible()
        expect(page.locator("#status")).to_contain_text(name)
    middle = rows[0].forwards + 2  # the first has ended, the second has not
    page.locator("#scrub").fill(str(middle))
    assert revealed(page, 0) == LENGTH
    assert revealed(page, 1) == sum(0 < step <= middle for step in rows[1].decoded.steps)


def test_base_and_student_side_by_side(browser: Browser, student: LM) -> None:
    with live(student) as running, watched(browser, running.url) as page:
        set_length(page)
        page.get_by_label("Compare side by side").check()
        ask(page, "hello")
        done(page)
        assert page.locator(".with").all_text_contents() == ["student · threshold 0.5", "base"]
        found = page.locator(".answer").all_text_contents()
        expected = [tad.generate(student, "hello", gen_length=LENGTH).text]
        with student.base():
            expected.append(tad.generate(student, "hello", "one-by-one", gen_length=LENGTH).text)
        assert expected[0] != expected[1]
        assert found == expected


def test_threshold_slider_has_the_decoders_range_and_is_obeyed(page: Page, nano: LM) -> None:
    set_length(page)
    slider = page.locator(".threshold input")
    assert [slider.get_attribute(name) for name in ("min", "max", "step")] == ["0", "2", "0.01"]
    slider.focus()
    page.keyboard.press("Home")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    expect(page.locator(".threshold output")).to_have_text("0.03")
    prompt(page).fill(QUESTION)
    prompt(page).press("Enter")
    done(page)
    alone = tad.generate(nano, QUESTION, gen_length=LENGTH, threshold=0.03)
    assert page.locator(".forwards").text_content() == str(alone.forwards)
    assert alone.forwards != tad.generate(nano, QUESTION, gen_length=LENGTH).forwards
    page.locator(".decoder").select_option("one-by-one")
    expect(slider).to_be_hidden()
    expect(page.locator(".meaning")).to_have_text("This decoder has no threshold.")


# Conversations


def test_a_second_question_builds_on_the_first_and_keeps_its_canvas_at_hand(answered: Page, nano: LM) -> None:
    page = answered
    first = tad.generate(nano, QUESTION, gen_length=LENGTH)
    assert prompt(page).input_value() == ""
    prompt(page).fill("And")
    prompt(page).press("Shift+Enter")
    page.keyboard.type("twice?")
    page.keyboard.press("Enter")
    expect(page.locator(".turn")).to_have_count(2)
    done(page)
    chat = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "And\ntwice?"},
    ]
    second = tad.generate(nano, chat, gen_length=LENGTH)
    assert page.locator(".question").all_text_contents() == [QUESTION, "And\ntwice?"]
    assert page.locator(".answer").all_text_contents() == [first.text, second.text]
    assert page.locator("#scrub").get_attribute("max") == str(second.forwards)
    page.get_by_role("button", name="Show its canvas").first.click()
    expect(page.locator("#scrub")).to_have_attribute("max", str(first.forwards))
    page.get_by_role("button", name="Ask again").click()
    expect(page.locator(".turn")).to_have_count(2)
    done(page)
    assert page.locator(".answer").all_text_contents() == [first.text, second.text]
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator(".turn")).to_have_count(0)


def test_the_answer_stands_above_the_canvas_and_the_player_covers_neither(page: Page) -> None:
    set_length(page, 256)
    ask(page)
    done(page)
    answer, canvas, player = (page.locator(one).bounding_box() for one in (".answer", ".canvas", "#replay"))
    assert answer["y"] + answer["height"] <= canvas["y"]
    assert canvas["y"] + canvas["height"] <= player["y"]


# Errors, and text that is not what it should be


def test_refusal_of_the_server_is_shown_as_text(browser: Browser, site: Live) -> None:
    with watched(browser, site.url, allow="status of 400") as page:  # the browser itself notes the status
        ask(page, "too long " * 400)
        expect(page.get_by_role("alert")).to_contain_text("over the context of 512")
        expect(page.locator(".lane")).to_have_count(0)
        expect(page.locator("#run")).to_be_enabled()
        set_length(page)
        ask(page)
        done(page)
        expect(page.locator("#error")).to_be_hidden()
        shown = page.locator(".answer").text_content()
        ask(page, "too long " * 400)
        expect(page.get_by_role("alert")).to_contain_text("over the context of 512")
        assert page.locator(".answer").all_text_contents() == [shown]  # what was there stays
        assert revealed(page) == LENGTH
        assert prompt(page).input_value() == "too long " * 400


def test_server_that_is_gone_is_named(browser: Browser, site: Live) -> None:
    with watched(browser, site.url, allow="ERR_FAILED") as page:
        page.route("**/v1/chat/completions", lambda route: route.abort())
        ask(page)
        expect(page.get_by_role("alert")).to_have_text("The server cannot be reached.")


def stream_of(*texts: str, ending: str = "", block: int | None = None) -> str:
    """A recorded stream of one forward that reveals these tokens."""
    size = len(texts)
    about = {"id": "x", "prompt_tokens": 1, "gen_length": size, "max_tokens": size, "block": block or size, "mask": "<mask>",
             "ends": [1], "decoder": "tad", "threshold": 0.5, "adapter": False, "seed": 1, "queued": 0.0}  # fmt: skip
    lists = {"tokens": list(range(5, 5 + size)), "texts": list(texts), "confidence": [0.5] * size}
    reveal = {
        "forward": 1,
        "positions": list(range(size)),
        "blocks": [0],
        "masks": 0,
        "seconds": 0.1,
        **lists,
    }
    end = {"finish_reason": "length", "text": "".join(texts), "steps": [1] * size, "forwards": 1, "tpf": size,
           "seconds": 0.1, "usage": {"completion_tokens": size}, **lists}  # fmt: skip
    events = [("begin", about), ("reveal", reveal), *([] if ending else [("end", end)])]
    text = "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in events)
    return text + (ending or "data: [DONE]\n\n")


def answer_with(page: Page, text: str) -> None:
    def answer(route: Route) -> None:
        route.fulfill(status=200, content_type="text/event-stream", body=text)

    page.route("**/v1/chat/completions", answer)


def test_markup_in_tokens_stays_text(page: Page) -> None:
    hostile = [
        "<img src=x onerror=alert(1)>",
        "<script>alert(1)</script>",
        "\n",
        "\t",
        "\x07",
        "",
        "\u202eabc",
    ]
    answer_with(page, stream_of(*hostile))
    ask(page)
    done(page)
    shown = page.locator(".canvas .cell").all_text_contents()
    assert shown == [*hostile[:2], "↵", "⇥", "▯", "∅", "\u202eabc"]
    assert page.locator(".canvas img, .canvas script, .answer *").count() == 0
    assert page.locator(".answer").text_content() == "".join(hostile)


def test_numbers_and_words_are_not_cut_at_the_border_of_a_block(page: Page) -> None:
    answer_with(page, stream_of(" =", " 1", "7", "2", ".", " So", " ", "3", "4", "x", "yz", " end", block=3))
    ask(page)
    done(page)
    expect(page.locator(".canvas .cell").last).to_have_text(" end")
    boxes = [box.locator(".cell").all_text_contents() for box in page.locator(".block").all()]
    assert boxes == [[" =", " 1", "7", "2"], [".", " So"], [" ", "3", "4", "x", "yz"], [" end"]]
    page.locator("#scrub").fill("0")  # a replay moves no cell
    assert [box.locator(".cell").count() for box in page.locator(".block").all()] == [4, 2, 5, 1]
    places = [cell.get_attribute("data-at") for cell in page.locator(".canvas .cell").all()]
    assert places == [str(at) for at in range(12)]


def test_failure_in_the_middle_of_a_stream_is_shown_and_what_came_is_kept(page: Page) -> None:
    answer_with(page, stream_of("a", "b", ending='data: {"error": {"message": "not finished in time"}}\n\n'))
    ask(page)
    expect(page.get_by_role("alert")).to_have_text("not finished in time")
    assert revealed(page) == 2
    answer_with(page, stream_of("a", "b", ending="\n\n"))
    ask(page)
    expect(page.get_by_role("alert")).to_have_text("The stream ended before the answer was complete.")


def test_stop_cancels_on_the_server(page: Page, site: Live) -> None:
    set_length(page, 256)
    before = site.engine.counts.cancelled
    ask(page, decoder="one-by-one")
    expect(page.locator("#where")).to_have_text(re.compile(r"[3-9] / "))
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#status")).to_have_text("Stopped.")
    for _ in range(100):
        if site.engine.counts.cancelled > before:
            break
        page.wait_for_timeout(20)
    assert site.engine.counts.cancelled == before + 1
    page.get_by_role("button", name="One forward back").click()
    assert 0 < revealed(page) < 256


# Files and links


def test_run_is_downloaded_and_loaded_again(page: Page, tmp_path: Path) -> None:
    set_length(page)
    page.get_by_label("Compare side by side").check()
    ask(page)
    done(page)
    page.locator("#scrub").fill("3")
    cells = page.locator(".canvas .cell").all_text_contents()
    counters = page.locator("dd").all_text_contents()
    with page.expect_download() as saved:
        page.get_by_role("button", name="Download run").click()
    path = tmp_path / saved.value.suggested_filename
    saved.value.save_as(path)
    assert path.suffix == ".json"
    page.reload()
    expect(page.locator("#run")).to_be_enabled()
    page.get_by_label("Load run").set_input_files(path)
    expect(page.locator("#status")).to_contain_text("Loaded tad-run-")
    page.locator("#scrub").fill("3")
    assert page.locator(".canvas .cell").all_text_contents() == cells
    assert page.locator("dd").all_text_contents() == counters
    assert page.locator(".question").text_content() == QUESTION


BAD_RUNS: list[tuple[Callable[[Any], Any], str]] = [
    (lambda run: "{", "not JSON"),
    (lambda run: "null", "not a saved run (format)"),
    (lambda run: {**run, "lanes": []}, "not a saved run (lanes)"),
    (lambda run: put(run, "begin", "gen_length", 10**9), "begin: lengths"),
    (lambda run: put(run, "begin", "gen_length", 3), "end: tokens"),
    (lambda run: put(run, "begin", "mask", {}), "(begin)"),
    (lambda run: put(run, "reveals", 0, "positions", [0, 7]), "reveal 1: positions"),
    (lambda run: put(run, "reveals", 0, "texts", ["a", 5]), "reveal 1: tokens"),
    (lambda run: put(run, "reveals", 0, "forward", 2), "reveal 1"),
    (lambda run: put(run, "end", "steps", [1, 99]), "end: steps"),
    (lambda run: put(run, "end", {"text": 1}), "(end)"),
    (lambda run: put(run, "request", {}), "request"),
]


def test_file_that_is_no_run_is_refused(page: Page) -> None:
    events = re.findall(r"event: (\w+)\ndata: (.*)", stream_of("a", "b"))
    begin, reveal, end = (json.loads(data) for _, data in events)
    request = {"decoder": "tad", "messages": [{"role": "user", "content": "hi"}]}
    lane = {"request": request, "begin": begin, "reveals": [reveal], "end": end}
    run = {"format": "tad-run", "version": 1, "lanes": [lane]}

    def give(data: Any) -> None:
        text = data if isinstance(data, str) else json.dumps(data)
        file = {"name": "run.json", "mimeType": "application/json", "buffer": text.encode()}
        page.get_by_label("Load run").set_input_files(file)

    for change, message in BAD_RUNS:
        give(run)
        expect(page.locator("#status")).to_contain_text("Loaded run.json: 1 forward.")
        expect(page.locator("#error")).to_be_hidden()
        give(change(json.loads(json.dumps(run))))
        expect(page.get_by_role("alert")).to_contain_text("run.json: ")
        expect(page.get_by_role("alert")).to_contain_text(message)
        assert page.locator(".canvas .cell").all_text_contents() == ["a", "b"]


def put(run: Any, *path: Any) -> Any:
    """The run with another value in its first lane."""
    *keys, last, value = path
    place = run["lanes"][0]
    for key in keys:
        place = place[key]
    place[last] = value
    return run


def test_link_fills_in_prompt_and_settings_and_does_not_run(page: Page, browser: Browser, site: Live) -> None:
    set_length(page)
    page.get_by_label("Compare side by side").check()
    prompt(page).fill("Grüße & <b>?")
    page.locator(".threshold input").first.fill("0.25")
    page.get_by_role("button", name="Copy link").click()
    expect(page.locator("#status")).to_contain_text(re.compile("Link copied|address of this page"))
    address = page.url
    with watched(browser, site.url) as other:
        other.goto("about:blank")
        other.goto(address)
        expect(prompt(other)).to_have_value("Grüße & <b>?")
        assert other.locator(".threshold input").first.input_value() == "0.25"
        assert other.locator(".decoder").nth(1).input_value() == "one-by-one"
        assert other.locator("#max-tokens").input_value() == str(LENGTH)
        assert other.locator(".lane").count() == 0
        other.goto("about:blank")
        other.goto(f"{site.url}/#%7B")
        expect(other.get_by_role("alert")).to_contain_text("The link does not fit this page")


# For everybody


def test_canvas_is_read_with_the_arrow_keys(answered: Page, nano: LM) -> None:
    page = answered
    row = tad.generate(nano, QUESTION, gen_length=LENGTH).decoded
    page.locator(".canvas").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    words = page.locator(".inspect").text_content() or ""
    assert words.startswith(f"Position 2, block 1: “{nano.decode([row.tokens[1]])}” (token {row.tokens[1]})")
    assert f"forward {row.steps[1]} with confidence {row.confidence[1]:.3f}" in words
    assert page.locator("#voice").text_content() == words
    page.keyboard.press("ArrowDown")
    expect(page.locator(".inspect")).to_contain_text("Position 34, block 2")
    page.locator("#scrub").fill("0")
    expect(page.locator(".inspect")).to_have_text("Position 34, block 2: still a mask")


def test_everything_is_reached_by_keyboard_with_a_visible_focus(answered: Page) -> None:
    page = answered
    page.locator("#status").click()
    reached = []
    for _ in range(40):
        page.keyboard.press("Tab")
        found = page.evaluate(
            """() => {
                const element = document.activeElement;
                const near = [element, element.nextElementSibling, element.previousElementSibling].filter(Boolean);
                const ring = near.some((one) => parseFloat(getComputedStyle(one).outlineWidth) >= 2
                    && getComputedStyle(one).outlineStyle !== "none");
                return [element.id || element.className || element.tagName, ring];
            }"""
        )
        reached.append(found)
        if found[0] == "BODY":
            break
    names = [name for name, _ in reached]
    for name in ("canvas", "back", "play", "next", "scrub", "pace", "download", "load", "link"):
        assert name in names
    assert [name for name, ring in reached if not ring and name != "BODY"] == []


CONTRAST = """(elements) => {
    const paint = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const mix = (colours) => {
        paint.clearRect(0, 0, 1, 1);
        for (const colour of colours) { paint.fillStyle = colour; paint.fillRect(0, 0, 1, 1); }
        return [...paint.getImageData(0, 0, 1, 1).data].slice(0, 3);
    };
    const light = (rgb) => rgb.map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const found = [];
    for (const element of elements) {
        const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
        if (!own || !element.checkVisibility() || element.matches(":disabled")) continue;
        const behind = [];
        for (let at = element; at; at = at.parentElement) behind.unshift(getComputedStyle(at).backgroundColor);
        const [a, b] = [light(mix(behind)), light(mix([...behind, getComputedStyle(element).color]))];
        found.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), element.className || element.tagName,
            element.textContent.slice(0, 30)]);
    }
    return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_enough_contrast(browser: Browser, site: Live, scheme: str) -> None:
    with watched(browser, site.url, color_scheme=scheme) as page:
        set_length(page)
        page.get_by_label("Compare side by side").check()
        ask(page)
        done(page)
        for colour in ("step", "confidence"):
            page.get_by_label(colour, exact=True).check()
            for forward in ("2", "99"):
                page.locator("#scrub").fill(forward)
                found = page.locator("body *").evaluate_all(CONTRAST)
                assert len(found) > 60
                assert [one for one in found if one[0] < 4.5] == []


def test_colour_scheme_follows_the_system_until_it_is_chosen(browser: Browser, site: Live) -> None:
    paper = "() => getComputedStyle(document.body).backgroundColor"
    with watched(browser, site.url, color_scheme="dark") as page:
        dark = page.evaluate(paper)
        page.emulate_media(color_scheme="light")
        light = page.evaluate(paper)
        assert dark != light
        page.get_by_role("button", name="Theme: system").click()
        page.get_by_role("button", name="Theme: light").click()
        assert page.evaluate(paper) == dark
        page.reload()
        expect(page.get_by_role("button", name="Theme: dark")).to_be_visible()
        assert page.evaluate(paper) == dark


@pytest.mark.parametrize("width", [360, 768, 1280])
def test_page_fits_the_screen(browser: Browser, site: Live, width: int) -> None:
    with watched(browser, site.url, viewport={"width": width, "height": 800}) as page:
        set_length(page)
        page.get_by_label("Compare side by side").check()
        ask(page)
        done(page)
        assert page.evaluate("() => document.documentElement.scrollWidth") == width
        tops = [lane.bounding_box()["y"] for lane in page.locator(".lane").all()]
        assert (tops[0] == tops[1]) == (width >= 1280)
        small = page.locator("button, select, textarea, .button").evaluate_all(
            "all => all.filter(one => one.checkVisibility()).map(one => one.getBoundingClientRect().height).filter(h => h < 32)"
        )
        assert small == []


def test_nothing_moves_where_motion_is_unwanted(browser: Browser, site: Live) -> None:
    moving = "cell => getComputedStyle(cell).animationName"
    for motion, expected in (("reduce", "none"), ("no-preference", "arrive")):
        with watched(browser, site.url, reduced_motion=motion) as page:
            set_length(page)
            ask(page)
            done(page)
            page.locator("#scrub").fill("1")
            assert page.locator(".canvas .cell.new").first.evaluate(moving) == expected


def test_browser_logs_in_with_the_key(browser: Browser, plain: LM) -> None:
    with live(plain, Settings(key="open-sesame")) as running:
        access = {"username": "anyone", "password": "open-sesame"}
        with watched(browser, running.url, http_credentials=access) as page:
            set_length(page, 32)
            ask(page, "hello")
            done(page)
            assert page.locator(".answer").text_content() == tad.generate(plain, "hello", gen_length=32).text

"""The page: what it finds and names, that its numbers are those of the other commands, and that it is safe to open."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import report_world as made
from report_page import Elements, embedded
from typer.testing import CliRunner

from tad.cli import app
from tad.errors import TadError
from tad.evaluation import tabulate_folders
from tad.evaluation.report import Report, write_report
from tad.evaluation.report.gather import Gathered, gather
from tad.evaluation.report.replay import Scene, replay_rows
from tad.evaluation.verdict import list_verdicts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.write_study(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def written(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Report:
    return write_report([folder], tmp_path_factory.mktemp("out") / "page.html", resamples=40)


@pytest.fixture(scope="module")
def page(written: Report) -> str:
    return written.page.read_text(encoding="utf-8")


@pytest.fixture
def without_pngs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Named and not drawn, where a test is about the page."""
    monkeypatch.setattr("tad.evaluation.report.charts.as_png", lambda shown, path, *_: path)


def titles(found: Gathered) -> list[list[str]]:
    return [[row.title for row in part.main.rows] for part in found.parts]


# What is gathered


def test_everything_under_a_directory_is_found_once(folder: Path) -> None:
    found = gather([folder, folder / "eval", folder / "eval" / "base"], resamples=5)
    assert [len(part.runs) for part in found.parts] == [8 + 3 * 4]
    assert (len(found.trainings), len(found.stores), found.notes) == (3, 1, [])


def test_directories_that_are_not_there_or_hold_nothing_are_refused(tmp_path: Path) -> None:
    for name in ("gone", "empty"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(TadError, match=name):
            gather([tmp_path / name])


def test_unfinished_and_ungraded_runs_are_left_out_and_said(tmp_path: Path) -> None:
    made.write_run(tmp_path / "half", "tad", 4, 0.8, whole=False)
    made.write_run(tmp_path / "raw", "tad", 4, 0.8, graded=False)
    made.write_training(tmp_path / "killed", "killed", finished=False)
    (tmp_path / "killed" / "run.json").unlink()
    made.write_training(tmp_path / "stopped", "stopped", finished=False)
    made.write_store(tmp_path / "store", window=False)
    found = gather([tmp_path])
    assert found.parts == []
    text = "\n".join(found.notes)
    assert re.search(r"raw: 48 rows have no verdict; run 'tad regrade \S+raw'", text)
    for name in (
        "half: 24 of 48 rows",
        "killed: has a log and no run.json",
        "stopped: stopped after step 60 of 60",
    ):
        assert name in text
    assert "store: no window has been measured; run 'tad window" in text


def test_answers_that_cannot_be_judged_are_counted_on_the_page(tmp_path: Path, without_pngs: None) -> None:
    made.write_run(tmp_path / "run", "tad", 4, 0.5)
    assert (
        "cannot be judged"
        not in write_report([tmp_path], resamples=5, out=tmp_path / "a.html").page.read_text()
    )
    rows = tmp_path / "run" / "rows.jsonl"
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    unjudged = [line for line in lines if not line["correct"]][:3]
    for line in unjudged:
        line["reason"] = "cannot judge: compares a handle"
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = write_report([tmp_path], resamples=5, out=tmp_path / "b.html").page.read_text()
    assert "<dt>cannot be judged</dt><dd>3 answers of all runs</dd>" in page


def test_a_broken_directory_costs_a_note_and_not_the_report(tmp_path: Path) -> None:
    made.write_run(tmp_path / "good", "one-by-one", 1, 0.8)
    made.write_run(tmp_path / "bad", "tad", 4, 0.8)
    (tmp_path / "bad" / "eval.json").write_text("{")
    made.write_store(tmp_path / "store")
    (tmp_path / "store" / "window.json").write_text('{"order": 1}')
    found = gather([tmp_path])
    assert [run.folder.name for part in found.parts for run in part.runs] == ["good"]
    for path in ("bad/eval.json", "store/window.json"):
        assert any(path in note for note in found.notes)
    assert [store.window for store in found.stores] == [None]


def test_every_base_and_every_set_of_problems_has_its_own_part(tmp_path: Path) -> None:
    made.write_sweep(tmp_path / "tuning", ("tad",), split="validation")
    made.write_sweep(tmp_path / "final", ("tad",))
    made.write_sweep(tmp_path / "other", ("tad",), model="other")
    found = gather([tmp_path], resamples=5)
    assert titles(found) == [["base, one-by-one", "base, tad"]] * 3
    names = [part.name for part in found.parts]
    assert "other" in names
    assert "validation" in names[-1]


@pytest.mark.usefixtures("without_pngs")
def test_a_window_that_is_the_cap_of_its_measurement_is_called_so(tmp_path: Path) -> None:
    made.write_store(tmp_path / "store", reached=False)
    done = write_report([tmp_path], tmp_path / "p.html")
    assert any("speed window is 40, the cap: 0.2 is not reached" in note for note in done.notes)
    text = Elements(done.page.read_text())
    assert (
        text.text.count("40, the cap: 0.2 is not reached") >= 3
    )  # the table, the chart in words, and what is missing


def test_runs_in_no_sweep_are_compared_too(tmp_path: Path) -> None:
    made.write_run(tmp_path / "base", "one-by-one", 0.8, 0.9)
    made.write_run(tmp_path / "student", "tad", 5, 0.85, adapter="x/speed/adapter")
    (part,) = gather([tmp_path], resamples=10).parts
    student = part.main.rows[1].scopes[part.main.scope]
    assert [row.title for row in part.main.rows] == ["base, one-by-one", "speed, tad"]
    assert student.to_base is not None
    assert student.aup is None


# Numbers


def test_the_page_has_the_numbers_and_names_of_tad_points(folder: Path, page: str) -> None:
    (table,) = tabulate_folders([folder / "eval"], resamples=40)
    shown = embedded(page)["parts"][0]["tables"][0]
    assert [row["title"] for row in shown["rows"]] == [row.title for row in table.rows]
    text = Elements(page).text
    for row, theirs in zip(table.rows, shown["rows"], strict=True):
        for scope, found in row.scopes.items():
            assert theirs["scopes"][scope]["accuracy"]["value"] == found.accuracy.value
            assert theirs["scopes"][scope]["accuracy"]["se"] == found.accuracy.se
        assert row.title in text
        found = row.scopes[table.scope]
        assert f"{row.title} {found.accuracy.value:.1f} @ {found.tpf.value:.2f}" in text  # its bar, in words
    assert shown["y_max"] == table.y_max


def test_the_verdict_comes_first(folder: Path, page: str) -> None:
    (table,) = tabulate_folders([folder / "eval"], resamples=40)
    shown = Elements(page).open
    assert shown[2:4] == list_verdicts(table)
    assert shown[2].endswith("n = 48")


@pytest.mark.usefixtures("without_pngs")
def test_small_runs_are_marked_as_smoke_size(page: str, tmp_path: Path) -> None:
    assert "as few as 24 problems" in page
    made.write_run(
        tmp_path / "one", "one-by-one", 0.9, 0.9, examples=200, tasks=("nano-word",), keep_ids=False
    )
    text = write_report([tmp_path], tmp_path / "p.html", resamples=5).page.read_text()
    assert "Smoke size." not in text
    assert 'class="smoke"' not in text
    text = write_report([tmp_path], tmp_path / "p.html", smoke=True, resamples=5).page.read_text()
    assert "do not quote these numbers" in text
    assert 'class="smoke"' in text


def test_sources_say_where_a_number_is_from(page: str) -> None:
    assert re.search(r"eval/base 8 evaluation runs 48 0 \S+", Elements(page).text)


# Studies


@pytest.mark.usefixtures("without_pngs")
# Safety


def test_the_page_loads_nothing_from_anywhere(page: str) -> None:
    assert "http:" not in page
    assert "https:" not in page
    found = Elements(page)
    for tag, attributes in found.elements:
        for name in ("src", "href"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:")), (tag, value)
    policy = next(
        str(meta["content"]) for meta in found.of("meta") if "default-src" in str(meta.get("content"))
    )
    assert policy.startswith("default-src 'none'")


@pytest.mark.usefixtures("without_pngs")
def test_text_from_models_prompts_and_files_is_escaped(tmp_path: Path) -> None:
    evil = f"models/{made.ATTACK.replace('/', '')}"
    made.write_run(tmp_path / "e" / "one-by-one", "one-by-one", 0.9, 1.0, answer=made.ATTACK)
    made.write_run(tmp_path / "e" / "tad", "tad", 5, 1.0, answer=made.ATTACK)
    made.write_run(tmp_path / "f", "tad", 5, 1.0, model=evil, keep_ids=False)
    made.write_training(tmp_path / "t", made.ATTACK)
    done = write_report([tmp_path], tmp_path / "p.html", title=made.ATTACK, resamples=5)
    text = done.page.read_text(encoding="utf-8")
    found = Elements(text)
    assert sum(1 for _ in found.of("script")) == 2  # the data and our own
    assert not list(found.of("img"))
    assert not any(name.startswith("on") for _, attributes in found.elements for name in attributes)
    assert any("data-step" in attributes for attributes in found.of("span"))
    assert made.ATTACK in found.text  # the prompt, the title: there, as text
    assert text.count("</script>") == 2


def test_charts_follow_the_theme_and_share_no_ids(page: str) -> None:
    charts = re.findall(r"<figure>.*?</figure>", page, re.DOTALL)
    assert len(charts) > 8
    assert not re.search(r"#[0-9a-f]{6}\b", "".join(charts))  # all colours are variables
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(set(ids)) == len(ids)
    for used in re.findall(r'(?:href="#|url\(#)([^")]+)', "".join(charts)):
        assert used in ids


def test_pngs_stand_beside_the_page(written: Report) -> None:
    names = [path.name.removeprefix("page-").removesuffix(".png") for path in written.pictures]
    assert names == ["accuracy", "speed", "decay", "teacher", "loss"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written.pictures)


# The replay


def test_the_replay_is_of_the_verdict_s_method_and_of_the_median_gain(page: str) -> None:
    sides = [attributes for attributes in Elements(page).of("div") if attributes.get("class") == "side"]
    assert len(sides) == 4  # two tasks, two sides
    assert int(str(sides[0]["data-forwards"])) > int(str(sides[1]["data-forwards"]))
    assert "the median gain in forwards of" in page
    assert "<h4>nano-llada-speed-0, tad <small>threshold 0.5</small></h4>" in page


def test_cells_spell_the_answer_and_know_their_forward(page: str) -> None:
    side = page.split('<div class="canvas">')[1].split("</div>")[0]
    cells = re.findall(r'<span class="cell (\w+)" data-step="(\d+)"[^>]*>([^<]*)</span>', side)
    assert len(cells) == made.LENGTH
    spelled = "".join(text for kind, _, text in cells if kind == "text")
    assert spelled == "Ana starts with 12. Then 12 + 30 = 42.↵#### 42"
    assert [kind for kind, _, _ in cells].count("end") == 1
    assert all(step == "0" for kind, step, _ in cells if kind == "filler")


def replay(folder: Path, example: str | None = None) -> tuple[list[Scene], list[str]]:
    """The scenes of a directory, and what is said of them."""
    found = gather([folder], resamples=5)
    (part,) = found.parts
    assert part.group is not None
    return replay_rows(part.group, part.main, example, found.notes), found.notes


def test_the_example_can_be_chosen(folder: Path, tmp_path: Path) -> None:
    ((scene,), _) = replay(folder, "nano-math/test/3")
    assert (scene.title, scene.why) == ("nano-math/test/3", "chosen by hand")
    with pytest.raises(TadError, match="nano-math/test/99"):
        write_report([folder], tmp_path / "p.html", example="nano-math/test/99", resamples=5)


def test_rows_without_token_ids_are_said_and_not_replayed(tmp_path: Path) -> None:
    made.write_sweep(tmp_path / "e", ("tad",), keep_ids=False)
    scenes, notes = replay(tmp_path)
    assert scenes == []
    assert any("without token ids" in note for note in notes)


def test_without_its_tokenizer_a_replay_shows_token_ids(tmp_path: Path) -> None:
    made.write_sweep(tmp_path / "e", ("tad",), model="somewhere/else")
    scenes, notes = replay(tmp_path)
    assert any("token ids are shown" in note for note in notes)
    first = made.speller().encode_text("Ana")[0]
    assert scenes[0].sides[0].cells[0].text == f"{first} "


# The command


def test_the_command_prints_what_it_wrote_and_what_is_missing(tmp_path: Path) -> None:
    made.write_run(tmp_path / "runs" / "one", "one-by-one", 0.9, 0.9, keep_ids=False)
    out = tmp_path / "r.html"
    words = [
        "report",
        str(tmp_path / "runs"),
        "--out",
        str(out),
        "--tolerance",
        "4",
        "--y-max",
        "nano-word=95",
    ]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines() == [str(out)]
    assert "missing: replay of nano-llada" in done.stderr
    assert embedded(out.read_text())["parts"][0]["tables"][0]["y_max"]["nano-word"] == 95.0
    assert "TPF at base − 4" in out.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out", "r.pdf"], "--out"),
        (["--adapter", "nano-llada-speed"], "--model"),
        (["--y-max", "high"], "--y-max"),
    ],
)
def test_the_command_refuses_what_makes_no_sense(tmp_path: Path, words: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["report", str(tmp_path), *words])
    assert isinstance(done.exception, TadError)
    assert message in str(done.exception)

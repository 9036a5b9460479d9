"""The report of a study: its methods by title, training seeds together, tuning apart, and no directory's name to be seen."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import report_world as made
from matplotlib.figure import Figure
from study_world import study_recipe

from tad.evaluation.report import Report, write_report
from tad.evaluation.report.data import gather
from tad.evaluation.report.palette import FIRST_LOOK, look
from tad.evaluation.report.panels import WIDTH, _add_legend
from tad.evaluation.report.studies import StudyPart, read_studies
from tad.evaluation.report.study_plots import as_spots, curve_panel, give_table_looks
from tad.evaluation.report.study_rows import changes_of, setting_of
from tad.evaluation.study import Study
from tad.evaluation.study.tables import Estimate, Shown


@pytest.fixture(scope="module")
def folder(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.write_tuned_study(world, tmp_path_factory.mktemp("made") / "tiny-study")


@pytest.fixture(scope="module")
def part(folder: Path) -> StudyPart:
    (found,) = read_studies(gather([folder]))
    return found


@pytest.fixture(scope="module")
def written(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Report:
    return write_report([folder], tmp_path_factory.mktemp("out") / "page.html")


@pytest.fixture(scope="module")
def page(written: Report) -> str:
    return written.page.read_text(encoding="utf-8")


class _Shown(HTMLParser):
    """What a reader can come to see: text, and what is read out or shown on hovering; by whether it is folded away."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.folds, self.silent = 0, 0
        self.open: list[str] = []
        self.folded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
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


def _figure(page: str, title: str) -> str:
    (found,) = [
        chart for chart in re.findall(r"<figure>.*?</figure>", page, re.DOTALL) if f">{title}" in chart
    ]
    return str(found)


# What is read


def test_a_study_is_read_as_one_thing_and_its_answers_are_not_read_row_by_row(folder: Path) -> None:
    found = gather([folder])
    (study,) = read_studies(found)
    assert found.runs == []
    assert (study.name, study.family) == ("tiny", "llada")
    assert len(study.runs) == len(list((folder / "answers").glob("*/*/eval.json")))
    assert [store.name for store in found.stores] == ["teacher"]


def test_what_a_study_has_left_to_do_is_said(folder: Path) -> None:
    found = gather([folder])
    read_studies(found)
    # Of the base twice, two trials, Fast-dLLM, two seeds, two windows: one window.
    assert found.notes == ["tiny: 1 of 9 cells are not done; run the same 'tad study' again to go on"]


def test_the_numbers_are_those_of_the_study_s_tables(folder: Path, part: StudyPart) -> None:
    on_disk = json.loads((folder / "tables" / "main.json").read_text())
    assert [(row.title, row.seeds, row.state) for row in part.main.rows] == [
        (row["title"], row["seeds"], row["state"]) for row in on_disk["rows"]
    ]
    mine = next(row.numbers for row in part.main.rows if row.title == "TAD-Q")
    theirs = next(row["numbers"] for row in on_disk["rows"] if row["title"] == "TAD-Q")
    assert mine is not None
    assert [point.accuracy.mean for point in mine.points] == [
        point["accuracy"]["mean"] for point in theirs["points"]
    ]


def test_training_runs_are_named_by_method_and_those_of_trials_say_so(folder: Path) -> None:
    found = gather([folder])
    read_studies(found)
    names = [(run.name, run.seed, run.trial) for run in found.trainings]
    assert names[:-1] == [("TAD-Q", 0, False), ("TAD-Q", 1, False), ("windows, window 1", 0, False)]
    assert names[-1][0] in ("TAD-Q, trial 0", "TAD-Q, trial 1")  # the other one is seed 0's training
    assert names[-1][1:] == (0, True)


def test_a_study_that_cannot_be_made_out_is_shown_run_by_run(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "study")
    record = json.loads((tmp_path / "study" / "study.json").read_text())
    record["recipe"]["methods"]["tad"]["wings"] = 2
    (tmp_path / "study" / "study.json").write_text(json.dumps(record))
    found = gather([tmp_path])
    assert read_studies(found) == []
    assert len(found.runs) > 10
    assert any("is shown run by run" in note and "wings" in note for note in found.notes)


def test_two_studies_are_told_apart(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "other")
    path = tmp_path / "other" / "study.json"
    record = json.loads(path.read_text())
    record["recipe"]["name"] = "other"
    path.write_text(json.dumps(record))
    found = gather([folder, tmp_path / "other"])
    assert [study.name for study in read_studies(found)] == ["tiny", "other"]
    assert [store.name for store in found.stores] == ["teacher, tiny", "teacher, other"]
    assert {run.name for run in found.trainings if run.name.startswith("TAD-Q,") and not run.trial} == {
        "TAD-Q, tiny",
        "TAD-Q, other",
    }


# Curves


def test_there_is_one_curve_per_method_with_all_its_seeds_behind_it(part: StudyPart, page: str) -> None:
    rows = {row.title: row for row in part.main.rows if row.numbers}
    assert list(rows) == ["base", "Fast-dLLM", "TAD-Q"]
    assert rows["TAD-Q"].seeds == [0, 1]
    legend = page.split('class="legend"')[1].split("</div>")[0]
    assert re.findall(r"</svg>([^<]+)(?:<small>([^<]+)</small>)?</button>", legend) == [
        ("base", ""),
        ("Fast-dLLM", ""),
        ("TAD-Q", "2 seeds"),
    ]
    chart = page.split("<figure>")[1].split("</figure>")[0]
    slots = set(re.findall(r'class="(slot-[^"]+)"', chart))
    assert slots == {"slot-base", "slot-fast-dllm", "slot-tad-q"}


def test_a_curve_is_the_mean_over_seeds_and_begins_one_token_at_a_time(folder: Path, part: StudyPart) -> None:
    facts = next(row.numbers for row in part.main.rows if row.title == "TAD-Q")
    assert facts is not None
    each = []
    for path in sorted((folder / "answers").glob("tad-seed*/one-by-one*/rows.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        right, tokens, forwards = (
            sum(row[name] for row in rows) for name in ("correct", "tokens", "forwards")
        )
        each.append((100 * right / len(rows), tokens / forwards))
    assert len(each) == 2
    spots = as_spots(facts.points)
    assert spots[0].accuracy == pytest.approx(np.mean(each, axis=0)[0])
    assert spots[0].tpf == pytest.approx(np.mean(each, axis=0)[1])
    assert spots[0].error == pytest.approx(np.std(each, axis=0, ddof=1)[0])
    assert [spot.tpf for spot in spots[1:]] == sorted(spot.tpf for spot in spots[1:])


def test_bars_are_over_seeds_where_there_are_several_and_over_problems_else() -> None:
    many, one = Estimate(80.0, 0.5, 1.25), Estimate(80.0, 0.5)
    low = Estimate(74.9, 0.5)
    spots = as_spots([Shown("one-by-one", one, one), Shown("a", many, many), Shown("b", low, one)])
    assert [spot.error for spot in spots] == [0.5, 1.25, 0.5]
    assert [spot.faint for spot in spots] == [False, False, True]


def test_methods_look_the_same_in_every_table_and_apart_within_one(part: StudyPart) -> None:
    looks = give_table_looks([part])
    main, windows = looks["tiny", "main"], looks["tiny", "windows"]
    assert main == {"base": FIRST_LOOK, "Fast-dLLM": look(0), "TAD-Q": look(1)}
    assert windows == {"base": FIRST_LOOK, "windows, window 1": look(0)}


def test_a_panel_of_one_task_says_how_many_problems_it_has(part: StudyPart) -> None:
    (task,) = part.main.tasks
    looks = give_table_looks([part])["tiny", "main"]
    assert curve_panel(part, part.main, task, looks, "x").n == part.examples(task) == 12


# The page


def test_the_first_thing_on_the_page_is_the_main_table_by_title(page: str) -> None:
    shown = _Shown(page)
    text = " | ".join(shown.open)
    assert text.index("TPF at base − 1.5") < text.index("TAD-Q")
    assert text.index("× Fast-dLLM") < text.index("Methods of tiny") < text.index("AUP, questions.jsonl")
    for word in ("How to read", "Paired differences", "Windows", "Where the numbers come from"):
        assert not any(word in one for one in shown.open)
        assert any(word in one for one in shown.folded)


def test_no_directory_of_the_study_is_named_in_what_can_be_seen(folder: Path, page: str) -> None:
    shown = _Shown(page)
    text = " ".join([*shown.open, *shown.folded])
    paths = [path for kind in ("stores", "students", "answers") for path in (folder / kind).iterdir()]
    assert len(paths) > 8
    for path in paths:
        assert path.name.rpartition("-")[2] not in text  # the hash
    for word in ("tad-seed0", "tad-trial", "trial0"):
        assert word not in text


def test_trials_of_tuning_are_in_a_fold_of_their_own_and_in_no_curve(page: str) -> None:
    shown = _Shown(page)
    assert not any("trial" in text for text in shown.open)
    tuning = page.split('class="fold tuning"')[1].split("</details>")[0]
    assert re.findall(r"<td>(learning[^<]+)</td>", tuning) == ["learning.lr 0.01", "learning.lr 0.0001"]
    assert tuning.count(">yes</td>") == 1
    assert "2 trials for each method" in tuning
    for chart in re.findall(r"<figure>.*?</figure>", page, re.DOTALL):
        assert "trial" not in chart


def test_rows_without_numbers_are_folded_away_and_say_why(page: str) -> None:
    shown = _Shown(page)
    assert "Fast-dLLM v2: another base model; not built" in shown.folded
    assert "windows, window all: not run yet" in shown.folded
    assert not any("not run yet" in text or "v2" in text for text in shown.open)


def test_smoke_size_is_said_of_a_small_study(page: str) -> None:
    assert "Tasks have as few as 12 examples" in page


def test_a_study_keeps_no_token_ids_and_the_page_says_how_to_get_a_replay(page: str) -> None:
    assert 'id="replay"' not in page
    assert "--model BASE --adapter STUDENT decodes an example" in page


def test_pngs_are_of_the_tables_that_show_something_new(written: Report) -> None:
    assert [path.name for path in written.pictures[:4]] == [
        "page-accuracy.png",
        "page-speed.png",
        "page-accuracy-windows.png",
        "page-speed-windows.png",
    ]


def test_the_embedded_numbers_have_the_tables_and_the_trials(page: str, part: StudyPart) -> None:
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    (study,) = json.loads(found)["studies"]
    assert [table["name"] for table in study["tables"]] == [table.name for table in part.tables]
    assert [trial["number"] for trial in study["tuning"]] == [0, 1]


def test_a_study_and_other_runs_share_a_page(folder: Path, tmp_path: Path) -> None:
    made.write_sweep(tmp_path / "sweep", ("tad",), examples=4)
    done = write_report([folder, tmp_path / "sweep"], tmp_path / "p.html", resamples=5)
    text = done.page.read_text()
    assert text.index('id="study-0"') < text.index('id="curves"') < text.index('id="replay"')
    assert [path.name for path in done.pictures if "accuracy" in path.name] == [
        "p-accuracy-tiny.png",
        "p-accuracy-tiny-windows.png",
        "p-accuracy-nano-llada.png",
    ]


def test_a_study_that_has_hardly_begun_has_a_page(world: Path, tmp_path: Path) -> None:
    out = tmp_path / "study"
    assert Study(study_recipe(world), out).run(["base"])
    shown = _Shown(write_report([out], tmp_path / "p.html").page.read_text())
    assert "base" in shown.open
    assert "tad: not run yet" in shown.folded
    shutil.rmtree(out / "answers")
    done = write_report([out], tmp_path / "q.html")
    assert done.pictures == []
    assert "The base has not been run yet." in _Shown(done.page.read_text()).open


# Legends and words


@pytest.mark.parametrize("count", [3, 11, 17])
def test_a_legend_stays_inside_its_figure_however_many_methods_there_are(count: int) -> None:
    figure = Figure(figsize=(3 * WIDTH, 4), layout="constrained")
    labels = {f"TAD, store=student-reference,teacher=number {i}": look(i) for i in range(count)}
    height = _add_legend(figure, labels)
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert len(legend.get_texts()) == count
    assert box.width <= figure.bbox.width
    assert height >= box.height / figure.dpi


def test_a_label_that_is_too_long_for_a_narrow_figure_is_broken() -> None:
    figure = Figure(figsize=(WIDTH, 4), layout="constrained")
    _add_legend(figure, {"TAD, reference tokens, store=student-max-reference,teacher=privileged": look(0)})
    assert figure.legends[0].get_window_extent().width <= figure.bbox.width


def test_settings_and_changes_are_spelled_out() -> None:
    assert setting_of("tad,threshold=0.5") == "threshold 0.5"
    assert setting_of("one-by-one,block=8") == "one token"
    assert changes_of({"learning": {"lr": 0.001}, "objective": {"name": "tad"}, "states": 4}) == (
        "learning.lr 0.001, objective.name tad, states 4"
    )
    assert changes_of({}) == "none"

"""The report's numbers and words: what is gathered, how it is named and compared, and what the page says of it."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import report_world as made
from typer.testing import CliRunner

from tad.cli import app
from tad.errors import TadError
from tad.evaluation import compare_runs, tabulate
from tad.evaluation.report import Report, write_report
from tad.evaluation.report.board import POOLED, Board, Method
from tad.evaluation.report.data import gather, tell_apart
from tad.evaluation.report.palette import DARK, HUES, LIGHT, look
from tad.evaluation.report.replay import spell
from tad.evaluation.report.scores import give_looks, make_boards
from tad.evaluation.report.svg import fit_for_page
from tad.evaluation.summary import measure


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.write_study(tmp_path_factory.mktemp("study"))


@pytest.fixture(scope="module")
def board(study: Path) -> Board:
    (found,) = make_boards(gather([study]), resamples=40)
    return found


@pytest.fixture(scope="module")
def written(study: Path, tmp_path_factory: pytest.TempPathFactory) -> Report:
    return write_report([study], tmp_path_factory.mktemp("out") / "page.html", resamples=40)


@pytest.fixture(scope="module")
def page(written: Report) -> str:
    return written.page.read_text(encoding="utf-8")


class _Elements(HTMLParser):
    """Every element with its attributes, and the visible text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def of(self, tag: str) -> Iterator[dict[str, str | None]]:
        return (attributes for name, attributes in self.elements if name == tag)


# What is gathered


def test_everything_under_a_directory_is_found(study: Path) -> None:
    found = gather([study])
    assert (len(found.runs), len(found.trainings), len(found.stores)) == (8 + 3 * 4, 3, 1)
    assert found.notes == []


def test_a_directory_given_twice_counts_once(study: Path) -> None:
    assert len(gather([study, study / "eval", study / "eval" / "base"]).runs) == 20


def test_a_directory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TadError, match=r"gone: no such directory"):
        gather([tmp_path / "gone"])


def test_unfinished_and_ungraded_runs_are_left_out_and_said(tmp_path: Path) -> None:
    made.write_run(tmp_path / "half", "tad", 4, 0.8, whole=False)
    made.write_run(tmp_path / "raw", "tad", 4, 0.8, graded=False)
    made.write_training(tmp_path / "killed", "killed", finished=False)
    (tmp_path / "killed" / "run.json").unlink()
    made.write_training(tmp_path / "stopped", "stopped", finished=False)
    made.write_store(tmp_path / "store", window=False)
    found = gather([tmp_path])
    assert found.runs == []
    text = "\n".join(found.notes)
    assert "half: 24 of 48 rows are there; run the same command again" in text
    assert re.search(r"raw: 48 rows have no verdict; run 'tad regrade \S+raw'", text)
    assert "killed: has a log and no run.json" in text
    assert "stopped: stopped after step 60 of 60" in text
    assert "store: no window has been measured; run 'tad window" in text


def test_a_broken_directory_costs_a_note_and_not_the_report(tmp_path: Path) -> None:
    made.write_run(tmp_path / "good", "one-by-one", 1, 0.8)
    made.write_run(tmp_path / "bad", "tad", 4, 0.8)
    (tmp_path / "bad" / "eval.json").write_text("{")
    made.write_store(tmp_path / "store")
    (tmp_path / "store" / "window.json").write_text('{"order": 1}')
    found = gather([tmp_path])
    assert [run.folder.name for run in found.runs] == ["good"]
    assert any("bad/eval.json: is not the description of a run" in note for note in found.notes)
    assert any("window.json: is not what 'tad window' writes" in note for note in found.notes)
    assert [store.window for store in found.stores] == [None]


def test_the_teacher_s_confidence_by_step_is_that_of_the_rows(study: Path) -> None:
    (store,) = gather([study]).stores
    assert store.confidence.mean == pytest.approx(store.summary.per_step)
    assert store.confidence.count[0] == store.summary.kept == 40
    assert all(a >= b for a, b in itertools.pairwise(store.confidence.count))


def test_names_get_as_many_parents_as_they_need() -> None:
    paths = [Path("/a/x/held"), Path("/a/y/held"), Path("/a/y/train")]
    assert tell_apart(paths) == ["x/held", "y/held", "train"]


# Who is who


def test_students_are_named_after_their_recipe_and_seeds_are_one_method(board: Board) -> None:
    assert board.name == "nano-llada"
    labels = [method.label for method in board.methods]
    assert labels == [
        "base · one-by-one", "base · fast-dllm", "base · tad",
        "quality · one-by-one", "quality · tad", "speed · one-by-one", "speed · tad",
    ]  # fmt: skip
    question = ("nano-word", "tad")
    assert [line.seed for line in board.of(question, Method("speed", "tad"))] == [0, 1]
    assert [line.seed for line in board.of(question, Method("base", "tad"))] == [None]


def test_students_whose_training_is_not_at_hand_are_named_by_their_path(tmp_path: Path) -> None:
    made.write_run(tmp_path / "a", "tad", 4, 0.8, adapter="gone/mine-seed3/adapter")
    (found,) = make_boards(gather([tmp_path]), resamples=10)
    assert [(line.method.label, line.seed) for line in found.lines if line.curve.task == POOLED] == [
        ("mine · tad", 3)
    ]


def test_every_base_has_its_own_board(tmp_path: Path) -> None:
    made.write_sweep(tmp_path / "one", ("tad",))
    made.write_sweep(tmp_path / "two", ("tad",), model="other")
    boards = make_boards(gather([tmp_path]), resamples=10)
    assert [found.name for found in boards] == ["nano-llada", "other"]
    looks = give_looks(boards)
    assert list(looks) == [Method("base", "one-by-one"), Method("base", "tad")]  # one look for both boards


# Numbers


def test_curves_and_areas_are_those_of_tad_points(study: Path, board: Board) -> None:
    folders = sorted((study / "eval").iterdir())
    expected = tabulate(folders, resamples=40)
    assert board.y_max == expected.y_max
    areas = sorted(curve.aup for curve in expected.curves if curve.aup is not None)
    mine = [line.curve for line in board.lines if line.curve.aup is not None]
    assert sorted(curve.aup for curve in mine if curve.aup is not None) == areas
    assert len(areas) == 10  # two methods of the base, one of each of three students; two tasks
    reaches = {tuple(curve.reaches) for curve in expected.curves}
    assert {tuple(curve.reaches) for curve in mine} == reaches


def test_a_given_y_max_is_used_and_said(study: Path) -> None:
    (found,) = make_boards(gather([study]), y_max={"nano-word": 95.0}, resamples=5)
    assert found.y_max["nano-word/tad"] == 95.0
    assert found.y_max_from == {"nano-word/tad": "given", "nano-math/tad": "highest in this table"}


def test_the_pooled_curve_counts_all_examples_alike(board: Board) -> None:
    runs = {run.folder: run for run, _ in board.runs}
    for line in board.of((POOLED, "tad")):
        for point, folder in zip(line.curve.points, line.runs, strict=True):
            expected = measure(runs[folder].rows)
            assert (point.n, point.accuracy, point.tpf) == (48, expected["accuracy"], expected["tpf"])


def test_runs_in_no_sweep_are_points_without_an_area(tmp_path: Path) -> None:
    made.write_run(tmp_path / "base", "one-by-one", 0.8, 0.9)
    made.write_run(tmp_path / "student", "tad", 5, 0.85, adapter="x/speed/adapter")
    (found,) = make_boards(gather([tmp_path]), resamples=10)
    assert {line.method.label for line in found.lines} == {"base · one-by-one", "speed · tad"}
    assert all(line.curve.aup is None for line in found.lines)
    assert found.pairs


def test_runs_of_several_bases_in_one_directory_are_kept_apart(tmp_path: Path) -> None:
    for model in ("nano-llada", "other"):
        made.write_run(tmp_path / f"{model}-first", "one-by-one", 0.8, 0.9, model=model)
        made.write_run(tmp_path / f"{model}-fast", "tad", 5, 0.85, model=model)
    found = gather([tmp_path])
    boards = make_boards(found, resamples=10)
    assert [[method.label for method in board.methods] for board in boards] == [
        ["base · one-by-one", "base · tad"]
    ] * 2
    assert found.notes == []


def test_runs_on_other_examples_never_share_a_board(tmp_path: Path) -> None:
    made.write_sweep(tmp_path / "tuning", ("tad",), split="validation")
    made.write_sweep(tmp_path / "final", ("tad",))
    made.write_sweep(tmp_path / "few", ("tad",), examples=4)
    made.write_run(tmp_path / "word" / "fast", "fast-dllm", 3, 0.8, tasks=("nano-word",))
    boards = make_boards(gather([tmp_path]), resamples=5)
    assert [board.name for board in boards] == [
        "nano-llada, test, 8 examples",
        "nano-llada, test, 48 examples",
        "nano-llada, validation",
    ]
    assert [board.examples(("nano-word", "tad")) for board in boards] == [[4], [24], [24]]
    labels = [[method.label for method in board.methods] for board in boards]
    assert labels[1] == [
        "base · one-by-one",
        "base · fast-dllm",
        "base · tad",
    ]  # one task of the three is enough


def test_seeds_that_were_asked_other_tasks_are_compared_on_those_they_share(tmp_path: Path) -> None:
    made.write_run(tmp_path / "base" / "one-by-one", "one-by-one", 0.8, 0.9)
    made.write_run(tmp_path / "a" / "tad", "tad", 5, 0.85, adapter="x/mine-seed0/adapter")
    made.write_run(
        tmp_path / "b" / "tad", "tad", 5, 0.85, adapter="x/mine-seed1/adapter", tasks=("nano-word",)
    )
    (found,) = make_boards(gather([tmp_path]), resamples=10)
    assert [(pair.seeds, pair.difference.task) for pair in found.pairs] == [((0, 1), "nano-word")]


def test_the_table_takes_the_decoder_s_default_setting(board: Board) -> None:
    (line,) = board.of(("nano-word", "tad"), Method("base", "fast-dllm"))
    assert line.curve.points[line.chosen("llada")].setting == 0.9
    (line,) = board.of(("nano-word", "tad"), Method("base", "tad"))
    assert line.curve.points[line.chosen("llada")].setting == 0.5


def test_differences_of_one_run_are_those_of_tad_compare(study: Path, board: Board) -> None:
    base, other = study / "eval" / "base" / "one-by-one", study / "eval" / "base" / "tad,threshold=0.5"
    expected = compare_runs([base, other], 40).differences
    found = [
        pair.difference
        for pair in board.pairs
        if pair.method == Method("base", "tad") and pair.reference == "base · one-by-one"
    ]
    assert [(one.task, one.accuracy, one.accuracy_interval, one.tpf) for one in found] == [
        (one.task, one.accuracy, one.accuracy_interval, one.tpf) for one in expected
    ]


def test_differences_over_seeds_are_their_mean_with_an_interval_and_a_spread(
    study: Path, board: Board
) -> None:
    base = study / "eval" / "base" / "one-by-one"
    each = [
        compare_runs([base, study / "eval" / f"nano-llada-speed-{seed}" / "tad,threshold=0.5"], 40)
        for seed in (0, 1)
    ]
    pair = next(
        pair
        for pair in board.pairs
        if pair.method == Method("speed", "tad")
        and pair.reference == "base · one-by-one"
        and pair.difference.task == "all"
    )
    accuracies = [found.differences[-1].accuracy for found in each]
    assert pair.seeds == (0, 1)
    assert pair.difference.accuracy == pytest.approx(np.mean(accuracies))
    low, high = pair.difference.accuracy_interval
    assert low <= pair.difference.accuracy <= high
    assert pair.spread is not None
    assert pair.spread[0] == pytest.approx(np.std(accuracies, ddof=1))


def test_fast_dllm_is_the_second_reference(board: Board) -> None:
    references = list(dict.fromkeys(pair.reference for pair in board.pairs))
    assert references == ["base · one-by-one", "base · fast-dllm at 0.9"]


# The page


def test_the_page_loads_nothing_from_anywhere(page: str) -> None:
    assert "http:" not in page
    assert "https:" not in page
    assert "//" not in re.sub(r"//[^\n]*", "", page.split("<script>")[1]).split("</script>")[0]
    found = _Elements(page)
    for tag, attributes in found.elements:
        for name in ("src", "href"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:")), (tag, value)
    assert not list(found.of("iframe"))
    policy = next(
        meta["content"]
        for meta in found.of("meta")
        if "content" in meta and "default-src" in str(meta["content"])
    )
    assert policy is not None
    assert policy.startswith("default-src 'none'")


def test_text_from_models_prompts_and_files_is_escaped(tmp_path: Path) -> None:
    evil = f"models/{made.ATTACK.replace('/', '')}"
    made.write_run(tmp_path / "e" / "one-by-one", "one-by-one", 0.9, 1.0, answer=made.ATTACK)
    made.write_run(tmp_path / "e" / "tad", "tad", 5, 1.0, answer=made.ATTACK)
    made.write_run(tmp_path / "f", "tad", 5, 1.0, model=evil, keep_ids=False)
    made.write_training(tmp_path / "t", made.ATTACK)
    done = write_report([tmp_path], tmp_path / "p.html", title=made.ATTACK, resamples=5)
    text = done.page.read_text(encoding="utf-8")
    found = _Elements(text)
    assert sum(1 for _ in found.of("script")) == 2  # the data and our own
    assert not list(found.of("img"))
    assert not any(name.startswith("on") for _, attributes in found.elements for name in attributes)
    cells = [attributes for attributes in found.of("span") if "data-step" in attributes]
    assert cells
    shown = "".join(found.text)
    assert made.ATTACK in shown  # the prompt, the title: there, as text
    assert text.count("</script>") == 2


def test_the_embedded_numbers_are_json_and_are_those_of_the_boards(page: str, board: Board) -> None:
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    data = json.loads(found)
    assert "<" not in found
    (numbers,) = data["boards"]
    assert numbers["y_max"] == board.y_max
    assert len(numbers["curves"]) == len(board.lines)
    assert data["stores"][0]["window"]["windows"]["speed"]["window"] == 16


def test_small_runs_are_marked_as_smoke_size(page: str, tmp_path: Path) -> None:
    assert "Smoke size." in page
    assert "as few as 24 examples" in page
    made.write_run(
        tmp_path / "one", "one-by-one", 0.9, 0.9, examples=200, tasks=("nano-word",), keep_ids=False
    )
    text = write_report([tmp_path], tmp_path / "p.html", resamples=5).page.read_text()
    assert "Smoke size." not in text
    assert 'class="smoke"' not in text
    text = write_report([tmp_path], tmp_path / "p.html", smoke=True, resamples=5).page.read_text()
    assert "do not quote these numbers" in text
    assert 'class="smoke"' in text


def test_every_table_group_says_n_and_sources_say_machine_commit_and_seed(page: str) -> None:
    text = " ".join(" ".join(_Elements(page).text).split())
    assert "nano-word, n = 24, y_max = " in text
    assert "all tasks, n = 48" in text
    for word in ("machine", "commit", "seed"):
        assert f"{word} " in text
    assert re.search(r"eval/base 8 evaluation runs 48 0 \S+", text)


def test_the_page_of_nothing_says_what_to_run(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = write_report([tmp_path / "empty"], tmp_path / "p.html")
    text = "".join(_Elements(done.page.read_text()).text)
    assert done.pictures == []
    assert done.notes == [f"{tmp_path / 'empty'}: holds nothing that tad's commands have left"]
    for command in ("tad eval", "tad window", "tad collect", "tad distill"):
        assert command in text


def test_pngs_stand_beside_the_page(written: Report) -> None:
    names = [path.name for path in written.pictures]
    assert names == [
        "page-accuracy.png",
        "page-aup.png",
        "page-decay.png",
        "page-teacher.png",
        "page-loss.png",
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written.pictures)


def test_charts_follow_the_theme_and_share_no_ids(page: str) -> None:
    charts = re.findall(r"<figure>.*?</figure>", page, re.DOTALL)
    assert len(charts) == 3 + 2 + 1 + 1 + 2
    assert not re.search(r"#[0-9a-f]{6}\b", "".join(charts))  # all colours are variables
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(set(ids)) == len(ids)
    for chart in charts:
        for used in re.findall(r'(?:href="#|url\(#)([^")]+)', chart):
            assert used in ids


def test_a_chart_keeps_markup_in_its_labels_as_text() -> None:
    chart = '<svg xmlns="http://www.w3.org/2000/svg"><text>&lt;b&gt; &amp; c</text></svg>'
    assert fit_for_page(chart, "x", 'a "<b>"').count("<b>") == 0


# The replay


def test_the_replay_shows_the_median_gain_of_what_both_have_right(page: str) -> None:
    found = _Elements(page)
    sides = [attributes for attributes in found.of("div") if attributes.get("class") == "side"]
    assert len(sides) == 4  # two tasks, two sides
    assert int(str(sides[0]["data-forwards"])) > int(str(sides[1]["data-forwards"]))
    assert "the median gain in forwards of" in page


def test_cells_spell_the_answer_and_know_their_forward(page: str) -> None:
    side = page.split('<div class="canvas">')[1].split("</div>")[0]
    cells = re.findall(r'<span class="cell (\w+)" data-step="(\d+)"[^>]*>([^<]*)</span>', side)
    assert len(cells) == made.LENGTH
    spelled = "".join(text for kind, _, text in cells if kind == "text")
    assert spelled == "Ana starts with 12. Then 12 + 30 = 42.↵#### 42"
    assert [kind for kind, _, _ in cells].count("end") == 1
    assert all(step == "0" for kind, step, _ in cells if kind == "filler")


def test_the_example_can_be_chosen(study: Path, tmp_path: Path) -> None:
    done = write_report([study], tmp_path / "p.html", example="nano-math/test/3", resamples=5)
    assert "<b>nano-math/test/3</b>: chosen by hand" in done.page.read_text()
    with pytest.raises(TadError, match="--example nano-math/test/99: not among"):
        write_report([study], tmp_path / "p.html", example="nano-math/test/99", resamples=5)


def test_rows_without_token_ids_are_said_and_not_replayed(tmp_path: Path) -> None:
    made.write_sweep(tmp_path / "e", ("tad",), keep_ids=False)
    done = write_report([tmp_path], tmp_path / "p.html", resamples=5)
    assert any("the rows are without token ids; give --model" in note for note in done.notes)


def test_without_its_tokenizer_a_replay_shows_token_ids(tmp_path: Path) -> None:
    made.write_sweep(tmp_path / "e", ("tad",), model="somewhere/else")
    done = write_report([tmp_path], tmp_path / "p.html", resamples=5)
    assert any("so token ids are shown; give --model" in note for note in done.notes)
    first = made.speller().encode_text("Ana")[0]
    assert f">{first} </span>" in done.page.read_text()


def test_a_character_of_several_tokens_stands_where_its_last_one_is() -> None:
    class Bytes:
        def decode(self, ids: list[int], **_: object) -> str:
            return bytes(ids).decode(errors="replace")

    lm = made.speller()
    lm.tokenizer = Bytes()
    assert spell(lm, list("aé€b".encode())) == ["a", "", "é", "", "", "€", "b"]
    assert spell(None, [7, 8]) == ["7 ", "8 "]


# Colours


def test_hues_stay_apart_for_colour_blind_readers() -> None:
    for theme in (LIGHT, DARK):
        hues = [theme[f"slot-{i + 1}"] for i in range(HUES)]
        for matrix in _DEFICIENCIES.values():
            seen = [_oklab(np.clip(np.array(matrix) @ _linear(hue), 0, 1)) for hue in hues]
            for one, other in itertools.combinations(seen, 2):
                assert np.linalg.norm(one - other) > 0.09


@pytest.mark.parametrize(("theme", "floor"), [(LIGHT, 3.0), (DARK, 3.0)])
def test_hues_and_text_stand_out_from_the_page(theme: dict[str, str], floor: float) -> None:
    for name, value in theme.items():
        if name.startswith("slot-"):
            assert _contrast(value, theme["raised"]) >= floor
        elif name in ("ink", "quiet"):
            assert min(_contrast(value, theme["raised"]), _contrast(value, theme["paper"])) >= 4.5


def test_eighteen_methods_look_different() -> None:
    assert len({look(slot) for slot in range(18)}) == 18


# Simulated colour deficiencies in linear sRGB (Machado, Oliveira and Fernandes 2009, full severity).
_DEFICIENCIES = {
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
    "none": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
}  # fmt: skip


def _linear(colour: str) -> np.ndarray:
    values = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def _oklab(linear: np.ndarray) -> np.ndarray:
    cones = [[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566], [0.0883024619, 0.2817188376, 0.6299787005]]  # fmt: skip
    axes = [[0.2104542553, 0.793617785, -0.0040720468], [1.9779984951, -2.428592205, 0.4505937099], [0.0259040371, 0.7827717662, -0.808675766]]  # fmt: skip
    return np.array(axes) @ np.cbrt(np.array(cones) @ linear)


def _contrast(one: str, other: str) -> float:
    low, high = sorted(float(_linear(colour) @ [0.2126, 0.7152, 0.0722]) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


# The command


def test_the_command_prints_what_it_wrote_and_what_is_missing(tmp_path: Path) -> None:
    made.write_run(tmp_path / "runs" / "one", "one-by-one", 0.9, 0.9, keep_ids=False)
    done = CliRunner().invoke(app, ["report", str(tmp_path / "runs"), "--out", str(tmp_path / "r.html")])
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines() == [str(tmp_path / "r.html"), str(tmp_path / "r-accuracy.png")]
    assert "missing: replay of nano-llada" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out", "r.pdf"], "give --out a name that ends in .html"),
        (["--adapter", "x"], "--adapter is for a replay that is decoded now; give --model too"),
        (["--y-max", "high"], "should be a percentage"),
    ],
)
def test_the_command_refuses_what_makes_no_sense(tmp_path: Path, words: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["report", str(tmp_path), *words])
    assert isinstance(done.exception, TadError)
    assert message in str(done.exception)

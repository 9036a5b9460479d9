"""The protocol and the registry."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tad.errors import TadError
from tad.tasks import Prompt, Score, Verdict, check_contamination, get_task, register_task, task_names


def test_every_registered_benchmark_can_be_made() -> None:
    for name in task_names():
        if name == "jsonl":  # needs a file
            continue
        task = get_task(name)
        assert task.name == name
        assert "tad" in task.templates
        assert task.default_split in task.splits


def test_unknown_tasks_options_splits_and_templates_are_errors_that_name_the_known_ones() -> None:
    with pytest.raises(TadError, match=r"gsm9k.*gsm8k"):
        get_task("gsm9k")
    with pytest.raises(TadError, match=r"'gsm8k'.*'contained'.*extraction"):
        get_task("gsm8k", contained=False)
    with pytest.raises(TadError, match=r"'loose'.*exact or flexible"):
        get_task("gsm8k", extraction="loose")
    task = get_task("gsm8k")
    with pytest.raises(TadError, match=r"'dev'.*train, test"):
        task.examples("dev")
    with pytest.raises(TadError, match=r"'fancy'.*tad"):
        task.prompt(None, "fancy")  # type: ignore[arg-type]


def test_a_task_can_be_registered_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tad.tasks._FACTORIES", {})
    register_task("mine", "tad.tasks.gsm8k:Gsm8k")
    assert task_names()[0] == "mine"
    assert get_task("mine").name == "gsm8k"


def test_training_on_prm12k_and_evaluating_on_math_is_refused_unless_allowed() -> None:
    with pytest.raises(TadError, match=r"'prm12k'.*'math'.*4,500 of the 5,000"):
        check_contamination(["gsm8k", "prm12k"], ["math"])
    check_contamination(["prm12k"], ["math"], allow=True)
    check_contamination(["prm12k"], ["gsm8k"])
    check_contamination(["gsm8k"], ["math"])


def test_an_answer_is_cut_at_its_stop_strings_one_after_the_other() -> None:
    prompt = Prompt.from_user("q", stop=("Question:", "</s>"))
    assert prompt.cut("a</s>b Question: c") == "a"
    assert prompt.cut("no stop") == "no stop"
    assert Prompt.from_user("q", stop=("cd", "bc")).cut("abcd") == "ab"


def test_a_prefix_becomes_the_open_assistant_turn() -> None:
    assert Prompt.from_user("q").as_chat() == [{"role": "user", "content": "q"}]
    assert Prompt.from_user("q", prefix="p").as_chat()[-1] == {"role": "assistant", "content": "p"}


@given(st.lists(st.booleans(), min_size=2))
def test_the_standard_error_equals_the_sample_deviation_over_root_n(outcomes: list[bool]) -> None:
    score = Score.of([Verdict(outcome, "") for outcome in outcomes])
    mean = sum(outcomes) / len(outcomes)
    variance = sum((outcome - mean) ** 2 for outcome in outcomes) / (len(outcomes) - 1)
    assert score.standard_error == pytest.approx(math.sqrt(variance / len(outcomes)))
    assert (score.accuracy, score.count) == (pytest.approx(mean), len(outcomes))
    assert math.isnan(Score.of([]).accuracy)

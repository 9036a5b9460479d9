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


def test_an_unknown_task_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(TadError, match=r"gsm9k.*gsm8k"):
        get_task("gsm9k")


def test_an_unknown_option_is_an_error_that_names_the_tasks_own() -> None:
    with pytest.raises(TadError, match="task 'gsm8k' has no option 'contained'; it has: extraction"):
        get_task("gsm8k", contained=False)


def test_an_unknown_split_or_template_is_an_error() -> None:
    task = get_task("gsm8k")
    with pytest.raises(TadError, match="no split 'dev'; it has: train, test"):
        task.examples("dev")
    with pytest.raises(TadError, match="no prompt template 'fancy'; it has: tad"):
        task.prompt(None, "fancy")  # type: ignore[arg-type]


def test_a_task_can_be_registered_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tad.tasks._FACTORIES", {})
    register_task("mine", "tad.tasks.gsm8k:Gsm8k")
    assert task_names() == ["mine"]
    assert get_task("mine").name == "gsm8k"


def test_training_on_prm12k_and_evaluating_on_math_is_refused_with_the_reason() -> None:
    with pytest.raises(TadError, match="4,500 of the 5,000 MATH test problems"):
        check_contamination(["gsm8k", "prm12k"], ["math"])


def test_contamination_can_be_allowed_and_clean_pairs_pass() -> None:
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

"""Our benchmarks as tasks of the harness: the prompts, the graders, and runs end to end."""

from __future__ import annotations

import json
import sys
from fnmatch import fnmatch
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from lm_eval_setup import NEEDS_HARNESS, known_tasks, run_harness, tiny_lm, write_roomy

pytest.importorskip("lm_eval", reason=NEEDS_HARNESS)
from lm_eval.tasks import TaskManager

from tad.decoding import decode
from tad.errors import TadError
from tad.evaluation.lm_eval import TASKS
from tad.evaluation.lm_eval import __main__ as harness
from tad.evaluation.lm_eval.model import TadLM
from tad.evaluation.lm_eval.task import TadTask
from tad.models import DREAM, LLADA, LM, Family
from tad.tasks import Prompt, Task, get_task

BENCHMARKS = ("gsm8k", "math", "humaneval", "humaneval-instruct", "mbpp", "mbpp-instruct")
NAMES = {
    f"tad_{benchmark}{'' if template == 'tad' else f'_{template}'}".replace("-", "_"): (benchmark, template)
    for benchmark in BENCHMARKS
    for template in get_task(benchmark).templates
}
REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def manager(data_dir: Path) -> TaskManager:
    return known_tasks(data_dir)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LM]:
    return {f.name: tiny_lm(tmp_path_factory.mktemp(f.name), f) for f in (LLADA, DREAM)}


@cache
def get_own(benchmark: str, data_dir: Path) -> Task:
    """Our own task; the data is read once."""
    return get_task(benchmark, data_dir)


def get_tad_task(manager: TaskManager, name: str) -> TadTask:
    task = manager.load([name])["tasks"][name]
    assert isinstance(task, TadTask)
    return task


def encode(lm: LM, prompt: Prompt) -> list[int]:
    """A prompt of ours as ids, written out here: plain text if raw, else the chat with its opened turn."""
    if prompt.raw:
        return lm.encode_text(prompt.text + prompt.prefix)
    chat = [{"role": message.role, "content": message.content} for message in prompt.messages]
    return lm.encode(chat, prompt.prefix)


def test_there_is_one_task_for_every_template_of_every_benchmark() -> None:
    assert sorted(known_tasks(Path()).all_subtasks) == sorted(NAMES)
    files = sorted(path.stem for path in TASKS.glob("*.yaml"))
    assert [f"tad_{stem}" for stem in files] == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_harness_sends_the_prompts_of_our_tasks(
    name: str, manager: TaskManager, models: dict[str, LM], data_dir: Path
) -> None:
    benchmark, template = NAMES[name]
    task, own = get_tad_task(manager, name), get_own(benchmark, data_dir)
    examples = own.examples("test")
    assert [doc["id"] for doc in task.test_docs()] == [example.id for example in examples]
    chosen = list(range(0, len(examples), len(examples) // 4))
    for lm in models.values():
        model = TadLM(lm)
        task.set_config("num_fewshot", 0)
        task.build_all_requests(
            samples=chosen, apply_chat_template=True, chat_template=model.apply_chat_template
        )
        for number, instance in zip(chosen, task.instances, strict=True):
            context, arguments = instance.args
            prompt = own.prompt(examples[number], template)
            assert model.tok_encode(context) == encode(lm, prompt)
            assert arguments["until"] == list(prompt.stop)
            assert "max_gen_toks" not in arguments  # the model's gen_length decides, as in our own runs


def test_without_the_chat_format_the_prompt_is_plain_text(manager: TaskManager, data_dir: Path) -> None:
    own = get_own("humaneval-instruct", data_dir)
    task = get_tad_task(manager, "tad_humaneval_instruct")
    task.set_config("num_fewshot", 0)
    task.build_all_requests(limit=1)
    prompt = own.prompt(own.examples("test")[0])
    assert task.instances[0].args[0] == prompt.text + prompt.prefix


@pytest.mark.parametrize("name", ["tad_gsm8k", "tad_math"])
def test_answers_get_the_verdicts_of_our_graders(name: str, manager: TaskManager, data_dir: Path) -> None:
    task = get_tad_task(manager, name)
    own = get_own(NAMES[name][0], data_dir)
    docs = task.test_docs()
    for number in (0, 100, 500):
        example = own.examples("test")[number]
        assert task.process_results(docs[number], [own.reference(example)]) == {"acc": 1.0}
        assert task.process_results(docs[number], [r"It is \boxed{-987654}."]) == {"acc": 0.0}


@pytest.mark.sandbox
def test_programs_are_run_in_our_sandbox(manager: TaskManager, data_dir: Path, tmp_path: Path) -> None:
    task = get_tad_task(manager, "tad_humaneval")
    own = get_own("humaneval", data_dir)
    doc, example = task.test_docs()[0], own.examples("test")[0]
    good = f"```python\n{own.reference(example)}\n```"
    assert task.process_results(doc, [good]) == {"acc": 1.0}
    trace = tmp_path / "escaped"
    body = f"open({str(trace)!r}, 'w').write('x')"
    bad = good.replace("def has_close", f"x = {body}\n\ndef has_close").replace(
        "for ", f"{body}\n    for ", 1
    )
    assert task.process_results(doc, [bad]) == {"acc": 0.0}
    assert not trace.exists()


def check_against_our_own_run(
    lm: LM, results: dict[str, Any], name: str, limit: int, data_dir: Path, decoder: str, length: int
) -> None:
    benchmark, template = NAMES[name]
    own = get_own(benchmark, data_dir)
    examples = own.examples("test")[:limit]
    prompts = [own.prompt(example, template) for example in examples]
    rows = decode(lm, [encode(lm, prompt) for prompt in prompts], decoder, length)
    texts = [prompt.cut(lm.decode(row.answer)) for prompt, row in zip(prompts, rows, strict=True)]
    samples = sorted(results["samples"][name], key=lambda sample: sample["doc_id"])
    assert [sample["resps"][0][0] for sample in samples] == texts
    verdicts = own.grade_many(list(zip(examples, texts, strict=True)), workers=1)
    assert [sample["acc"] for sample in samples] == [float(verdict.correct) for verdict in verdicts]
    assert results["results"][name]["acc,none"] == sum(v.correct for v in verdicts) / limit


@pytest.mark.parametrize("family", [LLADA, DREAM], ids=lambda family: family.name)
def test_gsm8k_and_math_run_end_to_end_with_our_own_texts(
    family: Family, manager: TaskManager, models: dict[str, LM], data_dir: Path
) -> None:
    lm = models[family.name]
    names = ["tad_gsm8k", "tad_gsm8k_d3llm", "tad_math_zero_shot"]
    results = run_harness(TadLM(lm, batch_size=2, gen_length=32), names, manager, limit=3)
    for name in names:
        check_against_our_own_run(lm, results, name, 3, data_dir, "tad", 32)
    assert results["config"]["texts"] == 9


@pytest.mark.sandbox
def test_humaneval_and_mbpp_run_end_to_end_with_our_own_texts(
    manager: TaskManager, models: dict[str, LM], data_dir: Path
) -> None:
    lm = models["llada"]
    names = ["tad_humaneval", "tad_humaneval_instruct", "tad_mbpp_plain", "tad_mbpp_instruct_d3llm"]
    model = TadLM(lm, decoder="fast-dllm", batch_size=3, gen_length=32)
    results = run_harness(model, names, manager, limit=2)
    for name in names:
        check_against_our_own_run(lm, results, name, 2, data_dir, "fast-dllm", 32)


def test_missing_data_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(TadError, match="no data for split 'test' there"):
        known_tasks(tmp_path).load(["tad_gsm8k"])


def test_a_missing_or_old_harness_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    assert harness.check_harness() == metadata.version("lm_eval")
    monkeypatch.setattr("tad.evaluation.lm_eval.__main__.metadata.version", lambda name: "0.4.9.2")
    with pytest.raises(TadError, match=r"0\.4\.9\.2 is too old; pip install 'lm-eval>=0\.4\.13'"):
        harness.check_harness()
    monkeypatch.setattr("tad.evaluation.lm_eval.__main__.metadata.version", missing)
    with pytest.raises(TadError, match="is not installed"):
        harness.check_harness()


def test_the_package_ships_the_task_files_and_names_the_plugin() -> None:
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    assert '[project.entry-points."lm_eval.models"]\ntad = "tad.evaluation.lm_eval.model:TadLM"' in text
    (line,) = [line for line in text.splitlines() if line.startswith('tad = ["py.typed"')]
    patterns = json.loads(line.partition("=")[2])
    root = REPOSITORY / "src" / "tad"
    for path in TASKS.iterdir():
        if path.is_file():
            assert any(fnmatch(path.relative_to(root).as_posix(), pattern) for pattern in patterns), path


def test_the_harness_itself_knows_the_model_when_started_through_this_package(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_roomy(tmp_path / "tiny", LLADA)
    given = f"pretrained={model},decoder=fast-dllm,threshold=0.4,gen_length=32"
    words = ["--model", "tad", "--model_args", given, "--tasks", "tad_gsm8k_plain", "--limit", "1"]
    monkeypatch.setattr(
        sys, "argv", ["lm_eval", *words, "--gen_kwargs", "max_gen_toks=32", "--device", "cpu"]
    )
    monkeypatch.setenv("TAD_DATA", str(data_dir))
    harness.main()
    assert "tad_gsm8k_plain" in capsys.readouterr().out

# ruff: noqa: E402  (the harness is optional: imports wait until it is known to be there)
"""The model `tad` under the harness's own `simple_evaluate`, on local tasks and tiny random models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lm_eval_setup import NEEDS_HARNESS, tiny_lm

lm_eval = pytest.importorskip("lm_eval", reason=NEEDS_HARNESS)
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager

from tad import generate
from tad.errors import TadError
from tad.evaluation.lm_eval.likelihood import decodes_greedily, estimate_loglikelihood
from tad.evaluation.lm_eval.model import Order, TadLM
from tad.evaluation.recipe import EvalRecipe, list_tasks
from tad.evaluation.run import evaluate
from tad.models import DREAM, LLADA, LM

QUESTIONS = ["What is 2 + 2?", "And then?", "A longer question, so that lengths differ: how many?", "Why?"]
LENGTH = 64


@pytest.fixture(scope="module", params=[LLADA, DREAM], ids=lambda family: family.name)
def lm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LM:
    return tiny_lm(tmp_path_factory.mktemp("harness"), request.param)


def write_task(folder: Path, name: str, **config: Any) -> TaskManager:
    """A local task of the harness over `QUESTIONS`, and a manager that knows nothing else."""
    data = folder / "questions.jsonl"
    rows = [{"question": question, "answer": "4", "choices": ["4", "five"]} for question in QUESTIONS]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        **config,
    }
    (folder / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML
    return TaskManager(include_path=str(folder), include_defaults=False)


def run(model: TadLM, manager: TaskManager, name: str, **options: Any) -> list[dict[str, Any]]:
    results = lm_eval.simple_evaluate(model, tasks=[name], task_manager=manager, bootstrap_iters=0, **options)
    return sorted(results["samples"][name], key=lambda sample: sample["doc_id"])


def texts(samples: list[dict[str, Any]]) -> list[str]:
    return [sample["resps"][0][0] for sample in samples]


def request(context: str, **arguments: Any) -> Instance:
    return Instance("generate_until", {}, (context, arguments), 0, ("task", 0, 1))


def test_the_harness_finds_the_model_by_name() -> None:
    assert get_model("tad") is TadLM


@pytest.mark.parametrize("chat", [True, False])
def test_texts_under_the_harness_equal_our_own(lm: LM, chat: bool, tmp_path: Path) -> None:
    manager = write_task(tmp_path, "open", generation_kwargs={"until": [], "max_gen_toks": LENGTH})
    found = texts(run(TadLM(lm, batch_size=3), manager, "open", apply_chat_template=chat))
    assert found == [answer.text for answer in generate(lm, QUESTIONS, gen_length=LENGTH, raw=not chat)]
    assert len(set(found)) > 1


def test_texts_under_the_harness_equal_those_of_an_evaluation_run(lm: LM, tmp_path: Path) -> None:
    manager = write_task(tmp_path, "open", generation_kwargs={"until": []})
    model = TadLM(lm, gen_length=LENGTH, batch_size=3, threshold=1.5)
    found = texts(run(model, manager, "open", apply_chat_template=True))
    recipe = EvalRecipe(
        model=lm.source,
        tasks=list_tasks([f"jsonl:{tmp_path / 'questions.jsonl'}"]),
        gen_length=LENGTH,
        settings={"threshold": 1.5},
    )
    rows = evaluate(lm, recipe, tmp_path / "run").rows()
    assert found == [row.text for row in rows]
    assert model.totals.forwards == sum(row.forwards for row in rows)
    assert model.totals.content == sum(row.tokens for row in rows)
    assert model.totals.positions == sum(row.tokens_all for row in rows)
    info = model.get_model_info()
    assert info["tpf"] == pytest.approx(sum(row.tokens for row in rows) / sum(row.forwards for row in rows))
    assert (info["decoder"]["name"], info["decoder"]["threshold"]) == ("tad", 1.5)


def test_the_model_can_be_made_from_the_harness_s_argument_string(lm: LM, tmp_path: Path) -> None:
    manager = write_task(tmp_path, "open", generation_kwargs={"until": []})
    arguments = f"pretrained={lm.source},decoder=fast-dllm,gen_length={LENGTH},threshold=0.3,device=cpu"
    results = lm_eval.simple_evaluate(
        "tad", model_args=arguments, tasks=["open"], task_manager=manager, batch_size="2", bootstrap_iters=0
    )
    own = generate(lm, QUESTIONS, "fast-dllm", LENGTH, raw=True, threshold=0.3)
    assert texts(results["samples"]["open"]) == [answer.text for answer in own]
    assert results["config"]["model"] == "tad"


def test_examples_of_a_few_shot_task_are_turns_of_the_chat(lm: LM, tmp_path: Path) -> None:
    shots = {"sampler": "first_n", "samples": [{"question": "1 + 1?", "answer": "2"}]}
    manager = write_task(
        tmp_path,
        "shot",
        generation_kwargs={"until": []},
        num_fewshot=1,
        fewshot_config=shots,
        target_delimiter="",
    )
    model = TadLM(lm, gen_length=32, batch_size=4)
    samples = run(model, manager, "shot", apply_chat_template=True, fewshot_as_multiturn=True)
    for sample, question in zip(samples, QUESTIONS, strict=True):
        chat = [
            {"role": "user", "content": "1 + 1?"},
            {"role": "assistant", "content": "2"},
            {"role": "user", "content": question},
        ]
        assert model.tok_encode(sample["arguments"][0][0]) == lm.encode(chat)
        assert sample["resps"][0][0] == generate(lm, chat, gen_length=32).text


def test_a_task_can_set_parameters_of_the_decoder(lm: LM) -> None:
    model = TadLM(lm, decoder="fast-dllm", gen_length=LENGTH)
    plain, changed = model.generate_until(
        [request("Why?"), request("Why?", threshold=0.01)], disable_tqdm=True
    )
    assert plain == generate(lm, "Why?", "fast-dllm", LENGTH, raw=True).text
    assert changed == generate(lm, "Why?", "fast-dllm", LENGTH, raw=True, threshold=0.01).text
    assert plain != changed


def test_texts_are_cut_at_the_stop_strings_one_after_the_other(lm: LM) -> None:
    model = TadLM(lm, gen_length=LENGTH)
    whole = model.generate_until([request("Why?")], disable_tqdm=True)[0]
    assert len(whole) > 8
    late, early = whole[6], whole[3]
    cut = model.generate_until([request("Why?", until=[late, early])], disable_tqdm=True)[0]
    assert cut == whole.split(late, 1)[0].split(early, 1)[0]
    assert model.generate_until([request("Why?", until=late)], disable_tqdm=True) == [whole.split(late, 1)[0]]


def test_a_maximum_inside_a_block_is_read_up_to_there(lm: LM) -> None:
    model = TadLM(lm)
    found = model.generate_until([request("Why?", until=[], max_gen_toks=40)], disable_tqdm=True)[0]
    row = generate(lm, "Why?", gen_length=64, raw=True).decoded
    assert found == lm.decode(row.answer[:40])


def test_repeats_of_a_request_are_different_samples_and_the_same_again(lm: LM) -> None:
    model = TadLM(lm, gen_length=32, batch_size=2)
    sampled = request("Why?", do_sample=True, temperature=2.0)
    first = model.generate_until([sampled, sampled, sampled], disable_tqdm=True)
    assert len(set(first)) == 3
    assert model.generate_until([sampled] * 3, disable_tqdm=True) == first
    greedy = request("Why?", do_sample=False, temperature=2.0)
    assert model.generate_until([greedy], disable_tqdm=True) == [
        generate(lm, "Why?", gen_length=32, raw=True).text
    ]


def test_a_rendered_chat_has_the_ids_of_our_own_encoding(lm: LM) -> None:
    model = TadLM(lm)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    assert model.tok_encode(model.apply_chat_template(chat)) == lm.encode(chat)
    opened = [*chat, {"role": "assistant", "content": "Because\n"}]
    rendered = model.apply_chat_template(opened, add_generation_prompt=False)
    assert model.tok_encode(rendered) == lm.encode(chat, prefix="Because\n")


def test_multiple_choice_compares_the_estimated_likelihoods(lm: LM, tmp_path: Path) -> None:
    manager = write_task(
        tmp_path,
        "choice",
        output_type="multiple_choice",
        doc_to_choice="choices",
        doc_to_target="answer",
        metric_list=[{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    )
    samples = run(TadLM(lm, batch_size=5, mc_draws=12, seed=3), manager, "choice")
    for sample, question in zip(samples, QUESTIONS, strict=True):
        values = []
        for choice, response in zip((" 4", " five"), sample["filtered_resps"], strict=True):
            whole = lm.encode_text(question + choice)
            context = lm.encode_text(question)
            target = whole[len(context) :]
            value = estimate_loglikelihood(lm, context, target, draws=12, seed=3)
            assert response[0] == pytest.approx(value, abs=1e-4)
            assert response[1] == decodes_greedily(lm, context, target)
            values.append(value)
        assert sample["acc"] == float(values[0] > values[1])


def test_an_empty_context_is_the_begin_token(lm: LM) -> None:
    model = TadLM(lm, mc_draws=4)
    ((value, _),) = model.loglikelihood([Instance("loglikelihood", {}, ("", "four"), 0)], disable_tqdm=True)
    start = lm.tokens.bos if lm.tokens.bos is not None else lm.tokens.eos
    assert value == pytest.approx(estimate_loglikelihood(lm, [start], lm.encode_text("four"), 4), abs=1e-4)


def test_the_likelihood_of_running_text_is_refused(lm: LM) -> None:
    with pytest.raises(TadError, match="no likelihood of running text"):
        TadLM(lm).loglikelihood_rolling([])


def test_generation_arguments_are_read_as_the_harness_means_them() -> None:
    assert Order.read({}, 256) == Order(256)
    assert Order.read({"until": "a", "max_tokens": 5}, 256) == Order(5, ("a",))
    assert Order.read({"max_gen_toks": 7, "max_new_tokens": 9}, 256).limit == 7
    assert Order.read({"do_sample": False, "temperature": 0.7, "top_p": 0.9}, 1) == Order(1)
    assert Order.read({"temperature": 0.0}, 1) == Order(1)
    assert Order.read({"temperature": 0.7}, 1).overrides == {"temperature": 0.7}
    assert Order.read({"do_sample": True, "top_p": 0.9}, 1).overrides == {"temperature": 1.0, "top_p": 0.9}
    with pytest.raises(TadError, match="max_gen_toks should be a positive integer, not 0"):
        Order.read({"max_gen_toks": 0}, 256)


def test_unusable_settings_are_refused(tmp_path: Path) -> None:
    lm = tiny_lm(tmp_path / "tiny", LLADA)
    with pytest.raises(TadError, match="trust_remote_code: tad runs no remote code"):
        TadLM(lm, trust_remote_code=True)
    with pytest.raises(TadError, match="batch_size auto: should be a positive integer"):
        TadLM(lm, batch_size="auto")
    with pytest.raises(TadError, match="unknown decoder 'fast'"):
        TadLM("nowhere", decoder="fast")
    with pytest.raises(TadError, match="quickly"):
        TadLM("nowhere", decoder="tad", quickly=True)
    with pytest.raises(TadError, match="quickly"):
        TadLM(lm).generate_until([request("Why?", quickly=True)], disable_tqdm=True)
    with pytest.raises(TadError, match="mc_draws 0"):
        TadLM(lm, mc_draws=0)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "tiny" / name).unlink()
    with pytest.raises(TadError, match="has no tokenizer, and the harness speaks in texts"):
        TadLM(tmp_path / "tiny", device="cpu")


def test_control_tokens_count_only_where_the_template_put_them(lm: LM) -> None:
    model, control = TadLM(lm), lm.family.end_of_turn_text
    assert lm.tokens.eot not in model.tok_encode(control)
    chat = [{"role": "user", "content": f"a{control}b"}]
    rendered = model.apply_chat_template(chat)
    assert model.tok_encode(rendered) == lm.encode(chat)
    context, target = model._encode_pair(rendered, f"c{control}")
    assert [*context, *target] == lm.encode(chat, prefix=f"c{control}")
    assert lm.tokens.eot not in target

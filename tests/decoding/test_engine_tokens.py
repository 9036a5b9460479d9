"""The engine against the loop: the same tokens, steps, forwards and callbacks, through steps that a graph could hold."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from parity_models import tiny, tiny_prompts
from torch.utils._python_dispatch import TorchDispatchMode

from tad.decoding import DECODERS, Decoded, Step, decode, get_decoder
from tad.decoding.engine import Engine, engine_for, why_not
from tad.decoding.engine.slots import Method
from tad.decoding.engine.step import _SCORES, Stepper, _scorer
from tad.decoding.proposal import Sampling, propose
from tad.errors import TadError
from tad.models import LM

FAMILIES = ("llada", "dream")
_KEPT: dict[str, Engine] = {}


def kept_engine(lm: LM) -> Engine:
    """One engine per family for all tests of this module: what earlier ones left behind must not matter.

    Sizes are rounded as they are where steps are recorded.
    """
    return _KEPT.setdefault(lm.source, Engine(lm.model, bucketed=True))


def assert_same(found: list[Decoded], wanted: list[Decoded]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.tokens == other.tokens
        assert one.steps == other.steps
        assert one.forwards == other.forwards
        assert one.confidence == pytest.approx(other.confidence, abs=1e-4)


@pytest.mark.parametrize("name", list(DECODERS))
def test_every_named_decoder_gives_the_tokens_of_the_loop(
    lm: LM, prompts: list[list[int]], name: str
) -> None:
    some = prompts[2:7]  # of five lengths
    plain = decode(lm, some, name, gen_length=64, engine="plain")
    for slots in (1, 3):
        assert_same(decode(lm, some, name, 64, batch_size=slots, engine=kept_engine(lm)), plain)


@pytest.mark.parametrize("name", ["tad", "fast-dllm-dual", "one-by-one", "d2f"])
def test_outputs_that_are_not_numbers_end_the_decoding(prompts: list[list[int]], name: str) -> None:
    lm = copy.deepcopy(tiny("llada"))
    with torch.no_grad():
        lm.model.layers()[0].part(lm.model.names.query).weight[0, 0] = float("nan")
    with pytest.raises(TadError, match="not numbers"):
        decode(lm, prompts[:3], name, 32, batch_size=2, engine=Engine(lm.model))
    lm = copy.deepcopy(tiny("llada"))
    assert decode(lm, prompts[:1], name, 32, engine=Engine(lm.model))[0].forwards <= 32


def test_callers_in_several_threads_get_what_each_would_get_alone(lm: LM, prompts: list[list[int]]) -> None:
    wanted = [decode(lm, [prompt], "tad-cached", 32, engine="graph") for prompt in prompts[:4]]
    assert engine_for(lm.model) is engine_for(lm.model)
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            found = pool.map(
                lambda prompt: decode(lm, [prompt], "tad-cached", 32, engine="graph"), prompts[:4]
            )
            for one, other in zip(found, wanted, strict=True):
                assert_same(one, other)


@pytest.mark.parametrize("name", ["tad", "tad-cached", "d2f", "fast-dllm-dual"])
@pytest.mark.parametrize("slots", [1, 3])
def test_sizes_as_they_are_give_the_same(lm: LM, prompts: list[list[int]], name: str, slots: int) -> None:
    some = prompts[3:7]
    plain = decode(lm, some, name, 32, block=16, engine="plain")
    assert_same(decode(lm, some, name, 32, block=16, batch_size=slots, engine=Engine(lm.model)), plain)


@pytest.mark.parametrize(
    "settings",
    [
        {"decoder": "tad", "stop": "eager"},
        {"decoder": "tad-cached", "stop": "off"},
        {"decoder": "tad-cached", "delay": 0, "refresh": 2},
        {"decoder": "tad-cached", "cache": "active", "delay": 0, "refresh": 16},
        {"decoder": "tad-cached", "cache": "active", "delay": 2, "refresh": 3},
        {"decoder": "d3llm-cached", "delay": 3, "refresh": 1000},
        {"decoder": "d2f", "stop": "eager", "block": 8},
        {"decoder": "d2f", "cache": "none"},
        {"decoder": "fast-dllm-dual", "block": 8},
        {"decoder": "fast-dllm", "rule": "factor"},
        {"decoder": "tad", "rule": "hierarchy", "block": 16},
        {"decoder": "one-by-one", "score": "margin"},
        {"decoder": "llada", "steps": 16},
        {"decoder": "dream", "steps": 24, "score": "confidence"},
        {"decoder": "fast-dllm-prefix", "rule": "quota", "steps": 32},
        {"decoder": "fast-dllm", "temperature": 0.8},
        {"decoder": "one-by-one", "temperature": 0.8, "top_p": 0.9, "cache": "dual"},
        {"decoder": "tad", "suppress_ends": "confidence"},
    ],
    ids=lambda settings: ",".join(str(value) for value in settings.values()),
)
def test_parameters_mean_the_same(lm: LM, prompts: list[list[int]], settings: dict[str, Any]) -> None:
    some, seeds = prompts[4:8], [3, 1, 4, 1]
    plain = decode(lm, some, gen_length=32, seed=seeds, engine="plain", **{"block": 16, **settings})
    found = decode(
        lm,
        some,
        gen_length=32,
        seed=seeds,
        batch_size=2,
        engine=kept_engine(lm),
        **{"block": 16, **settings},
    )
    assert_same(found, plain)


@pytest.mark.parametrize("name", ["tad", "tad-cached", "fast-dllm-dual"])
def test_callbacks_report_what_the_loop_reports(lm: LM, prompts: list[list[int]], name: str) -> None:
    reports: list[list[Step]] = []
    for engine in ("plain", kept_engine(lm)):
        steps: list[Step] = []
        for prompt in prompts[4:6]:  # alone: the loop counts a batch's padding as fed, the engine feeds none
            decode(lm, [prompt], name, 64, stop="eager", on_step=steps.append, engine=engine)
        reports.append(steps)
    assert len(reports[0]) == len(reports[1])
    for one, other in zip(*reports, strict=True):
        sure = (one.confidence, other.confidence)
        assert {**asdict(one), "confidence": None} == {**asdict(other), "confidence": None}
        assert sure[0] == pytest.approx(sure[1], abs=1e-4)


@pytest.mark.parametrize("name", ["tad-cached", "d3llm-cached", "fast-dllm-dual"])
def test_rows_of_different_lengths_are_fed_the_same_by_both(
    lm: LM, prompts: list[list[int]], name: str
) -> None:
    told = []
    for engine in ("plain", kept_engine(lm)):
        steps: list[Step] = []
        decode(lm, prompts[2:7], name, 64, batch_size=3, on_step=steps.append, engine=engine)
        told.append({(step.row, step.forward): step.fed for step in steps})
    assert told[0] == told[1]


def test_callbacks_name_rows_by_their_place_among_the_prompts(lm: LM, prompts: list[list[int]]) -> None:
    revealed: dict[int, int] = {}

    def count(step: Step) -> None:
        revealed[step.row] = revealed.get(step.row, 0) + len(step.positions)

    rows = decode(lm, prompts, "tad", 32, batch_size=3, stop="off", on_step=count, engine=kept_engine(lm))
    assert revealed == dict.fromkeys(range(len(prompts)), 32)
    assert_same(rows, decode(lm, prompts, "tad", 32, stop="off", engine="plain"))


class NothingFromTheHost(TorchDispatchMode):
    """Refuses what a CUDA graph cannot record: reads by the host, tensors from it, sizes that depend on values."""

    FORBIDDEN = (
        "_local_scalar_dense",
        "lift_fresh",
        "nonzero",
        "masked_select",
        "_unique2",
        "is_nonzero",
        "equal",
        "repeat_interleave.Tensor",
        "isin",
    )

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function).removeprefix("aten.")
        assert not name.startswith(self.FORBIDDEN), f"{name} cannot be recorded"
        if name.startswith(("index.", "index_put")):
            assert all(index is None or index.dtype != torch.bool for index in args[1]), (
                "indexing by a mask reads it"
            )
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", list(DECODERS))
def test_a_step_asks_nothing_of_the_host(
    lm: LM, prompts: list[list[int]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Stepper.step

    def watched(self: Stepper, *sizes: Any) -> None:
        # Outside inference mode, where composite operations show what they are made of.
        with torch.inference_mode(False), torch.no_grad(), NothingFromTheHost():
            step(self, *sizes)

    monkeypatch.setattr(Stepper, "step", watched)
    decoder = get_decoder(name, lm.family.name, temperature=0.5 if name == "fast-dllm" else 0.0, block=16)
    decoder = decoder.prepared(32, lm.family.logit_shift)
    unguarded = Engine.decode.__wrapped__  # type: ignore[attr-defined]
    unguarded(Engine(lm.model), prompts[4:7], decoder, 32, lm.tokens, lm.family.logit_shift, [0] * 3, 2)


def test_the_host_reads_one_tensor_per_forward(lm: LM, prompts, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, events = kept_engine(lm), []
    for read in ("tolist", "item", "__bool__", "__int__", "__float__", "cpu", "numpy", "nonzero"):
        original = getattr(torch.Tensor, read)
        monkeypatch.setattr(
            torch.Tensor, read, lambda self, *a, _f=original, _n=read: events.append(_n) or _f(self, *a)
        )
    step = Stepper.step
    monkeypatch.setattr(Stepper, "step", lambda self, *a: events.append("step") or step(self, *a))
    monkeypatch.setattr(engine.recorder, "steps", type(engine.recorder.steps)())
    decode(lm, [prompts[0]] * 2, "tad-cached", 32, stop="off", engine=engine)
    while "step" in events:
        events = events[events.index("step") + 1 :]
        reads = events.index("step") if "step" in events else 1
        assert reads == 1


def test_buffers_stay_where_they_are(lm: LM, prompts: list[list[int]]) -> None:
    engine = Engine(lm.model, bucketed=True)
    decode(lm, prompts, "tad-cached", 32, batch_size=3, engine=engine)
    (stepper,) = engine.sets.values()
    places = [tensor.data_ptr() for tensor in stepper.slots.tensors()]
    decode(lm, prompts[::-1], "tad-cached", 32, batch_size=3, engine=engine)
    assert list(engine.sets.values()) == [stepper]
    assert [tensor.data_ptr() for tensor in stepper.slots.tensors()] == places


def test_what_earlier_rows_left_in_the_buffers_does_not_matter(lm: LM, prompts: list[list[int]]) -> None:
    engine = Engine(lm.model)
    wanted = decode(lm, prompts[5:6], "tad-cached", 32, engine=engine)
    with torch.inference_mode():
        for arena in engine.arenas.values():
            for tensor in (*arena.keys, *arena.values, *([] if arena.outputs is None else [arena.outputs])):
                tensor.fill_(37.0)
    assert_same(decode(lm, prompts[5:6], "tad-cached", 32, engine=engine), wanted)


def test_fifty_lengths_need_few_shapes(lm: LM) -> None:
    engine = Engine(lm.model, bucketed=True)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(8, 400, (50,), generator=generator).tolist()
    for length in lengths:
        decode(lm, [[5] * length], "tad-cached", 32, block=16, engine=engine)
    shapes = {(key[0].prompt, key[3]) for key in engine.recorder.steps}
    assert len({prompt for prompt, _ in shapes}) <= 6
    assert engine.recorder.made <= 30  # and 50 lengths would need 150 if each had its own


def test_two_hundred_generations_add_nothing() -> None:
    lm, prompts = tiny("dream"), tiny_prompts("dream")  # the family whose outputs are kept too
    engine = Engine(lm.model, bucketed=True)

    def generate(number: int) -> None:
        size = 1 + number % 3
        decode(lm, prompts[number % 5 : number % 5 + size], "tad-cached", 8, block=8, engine=engine)

    for number in range(15):
        generate(number)
    held = (engine.nbytes, len(engine.sets), engine.recorder.made)
    for number in range(15, 200):
        generate(number)
    assert (engine.nbytes, len(engine.sets), engine.recorder.made) == held


def test_recorded_steps_and_sets_beyond_the_limit_are_forgotten(
    lm: LM, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tad.decoding.engine.engine.MAX_SETS", 2)
    engine = Engine(lm.model)
    engine.recorder.limit = 3
    for threshold in (0.1, 0.2, 0.3, 0.4):
        for row in decode(lm, prompts[:2], "tad", 16, block=8, threshold=threshold, engine=engine):
            assert lm.tokens.mask not in row.tokens
    assert len(engine.sets) == 2
    assert len(engine.recorder.steps) <= 3


def test_auto_is_the_loop_without_cuda(lm: LM, prompts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "decode", lambda *_: pytest.fail("the engine ran"))
    decode(lm, prompts[:1], "tad", 16, block=8)


def test_the_engine_of_a_model_is_found_again_until_its_weights_move(lm: LM) -> None:
    model = copy.deepcopy(lm.model)
    engine = engine_for(model)
    assert engine_for(model) is engine
    with torch.no_grad():
        model.layers()[0].part(model.names.down).weight.mul_(2)
    assert engine_for(model) is engine
    model.layers()[0].part(model.names.down).weight.data = torch.zeros_like(
        model.layers()[0].part(model.names.down).weight
    )
    assert engine_for(model) is not engine


def test_what_the_engine_does_not_serve_is_refused_or_left_to_the_loop(lm: LM, prompts) -> None:
    for settings in ({"cfg": 1.0}, {"rule": "credit"}):
        decoder = get_decoder("fast-dllm", lm.family.name, **settings)
        assert why_not(lm.model, decoder)
        with pytest.raises(TadError, match="use engine='plain'"):
            decode(lm, prompts[:1], decoder, 32, engine="graph")
    with pytest.raises(TadError, match="engine is one of auto, plain, graph"):
        decode(lm, prompts[:1], "tad", 32, engine="fast")


def test_an_attached_adapter_must_be_merged_first() -> None:
    lm = copy.deepcopy(tiny("llada"))
    lm.attach(rank=2)
    assert "merge it first" in (why_not(lm.model, get_decoder("tad")) or "")


@pytest.mark.parametrize("family", FAMILIES)
def test_an_empty_list_of_prompts_gives_an_empty_list(family: str) -> None:
    assert decode(tiny(family), [], engine="graph") == []


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True], ids=["layers", "layers and decisions"])
def test_compiled_steps_give_the_tokens_of_the_loop_and_compile_once_for_all_sizes(
    lm: LM, prompts: list[list[int]], fused: bool
) -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    engine = Engine(lm.model, compiled=True, fused=fused)
    made = []
    for slots in (1, 3, 8):
        for gen_length, some in ((64, prompts), (64, prompts[::-1][:6])):
            plain = decode(lm, some, "tad-cached", gen_length, engine="plain")
            assert_same(decode(lm, some, "tad-cached", gen_length, batch_size=slots, engine=engine), plain)
        made.append(counters["stats"]["unique_graphs"])
    # One slot and several differ where decisions are compiled; nothing else does.
    assert made[2] == made[1]
    assert made[1] - made[0] <= (2 if fused else 0)


@pytest.fixture
def traced_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is compiled is traced and guarded as ever, but no code is made: that takes most of the time."""
    compiling = torch.compile

    def trace(function: Any, fullgraph: bool, dynamic: bool | None, mode: str | None) -> Any:
        return compiling(function, fullgraph=fullgraph, dynamic=dynamic, backend="eager")

    monkeypatch.setattr(torch, "compile", trace)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


RULES: list[tuple[int, str, list[dict[str, Any]]]] = [
    (1, "tad-cached", [{"threshold": value} for value in (0.5, 0.1, 0.2, 1.0)]),
    (3, "tad-cached", [{"threshold": value} for value in (0.5, 0.1, 0.2)]),
    (1, "fast-dllm", [{"threshold": value} for value in (0.9, 0.8, 0.5)]),
    (1, "fast-dllm", [{"rule": "factor", "factor": value} for value in (1.0, 0.7, 2.0)]),
    (1, "fast-dllm", [{"rule": "hierarchy", "threshold": value, "low": value / 2} for value in (0.9, 0.6)]),
]


@pytest.mark.usefixtures("traced_only")
@pytest.mark.parametrize(
    ("slots", "name", "settings"),
    RULES,
    ids=["entropy", "entropy, three rows", "confidence", "factor", "hierarchy"],
)
def test_what_was_compiled_for_one_threshold_and_prompt_serves_all_others(
    slots: int, name: str, settings: list[dict[str, Any]]
) -> None:
    from torch._dynamo.utils import counters

    lm, text = tiny("llada"), tiny_prompts("llada")[0]
    engine = Engine(lm.model, compiled=True, fused=True, bucketed=True)
    made = set()
    for one in settings:
        for length in (9, 70, 130):  # columns for 64, 96 and 192
            some = [(text * length)[row : row + length] for row in range(slots)]
            plain = decode(lm, some, name, 32, block=16, engine="plain", **one)
            assert_same(decode(lm, some, name, 32, block=16, engine=engine, **one), plain)
            made.add(counters["stats"]["unique_graphs"])
    assert len(made) == 1, f"compiled anew: {sorted(made)} graphs"


@pytest.mark.parametrize("vocab", [48, 50])
def test_no_positions_have_no_proposals(vocab: int) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    found = propose(torch.zeros(0, vocab), Sampling(), 3, (1,), none, none, none)
    assert [getattr(found, name).shape for name in _SCORES] == [(0,)] * len(_SCORES)


def test_sampled_scores_are_those_of_the_loop_where_scores_are_compiled(lm: LM) -> None:
    sampling = Sampling(temperature=0.7)
    decoder = replace(get_decoder("fast-dllm", lm.family.name), sampling=sampling).prepared(64, 0)
    score = _scorer(Method(decoder, lm.tokens, 0, 32, 64), compiled=True)
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    where = [torch.arange(low, low + 5) for low in (0, 7, 3)]
    wanted = propose(logits, sampling, lm.tokens.mask, lm.tokens.ends, *where)
    for found, name in zip(score(logits, *where), _SCORES, strict=True):
        torch.testing.assert_close(found, getattr(wanted, name))


def test_prompts_of_the_parity_set_have_many_lengths() -> None:
    """What the tests above stand on."""
    for family in FAMILIES:
        assert len({len(prompt) for prompt in tiny_prompts(family)}) >= 6

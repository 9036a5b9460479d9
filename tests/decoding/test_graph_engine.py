"""The graph engine against the plain forward: the same tokens, steps, forwards and callbacks, by steps that a graph can hold."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from parity_models import assert_same, tiny, tiny_prompts
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tad.decoding import Decoded, GraphEngine, Request, Scheduler, Step, decode, decoders_for, get_decoder
from tad.decoding.engine import engine_for, graph, network, why_not
from tad.decoding.engine.layout import Spans
from tad.decoding.scheduler import Batch
from tad.errors import TadError
from tad.models import LM, BlockLayout

FAMILIES = ("llada", "dream")
_KEPT: dict[str, GraphEngine] = {}


def kept_engine(lm: LM) -> GraphEngine:
    """One engine per family for all tests of this module: what earlier ones left behind must not matter."""
    return _KEPT.setdefault(lm.source, GraphEngine(lm.model))


@pytest.mark.parametrize("name", decoders_for(None))
def test_every_named_decoder_gives_the_tokens_of_the_plain_forward(
    lm: LM, prompts: list[list[int]], name: str
) -> None:
    some = prompts[2:7]  # of five lengths
    plain = decode(lm, some, name, gen_length=64, engine="plain")
    for slots in (1, 3):
        assert_same(decode(lm, some, name, 64, batch_size=slots, engine=kept_engine(lm)), plain)


BLOCK_DIFFUSION = pytest.mark.parametrize("folder", ["fastdllm_v2", "sdar"])


@pytest.mark.parametrize(
    "settings",
    [
        {"decoder": "fast-dllm-v2", "block": 32},
        {"decoder": "fast-dllm-v2", "block": 32, "cache": "sub-block", "threshold": 0.7},
        {"decoder": "sdar", "temperature": 0.7},
        {"decoder": "sdar", "threshold": None, "steps": 2, "stop": "off"},
        {"decoder": "sdar", "threshold": None, "leftmost": True, "stop": "end"},
        {"decoder": "sdar", "rule": "entropy-bound", "cache": "none"},
        {"decoder": "llada2"},
        {"decoder": "llada2.1", "threshold": 0.5, "edit_threshold": 0.3},
        {"decoder": "sdar", "rule": "entropy", "store": False},
    ],
    ids=lambda settings: ",".join(str(value) for value in settings.values()),
)
@BLOCK_DIFFUSION
def test_block_diffusion_models_decode_as_by_the_plain_forward(folder: str, settings: dict[str, Any]) -> None:
    """Prompts of several lengths modulo the block; decoders of the family, of the others, and TAD's rule."""
    lm, some, seeds = tiny(folder), tiny_prompts(folder)[:4], [3, 1, 4, 1]
    plain = decode(lm, some, gen_length=64, seed=seeds, engine="plain", **settings)
    for slots in (1, 3):
        found = decode(
            lm, some, gen_length=64, seed=seeds, batch_size=slots, engine=kept_engine(lm), **settings
        )
        assert_same(found, plain)


@pytest.mark.parametrize("name", ["tad-cached", "d2f"])
def test_other_models_made_block_causal_decode_as_by_the_plain_forward(name: str) -> None:
    lm, some = copy.deepcopy(tiny("dream")), tiny_prompts("dream")[3:7]
    lm.model.shape = replace(lm.model.shape, blocks=BlockLayout(8, "answer"))
    plain = decode(lm, some, name, 32, block=16, engine="plain")
    engine = GraphEngine(lm.model)
    for slots in (1, 3):
        assert_same(decode(lm, some, name, 32, block=16, batch_size=slots, engine=engine), plain)


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
        {"decoder": "tad", "rule": "contiguous-prefix", "threshold": 2.0},
        {"decoder": "tad-cached", "keep": "leftmost"},
        {"decoder": "d2f", "block_add": 1, "rule": "entropy"},
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


@pytest.mark.parametrize("name", ["tad", "tad-cached", "d3llm-cached", "fast-dllm-dual"])
def test_callbacks_report_what_the_plain_forward_reports(lm: LM, prompts: list[list[int]], name: str) -> None:
    reports: list[dict[tuple[int, int], Step]] = []
    for engine in ("plain", kept_engine(lm)):
        steps: list[Step] = []
        decode(lm, prompts[2:7], name, 64, batch_size=3, on_step=steps.append, engine=engine)
        reports.append({(step.row, step.forward): step for step in steps})
    assert reports[0].keys() == reports[1].keys()
    for key, one in reports[0].items():
        other = reports[1][key]
        assert {**asdict(one), "confidence": None} == {**asdict(other), "confidence": None}
        assert one.confidence == pytest.approx(other.confidence, abs=1e-4)


class NothingFromTheHost(TorchDispatchMode):
    """Refuses what a CUDA graph cannot capture: reads by the host, tensors from it, sizes that depend on values."""

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
        assert not name.startswith(self.FORBIDDEN), f"{name} cannot be captured"
        if name.startswith(("index.", "index_put")):
            assert all(index is None or index.dtype != torch.bool for index in args[1]), (
                "indexing by a mask reads it"
            )
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("family", "name"),
    [(family, name) for family in FAMILIES for name in decoders_for(None)]
    + [("fastdllm_v2", "fast-dllm-v2"), ("sdar", "sdar"), ("sdar", "llada2"), ("sdar", "llada2.1")],
)
def test_a_step_asks_nothing_of_the_host(family: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lm, prompts = tiny(family), tiny_prompts(family)
    step = graph.step

    def watched(*arguments: Any) -> None:
        # Outside inference mode, where composite operations show what they are made of.
        with torch.inference_mode(False), torch.no_grad(), NothingFromTheHost():
            step(*arguments)

    monkeypatch.setattr(graph, "step", watched)
    settings = {"temperature": 0.5 if name == "fast-dllm" else 0.0, "block": 16}
    for function in (Batch.admit, Batch.step):
        monkeypatch.setattr(Batch, function.__name__, function.__wrapped__)
    for function in (GraphEngine.acquire, GraphEngine.release):
        monkeypatch.setattr(GraphEngine, function.__name__, function.__wrapped__)
    decode(lm, prompts[-4:-1], name, 32, batch_size=2, engine=GraphEngine(lm.model), **settings)


def test_the_host_reads_one_tensor_per_forward(lm: LM, prompts, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, events = kept_engine(lm), []
    for read in ("tolist", "item", "__bool__", "__int__", "__float__", "cpu", "numpy", "nonzero"):
        original = getattr(torch.Tensor, read)
        monkeypatch.setattr(
            torch.Tensor, read, lambda self, *a, _f=original, _n=read: events.append(_n) or _f(self, *a)
        )
    step = graph.step
    monkeypatch.setattr(graph, "step", lambda *a: events.append("step") or step(*a))
    engine.graphs.drop(lambda _: True)
    decode(lm, [prompts[0]] * 2, "tad-cached", 32, stop="off", engine=engine)
    while "step" in events:
        events = events[events.index("step") + 1 :]
        reads = events.index("step") if "step" in events else 1
        assert reads == 1


def test_buffers_stay_where_they_are(lm: LM, prompts: list[list[int]]) -> None:
    engine = GraphEngine(lm.model)
    decode(lm, prompts, "tad-cached", 32, batch_size=3, engine=engine)
    (forward,) = engine.forwards.values()
    places = [tensor.data_ptr() for tensor in forward.state.tensors()]
    decode(lm, prompts[::-1], "tad-cached", 32, batch_size=3, engine=engine)
    assert list(engine.forwards.values()) == [forward]
    assert [tensor.data_ptr() for tensor in forward.state.tensors()] == places


def test_what_earlier_rows_left_in_the_buffers_does_not_matter(lm: LM, prompts: list[list[int]]) -> None:
    engine = GraphEngine(lm.model)
    wanted = decode(lm, prompts[5:6], "tad-cached", 32, engine=engine)
    with torch.inference_mode():
        for tensor in (tensor for pool in engine.pools[True] for tensor in pool.tensors()):
            tensor.fill_(37.0)
    assert_same(decode(lm, prompts[5:6], "tad-cached", 32, engine=engine), wanted)


def test_fifty_lengths_need_few_shapes(lm: LM) -> None:
    engine = GraphEngine(lm.model)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(8, 400, (50,), generator=generator).tolist()
    for length in lengths:
        decode(lm, [[5] * length], "tad-cached", 32, block=16, engine=engine)
    assert len({spec.prompt_len for spec, _, _ in engine.forwards}) <= 6
    assert engine.graphs.made <= 30  # and 50 lengths would need 150 if each had its own


def test_further_generations_add_nothing() -> None:
    lm, prompts = tiny("dream"), tiny_prompts("dream")  # the family whose outputs are kept too
    engine = GraphEngine(lm.model)

    def generate(number: int) -> None:
        size = 1 + number % 3
        decode(lm, prompts[number % 5 : number % 5 + size], "tad-cached", 8, block=8, engine=engine)

    for number in range(15):
        generate(number)
    held = (engine.nbytes, len(engine.forwards), engine.graphs.made)
    for number in range(15, 75):
        generate(number)
    assert (engine.nbytes, len(engine.forwards), engine.graphs.made) == held


def test_graphs_and_forwards_beyond_the_limit_are_dropped(
    lm: LM, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tad.decoding.engine.graph.MAX_FORWARDS", 2)
    engine = GraphEngine(lm.model)
    engine.graphs.limit = 3
    for threshold in (0.1, 0.2, 0.3, 0.4):
        for row in decode(lm, prompts[:2], "tad", 16, block=8, threshold=threshold, engine=engine):
            assert lm.tokens.mask not in row.tokens
    assert len(engine.forwards) == 2
    assert len(engine.graphs.graphs) <= 3


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


@pytest.mark.parametrize(
    ("variable", "argument", "used"),
    [
        (None, None, False),
        ("graph", None, True),
        ("graph", "plain", False),
        (None, "graph", True),
        ("auto", None, False),
    ],
)
def test_the_argument_goes_before_the_environment(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, argument: str | None, used: bool
) -> None:
    monkeypatch.delenv("TAD_ENGINE", raising=False)
    if variable is not None:
        monkeypatch.setenv("TAD_ENGINE", variable)
    calls, inner = [], GraphEngine.acquire
    monkeypatch.setattr(GraphEngine, "acquire", lambda *given: calls.append(1) or inner(*given))
    assert len(decode(tiny("llada"), tiny_prompts("llada")[:2], "tad", 32, engine=argument)) == 2
    assert bool(calls) is used
    monkeypatch.setenv("TAD_ENGINE", "steam")
    with pytest.raises(TadError, match="'steam'"):
        decode(tiny("llada"), tiny_prompts("llada")[:1], "tad", 32)


def test_what_the_graph_engine_does_not_serve_is_refused_by_name(lm: LM, prompts) -> None:
    for settings in ({"cfg": 1.0}, {"rule": "credit"}):
        decoder = get_decoder("fast-dllm", lm.family.name, **settings)
        assert why_not(lm.model, decoder)
        with pytest.raises(TadError, match="use engine='plain'"):
            decode(lm, prompts[:1], decoder, 32, engine="graph")
    experts = why_not(tiny("llada2").model, get_decoder("llada2", "llada2"))
    assert experts is not None
    assert "experts" in experts
    adapted = copy.deepcopy(lm)
    adapted.attach(rank=2)
    assert "merge it first" in (why_not(adapted.model, get_decoder("tad")) or "")
    with pytest.raises(TadError, match="engine is one of auto, plain, graph"):
        decode(lm, prompts[:1], "tad", 32, engine="fast")


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llada", "tad"),
        ("dream", "tad-cached"),
        ("dream", "fast-dllm-dual"),
        ("llada", "d2f"),
        ("fastdllm_v2", "fast-dllm-v2"),
        ("sdar", "sdar"),
    ],
)
def test_own_attention_is_told_the_run_of_positions_that_each_query_sees(
    family: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With rows alone and side by side: it serves every forward then, but those of several rows that see everything."""
    lm, some, calls = tiny(family), tiny_prompts(family)[:4], []

    def attend(query: Tensor, keys: Tensor, values: Tensor, spans: Spans, width: int, *rest: Any) -> Tensor:
        room, dtype = rest
        calls.append(len(query))
        out = torch.full((len(query), query[0].numel()), float("nan"), dtype=dtype)
        for slot, (first, count, start) in enumerate(
            zip(*(part.tolist() for part in spans[:3]), strict=True)
        ):
            assert count <= width
            for at in range(first, first + count):
                low, high = slot * room + start, slot * room + int(spans.end[at])
                assert slot * room <= low < high < (slot + 1) * room
                asked, *seen = (
                    part.transpose(0, 1)[None]
                    for part in (query[at : at + 1], keys[low:high], values[low:high])
                )
                found = F.scaled_dot_product_attention(asked, *seen, enable_gqa=True)
                out[at] = found[0].transpose(0, 1).flatten()
        return out

    monkeypatch.setattr(network, "_attend_spans", attend)
    plain = decode(lm, some, name, 32, block=16, engine="plain")
    for slots in (1, 3):
        engine = GraphEngine(lm.model)
        engine.network.attends_few = True
        assert_same(decode(lm, some, name, 32, block=16, batch_size=slots, engine=engine), plain)
    assert calls
    calls.clear()
    decode(lm, [(some[3] * 64)[:64]] * 2, "one-by-one", 32, block=32, stop="off", engine=engine)
    assert bool(calls) == (lm.model.shape.blocks is not None)


@pytest.mark.parametrize(
    ("family", "name", "unit"),
    [
        ("llada", "tad-cached", 16),
        ("dream", "tad-cached", 16),
        ("fastdllm_v2", "sdar", 11),
        ("sdar", "sdar", 11),
    ],
)
def test_rows_that_join_late_leave_early_and_have_other_lengths_decode_as_alone(
    family: str, name: str, unit: int
) -> None:
    lm, prompts = tiny(family), tiny_prompts(family)
    engine = kept_engine(lm)
    decoder = get_decoder(name, lm.family.name, block=8).bind(lm, 16)
    scheduler = Scheduler(lm, engine)
    requests = [
        Request(row, prompt, unit * (1 + row % 3), decoder, seed=row)
        for row, prompt in enumerate(prompts[:6])
    ]
    done: dict[int, Decoded] = {}
    for request in requests:  # grows from one slot to more, with rows on their way
        scheduler.admit([request])
        done |= scheduler.step()
    assert len(scheduler.batches) == 1
    gone = next(iter(set(range(len(requests))) - set(done)))
    scheduler.drop([gone])
    while len(scheduler):
        done |= scheduler.step()
    for request in requests:
        if request.name != gone:
            alone = decode(lm, [request.prompt], decoder, request.length, engine="plain")
            assert_same([done[request.name]], alone)
    assert not engine._in_use


def test_batches_that_take_turns_do_not_share_keys(lm: LM, prompts: list[list[int]]) -> None:
    engine = kept_engine(lm)
    scheduler, requests = Scheduler(lm, engine), []
    for name, decoder in enumerate(("tad-cached", "fast-dllm-dual", "d3llm-cached", "tad-cached")):
        prepared = get_decoder(decoder, lm.family.name, block=8).bind(lm, 32)
        requests.append(Request(name, prompts[name], 32, prepared))
    scheduler.admit(requests)
    assert len(scheduler.batches) == 3
    done: dict[int, Decoded] = {}
    while len(scheduler):
        done |= scheduler.step()
    for request in requests:
        assert_same([done[request.name]], decode(lm, [request.prompt], request.decoder, 32, engine="plain"))


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_and_its_base_have_weights_of_their_own(family: str) -> None:
    lm, prompts = copy.deepcopy(tiny(family)), tiny_prompts(family)[:3]
    lm.attach(rank=2)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in lm.model.named_parameters():
            if "lora_B" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator))
    decoder = get_decoder("tad-cached", family, block=8).bind(lm, 32)

    def answers(engine: Any, adapter: bool) -> list[Decoded]:
        scheduler = Scheduler(lm, engine, slots=2, merges=True)
        requests = [Request(n, prompt, 32, decoder, adapter=adapter) for n, prompt in enumerate(prompts)]
        found = scheduler.run(requests)
        return [found[number] for number in range(len(prompts))]

    found = {adapter: answers("graph", adapter) for adapter in (True, False)}
    for adapter, rows in found.items():
        assert_same(rows, answers("plain", adapter))
    assert [row.tokens for row in found[True]] != [row.tokens for row in found[False]]
    with torch.no_grad():  # training goes on: a merged copy would be stale
        for name, weight in lm.model.named_parameters():
            if "lora_B" in name:
                weight.mul_(-1)
    assert_same(answers("graph", True), answers("plain", True))


def test_keys_that_are_not_numbers_do_not_reach_the_next_rows(prompts: list[list[int]]) -> None:
    lm = copy.deepcopy(tiny("llada"))
    engine, weight = (
        GraphEngine(lm.model),
        lm.model.layers()[0].part(lm.model.names.key).weight,
    )
    before = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
    with pytest.raises(TadError, match="nan"):
        decode(lm, prompts[6:8], "tad-cached", 32, engine=engine)
    with torch.no_grad():
        weight.copy_(before)
    plain = decode(lm, prompts[:2], "tad-cached", 32, engine="plain")
    assert_same(decode(lm, prompts[:2], "tad-cached", 32, engine=engine), plain)

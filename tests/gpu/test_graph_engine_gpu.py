"""The graph engine on a GPU, compiled and captured: the tokens of the plain forward in fp32, few graphs, no growth, rows that
join, adapters, small weights, our kernels in whole decodes."""

from __future__ import annotations

import copy
import gc
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "decoding"))
from parity_models import tiny, tiny_prompts

from tad.decoding import Decoded, GraphEngine, Request, Scheduler, decode, decoders_for, get_decoder
from tad.decoding.engine import autotune, engine_for, gemm, network, why_not
from tad.models import LM
from tad.models.quantize import Kind, quantize
from tad.trajectories.rollout import RolloutConfig, roll_out

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FAMILIES = ("llada", "dream")
BLOCK_DECODERS = [
    ("fastdllm_v2", "fast-dllm-v2"),
    ("sdar", "sdar"),
    ("sdar", "llada2"),
    ("sdar", "llada2.1"),
]


@cache
def on_gpu(family: str, dtype: torch.dtype = torch.float32) -> LM:
    lm = copy.deepcopy(tiny(family))
    lm.model.to("cuda", dtype)
    return lm


@cache
def kept_engine(family: str, fused: bool = False) -> GraphEngine:
    """One for all tests: what earlier ones recorded and left in the buffers must not matter. Compiled decisions are the
    default of engines and not of these tests, since that takes seconds for each decoder."""
    engine = GraphEngine(on_gpu(family).model)
    engine.fused = fused
    return engine


def first_difference(found: list[Decoded], wanted: list[Decoded]) -> str | None:
    """Where two results part, in words; None where they are the same."""
    for row, (one, other) in enumerate(zip(found, wanted, strict=True)):
        if (one.tokens, one.steps, one.forwards) == (other.tokens, other.steps, other.forwards):
            continue
        pairs = zip(
            zip(one.tokens, one.steps, strict=True), zip(other.tokens, other.steps, strict=True), strict=True
        )
        for place, (a, b) in enumerate(pairs):
            if a != b:
                sure = (one.confidence[place], other.confidence[place])
                return f"row {row}, position {place}: token and step {a}, not {b}; confidence {sure}"
        return f"row {row}: {one.forwards} forwards, not {other.forwards}"
    return None


def share_of_same_tokens(found: list[Decoded], wanted: list[Decoded]) -> float:
    pairs = [
        a == b
        for one, other in zip(found, wanted, strict=True)
        for a, b in zip(one.tokens, other.tokens, strict=True)
    ]
    return sum(pairs) / len(pairs)


@pytest.mark.parametrize("fused", [False, True], ids=["apart", "fused"])
@pytest.mark.parametrize(
    ("family", "name"),
    [(family, name) for name in decoders_for(None) for family in FAMILIES] + BLOCK_DECODERS,
)
def test_every_decoder_it_serves_gives_the_tokens_of_the_plain_forward(
    family: str, name: str, fused: bool
) -> None:
    lm, prompts = on_gpu(family), tiny_prompts(family)[-5:]  # of five lengths
    if why_not(lm.model, get_decoder(name, lm.family.name)) is not None:
        pytest.skip("left to the plain forward")
    engine = kept_engine(family, fused)
    assert engine.compiled
    assert engine.graphs.capture
    plain = decode(lm, prompts, name, 64, engine="plain")
    for slots in (1, 3, 5):
        found = decode(lm, prompts, name, 64, batch_size=slots, engine=engine)
        assert first_difference(found, plain) is None, f"{slots} slots"
        for one, other in zip(found, plain, strict=True):
            assert one.confidence == pytest.approx(other.confidence, abs=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_replayed_decode_captures_nothing_and_gives_the_same(family: str) -> None:
    lm, prompts, engine = on_gpu(family), tiny_prompts(family)[:5], kept_engine(family)
    first = decode(lm, prompts, "tad-cached", 64, batch_size=2, engine=engine)
    decode(lm, prompts, "tad-cached", 64, batch_size=2, engine=engine)  # what came once is captured
    made = engine.graphs.made
    again = decode(lm, prompts, "tad-cached", 64, batch_size=2, engine=engine)
    assert engine.graphs.made == made
    assert first_difference(again, first) is None


def test_the_gpu_decodes_as_the_cpu_does() -> None:
    prompts = tiny_prompts("llada")[:4]
    wanted = decode(tiny("llada"), prompts, "tad", 64, engine="plain")
    assert first_difference(decode(on_gpu("llada"), prompts, "tad", 64, engine="graph"), wanted) is None


def test_larger_buffers_void_what_was_captured_on_smaller_ones() -> None:
    """The last graph of a pool goes with them, and the pool; recording goes on."""
    lm, prompts = on_gpu("dream"), tiny_prompts("dream")[:6]
    engine = GraphEngine(lm.model)
    for some in (prompts[:1], prompts * 3, prompts[:1]):
        plain = decode(lm, some, "tad-cached", 64, engine="plain")
        assert first_difference(decode(lm, some, "tad-cached", 64, engine=engine), plain) is None


def test_fifty_prompt_lengths_need_few_graphs() -> None:
    lm = on_gpu("llada")
    engine = GraphEngine(lm.model)
    lengths = torch.randint(8, 400, (50,), generator=torch.Generator().manual_seed(0)).tolist()
    for length in lengths:
        decode(lm, [[5] * length], "tad-cached", 32, block=16, engine=engine)
    assert engine.graphs.made <= 30
    assert sum(graph is not None for graph in engine.graphs.graphs.values()) == engine.graphs.made


def test_two_hundred_generations_add_no_memory() -> None:
    lm, prompts = on_gpu("dream"), tiny_prompts("dream")
    engine = GraphEngine(lm.model)

    def generate(number: int) -> None:
        size = 1 + number % 3
        decode(lm, prompts[number % 5 : number % 5 + size], "tad-cached", 16, block=8, engine=engine)

    def held() -> tuple[int, int, int]:
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(), engine.nbytes, engine.graphs.made

    for number in range(30):
        generate(number)
    before = held()
    for number in range(30, 200):
        generate(number)
    assert held() == before


def test_replaced_weights_get_a_new_engine() -> None:
    lm = copy.deepcopy(on_gpu("llada"))
    prompts = tiny_prompts("llada")[:2]
    decode(lm, prompts, "tad", 32, engine="graph")
    engine = engine_for(lm.model)
    weight = lm.model.layers()[0].part(lm.model.names.down).weight
    weight.data = torch.zeros_like(weight)
    found = decode(lm, prompts, "tad", 32, engine="graph")
    assert engine_for(lm.model) is not engine
    assert first_difference(found, decode(lm, prompts, "tad", 32, engine="plain")) is None


def test_sampled_tokens_are_those_of_the_plain_forward() -> None:
    lm, prompts = on_gpu("llada"), tiny_prompts("llada")[:3]
    settings = {"temperature": 0.7, "gen_length": 32, "seed": [3, 1, 4]}
    plain = decode(lm, prompts, "fast-dllm", engine="plain", **settings)
    found = decode(lm, prompts, "fast-dllm", engine=kept_engine("llada"), batch_size=2, **settings)
    assert first_difference(found, plain) is None


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_small_weights_decode_nearly_as_the_plain_forward_decodes_them(kind: Kind) -> None:
    if kind == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no fp8 units")
    lm = copy.deepcopy(on_gpu("llada", torch.bfloat16))
    quantize(lm.model, kind)
    prompts = tiny_prompts("llada")[2:7]
    plain = decode(lm, prompts, "tad-cached", 64, engine="plain")
    for slots in (1, 3):
        found = decode(lm, prompts, "tad-cached", 64, batch_size=slots, engine=engine_for(lm.model))
        assert share_of_same_tokens(found, plain) > 0.8  # all of them round where they please


def count_calls(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str) -> list[int]:
    """Grows with every call of a module's function."""
    inner, calls = getattr(module, name), []

    def counting(*given: object) -> object:
        calls.append(1)
        return inner(*given)

    monkeypatch.setattr(module, name, counting)
    return calls


@pytest.mark.parametrize("slots", [1, 3])
def test_other_thresholds_and_prompts_compile_and_bring_nothing_new(slots: int) -> None:
    """A threshold that the host handed in at each step would be asked for while a step is recorded."""
    from torch._dynamo.utils import counters

    lm, text = on_gpu("llada"), tiny_prompts("llada")[0]
    engine, made = GraphEngine(lm.model), set()
    assert engine.fused
    for threshold in (0.5, 0.1, 0.9):
        for length in (9, 70, 130):
            some = [(text * length)[row : row + length] for row in range(slots)]
            plain = decode(lm, some, "tad-cached", 64, threshold=threshold, engine="plain")
            found = decode(lm, some, "tad-cached", 64, threshold=threshold, engine=engine)
            assert first_difference(found, plain) is None
            made.add(counters["stats"]["unique_graphs"])
    assert max(made) - min(made) <= 1  # a size that is the whole length may be a case of its own


@pytest.mark.parametrize("kind", ["fp8", "int8", None])
@pytest.mark.parametrize("family", FAMILIES)
def test_split_k_gemms_give_nearly_the_tokens_of_the_plain_forward(
    family: str, kind: Kind | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm, prompts = copy.deepcopy(on_gpu(family, torch.bfloat16)), tiny_prompts(family)[2:7]
    plain = decode(lm, prompts, "tad-cached", 64, refresh=16, engine="plain")
    if kind is None:
        monkeypatch.setattr(autotune, "tuned_split", lambda *_: 2)  # the library's are faster at this size
    else:
        quantize(lm.model, kind)
    engine = GraphEngine(lm.model)
    assert engine.network.few_row_ops is not None
    counted = count_calls(monkeypatch, gemm, "gemm_partials")
    for slots in (1, 3):
        found = decode(lm, prompts, "tad-cached", 64, refresh=16, batch_size=slots, engine=engine)
        assert share_of_same_tokens(found, plain) > 0.6
    assert counted


@pytest.mark.parametrize(
    ("family", "name"), [("dream", "tad-cached"), ("fastdllm_v2", "fast-dllm-v2"), ("sdar", "sdar")]
)
def test_our_attention_gives_nearly_the_tokens_of_the_plain_forward(
    family: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm, prompts = on_gpu(family, torch.bfloat16), tiny_prompts(family)[-5:]
    engine = GraphEngine(lm.model, compiled=False)
    assert engine.network.attends_few
    calls = count_calls(monkeypatch, network, "_attend_spans")
    plain = decode(lm, prompts, name, 64, engine="plain")
    for slots in (1, 3):
        found = decode(lm, prompts, name, 64, batch_size=slots, engine=engine)
        assert share_of_same_tokens(found, plain) > 0.8
    assert calls


@pytest.mark.parametrize(
    ("family", "name"),
    [(family, name) for name in ("tad", "tad-cached", "fast-dllm-dual", "d2f") for family in FAMILIES]
    + [("fastdllm_v2", "fast-dllm-v2"), ("sdar", "sdar")],
)
def test_rows_that_join_running_batches_decode_as_alone(family: str, name: str) -> None:
    lm, prompts = on_gpu(family), tiny_prompts(family)
    scheduler = Scheduler(lm, kept_engine(family))
    decoder = get_decoder(name, lm.family.name, block=16).bind(lm, 32)
    requests = [
        Request(row, prompt, 32 * (1 + row % 2), decoder, seed=row) for row, prompt in enumerate(prompts)
    ]
    done: dict[int, Decoded] = {}
    for request in requests:
        scheduler.admit([request])  # one slot, then four, then eight
        done |= scheduler.step()
        done |= scheduler.step()
    while len(scheduler):
        done |= scheduler.step()
    for request in requests:
        alone = decode(lm, [request.prompt], decoder, request.length, engine="plain")
        assert first_difference([done[request.name]], alone) is None, f"row {request.name}"


def test_rows_that_begin_alike_share_keys_and_decode_as_alone() -> None:
    lm, texts = on_gpu("sdar"), tiny_prompts("sdar")
    scheduler, computed = Scheduler(lm, kept_engine("sdar")), []
    scheduler.on_step = lambda step: computed.append((step.row, step.forward, step.queries))
    decoder = get_decoder("sdar", "sdar", block=8)
    prompts = [(texts[3] * 5)[:96] + tail for tail in (texts[0], texts[1], texts[2])]
    for row, prompt in enumerate(prompts):  # one after the other: slots remember
        scheduler.admit([Request(row, prompt, 24, decoder)])
        done = {}
        while len(scheduler):
            done |= scheduler.step()
        alone = decode(lm, [prompt], decoder, 24, engine="plain")
        assert first_difference([done[row]], alone) is None
    first = [queries for _, forward, queries in computed if forward == 1]
    assert first[0] > 90
    assert max(first[1:]) < 60


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_and_its_base_take_turns(family: str) -> None:
    lm, prompts = copy.deepcopy(on_gpu(family)), tiny_prompts(family)[:4]
    lm.attach(rank=2)
    with torch.no_grad():
        for name, weight in lm.model.named_parameters():
            if "lora_B" in name:
                weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    decoder = get_decoder("tad-cached", family, block=16).bind(lm, 32)
    answers = []
    for engine in ("graph", "plain"):
        scheduler = Scheduler(lm, engine, slots=4, merges=True)
        found = scheduler.run(
            [Request(row, prompt, 32, decoder, adapter=row % 2 == 0) for row, prompt in enumerate(prompts)]
        )
        answers.append([found[row] for row in range(4)])
    assert first_difference(*answers) is None


@pytest.mark.parametrize("order", ["random", "left-to-right"])
def test_rollouts_in_other_orders_are_those_of_the_plain_forward(order: str) -> None:
    lm, prompts = on_gpu("llada"), tiny_prompts("llada")[:5]
    for floor in (0.0, 0.5):
        config = RolloutConfig(order=order, block=16, floor=floor, temperature=0.7)
        ways = [
            roll_out(lm, prompts, prompts, 32, config, range(5), engine=engine)
            for engine in (kept_engine("llada"), "plain")
        ]
        for one, other in zip(*ways, strict=True):
            assert (one.tokens, one.reveal) == (other.tokens, other.reveal)

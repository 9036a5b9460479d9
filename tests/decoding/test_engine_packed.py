"""Attention over packed rows: what the engine tells the kernel, checked with the kernel's definition in its place."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from parity_models import tiny, tiny_prompts
from torch import Tensor

from tad.decoding import Decoded, decode
from tad.decoding.engine import Engine
from tad.decoding.engine import network as network_module
from tad.decoding.engine.capture import Recorder
from tad.models import LM


def attend_by_definition(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    bounds: Tensor,
    key_start: Tensor,
    key_count: Tensor,
    width: int,
    columns: int,
) -> Tensor:
    """Row by row. What no row asks for is left undefined, as the kernel leaves it."""
    assert all(part.dtype == torch.int32 for part in (bounds, key_start, key_count))
    out = torch.full((len(query), query.shape[1] * query.shape[2]), float("nan"))
    for row in range(len(key_count)):
        low, high = int(bounds[row]), int(bounds[row + 1])
        start, count = int(key_start[row]), int(key_count[row])
        assert high - low <= width
        assert start + count <= int(key_start[row + 1])
        assert count <= columns
        asked = query[low:high].transpose(0, 1)[None]
        seen = (part[start : start + count].transpose(0, 1)[None] for part in (keys, values))
        found = F.scaled_dot_product_attention(asked, *seen, enable_gqa=True)
        out[low:high] = found[0].transpose(0, 1).flatten(1)
    return out


def same(found: list[Decoded], wanted: list[Decoded]) -> bool:
    return [(row.tokens, row.steps) for row in found] == [(row.tokens, row.steps) for row in wanted]


@pytest.mark.parametrize("name", ["tad", "tad-cached", "fast-dllm-dual", "fast-dllm-prefix", "d2f", "dream"])
@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("bucketed", [True, False])
def test_packed_rows_give_the_tokens_of_the_loop(
    lm: LM,
    prompts: list[list[int]],
    name: str,
    slots: int,
    bucketed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(network_module, "attend_packed", attend_by_definition)
    engine = Engine(lm.model, packed=True, bucketed=bucketed)
    engine.network.attends_few = True  # as on a GPU: it must not be asked, since it sees the padding

    def attend_few(*_: Any) -> Tensor:
        raise AssertionError("packed rows have their own attention")

    monkeypatch.setattr(network_module, "_attend_few", attend_few)
    some = prompts[3:7]
    plain = decode(lm, some, name, 32, block=16, engine="plain")
    assert same(decode(lm, some, name, 32, block=16, batch_size=slots, engine=engine), plain)


@pytest.mark.parametrize("name", ["tad", "tad-cached", "fast-dllm-dual"])
@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("bucketed", [True, False])
def test_own_attention_serves_single_rows_that_fill_their_columns(
    lm: LM,
    prompts: list[list[int]],
    name: str,
    slots: int,
    bucketed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []

    def attend_few(query: Tensor, keys: Tensor, values: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
        calls.append(len(query))
        asked, *seen = (part.transpose(0, 1)[None] for part in (query, keys[:columns], values[:columns]))
        out = F.scaled_dot_product_attention(asked, *seen, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1).to(dtype)

    monkeypatch.setattr(network_module, "_attend_few", attend_few)
    engine = Engine(lm.model, bucketed=bucketed)
    engine.network.attends_few = True
    some = [*prompts[3:7], (prompts[3] * 64)[:64]]
    plain = [decode(lm, [prompt], name, 32, block=16, engine="plain")[0] for prompt in some]
    if slots == 1:
        found = [decode(lm, [prompt], name, 32, block=16, engine=engine)[0] for prompt in some]
        assert calls
    else:
        found = decode(lm, some, name, 32, block=16, batch_size=slots, engine=engine)
        assert not calls
    assert same(found, plain)
    assert all(count <= network_module.MOST_QUERIES for count in calls)


def test_sums_of_the_residual_are_rounded_once() -> None:
    """The compiled layers add in fp32 and round; in bf16 that is what adding in bf16 gives."""
    lm = copy.deepcopy(tiny("llada"))
    lm.model.bfloat16()
    prompts = tiny_prompts("llada")
    plain = decode(lm, prompts[:2], "one-by-one", 32, block=16, engine="plain")
    found = decode(lm, prompts[:2], "one-by-one", 32, block=16, engine=Engine(lm.model))
    agreeing = [a == b for one, other in zip(found, plain, strict=True) for a, b in zip(one.tokens, other.tokens, strict=True)]  # fmt: skip
    assert sum(agreeing) / len(agreeing) > 0.9


def test_a_pool_is_not_taken_up_again_after_its_last_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    handles = iter(range(10))
    pools: list[Any] = []

    class Graph:
        def replay(self) -> None:
            pass

    class Capture:
        def __init__(self, graph: Graph, pool: Any, capture_error_mode: str) -> None:
            pools.append(pool)

        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", Capture)
    recorder = Recorder(capture=True, limit=4)
    for key in "ab":
        recorder.run(key, lambda: None)
    recorder.forget(lambda key: key == "a")
    recorder.run("c", lambda: None)
    recorder.forget(lambda key: True)
    recorder.run("d", lambda: None)
    assert pools == [0, 0, 0, 1]

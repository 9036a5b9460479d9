"""bench/lossless.py: every setting gives the autoregressive text, and what is counted adds up."""

from __future__ import annotations

from pathlib import Path

from tests.tiny_autoregressive import write_autoregressive

import lossless as bench
import tad


def test_settings_are_measured_on_the_same_prompts_and_held_to_autoregressive(tmp_path: Path) -> None:
    folder = write_autoregressive(tmp_path / "model", "llama", 2, 6)
    lm = tad.load(folder, device="cpu")
    settings = [{"draft": 4, "ends": 0}, {"draft": 4, "ends": 2}]
    lookup = bench.prompt_lookup(folder, lm.tokens.ends, 4)
    found = bench.measure(lm, [[1, 2, 3, 1, 2, 3], [9, 9, 9], [4, 7]], 16, settings, lookup)
    assert [one.setting for one in found] == [
        "autoregressive", "verified, draft 4, ends 0", "verified, draft 4, ends 2", "prompt lookup",
    ]  # fmt: skip
    assert all(one.equal == one.problems == 3 for one in found)
    assert len({one.tokens for one in found}) == 1
    assert found[0].tpf == 1
    assert found[0].speedup == 1
    assert all(one.forwards <= found[0].forwards for one in found)
    assert len(found[1].acceptance) == 3
    assert "x autoregressive" in bench.show(found)

"""Published results: pages quote what the files say, the weights are those that were measured, and a check finds what moved."""

from __future__ import annotations

import copy
import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from tad.errors import TadError
from tad_lab import claims
from tad_lab.claims import CLAIMS, compare
from tad_lab.results import fill, pages, read, show, write, wrong_quotes

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"


@pytest.mark.parametrize("page", pages(ROOT), ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_quote_the_results(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert fill(text, RESULTS) == text, "run python -m tad_lab.results"
    assert not wrong_quotes(text, RESULTS)


def test_a_wrong_number_and_an_unknown_name_are_found(tmp_path: Path) -> None:
    rows = [["t", f"t/{i}", "q", int(i < 8), 40, 10, "a"] for i in range(10)]
    write(tmp_path, "claims", "test", {"one": {"rows": rows}})
    assert not wrong_quotes("It has 80.0 @ 4.00<!-- claims/one -->.", tmp_path)
    assert wrong_quotes("It has 81.0 @ 4.00<!-- claims/one -->.", tmp_path)
    assert wrong_quotes("It has 80.0 @ 4.00<!-- claims/two -->.", tmp_path)
    with pytest.raises(TadError, match="known: claims"):
        fill("<!-- results: nothing -->\n<!-- /results -->", tmp_path)
    with pytest.raises(TadError, match="no such results"):
        read(tmp_path, "other")


def test_the_bundled_weights_are_those_that_were_measured() -> None:
    lines = (RESULTS / "SHA256SUMS").read_text().splitlines()
    bundled = ROOT / "src" / "tad" / "bundled"
    assert {path.parent.name for path in bundled.glob("*/*.safetensors")} == {
        line.split()[1].split("/")[0] for line in lines
    }
    for line in lines:
        digest, name = line.split()
        assert hashlib.sha256((bundled / name).read_bytes()).hexdigest() == digest, name


def test_results_are_small_and_every_claim_is_stored() -> None:
    sizes = [path.stat().st_size for path in RESULTS.iterdir()]
    assert max(sizes) < 400_000
    assert sum(sizes) < 3_000_000
    stored = read(RESULTS, "claims")["entries"]
    assert list(stored) == list(CLAIMS)
    for name, entry in stored.items():
        assert len(entry["rows"]) == 3 * CLAIMS[name].size
        assert all(row[3] in (0, 1) for row in entry["rows"])


def test_a_claim_is_made_again_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first problems of each family; of as many rows one may be rounded otherwise on another processor."""
    monkeypatch.setitem(CLAIMS, "nano-llada-speed", replace(CLAIMS["nano-llada-speed"], size=2))
    made = claims.decode_claim("nano-llada-speed")
    stored = read(RESULTS, "claims")["entries"]["nano-llada-speed"]
    kept = {(row[0], row[1]): row for row in stored["rows"]}
    assert made["fingerprints"] == stored["fingerprints"]
    assert all(row[2] == kept[row[0], row[1]][2] for row in made["rows"])  # the same problems
    found = compare(made, stored | {"rows": [kept[row[0], row[1]] for row in made["rows"]]})
    assert found.rows == 6
    assert found.identical >= 5


def test_a_comparison_sees_other_tokens_other_speed_and_other_verdicts() -> None:
    stored = read(RESULTS, "claims")["entries"]["nano-llada-tad"]
    same = compare(stored, stored)
    assert same.agrees
    assert same.identical == same.rows == len(stored["rows"])
    ungraded = copy.deepcopy(stored)
    for row in ungraded["rows"]:
        row[3] = None
    assert compare(ungraded, stored).identical == same.rows  # equal tokens have the stored verdict
    for place, value in ((3, 0), (5, 99), (6, "other")):
        changed = copy.deepcopy(stored)
        for row in changed["rows"][:60]:
            row[place] = value
        found = compare(changed, stored)
        assert not found.agrees
        assert found.identical <= same.rows - 30
    once = copy.deepcopy(stored)
    once["rows"][0][6] = "other"
    assert compare(once, stored).agrees  # one row of rounding
    assert show(stored).n == same.rows

"""Recipes: what is read, what overrides do, and the one line each mistake gets."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tad import config
from tad.config import Recipe, find_recipe, load_recipe, parse_recipe
from tad.errors import TadError


class Optimiser(Recipe):
    rate: float = 1e-4
    betas: list[float] = [0.9, 0.95]  # noqa: RUF012
    name: str | None = None


class Data(Recipe):
    folder: Path
    tasks: list[str] = []  # noqa: RUF012
    optimiser: Optimiser | None = None


class Whole(Recipe):
    seed: int = 0
    shuffle: bool = False
    optimiser: Optimiser = Optimiser()
    data: Data | None = None
    parts: list[Optimiser] = []  # noqa: RUF012


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "recipe.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def refused(words: str, *overrides: str, text: str | bytes, folder: Path) -> None:
    with pytest.raises(TadError, match=words) as caught:
        load_recipe(Whole, write(folder, text), overrides)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        ("# nothing\n", [], {}),
        ("seed: 3\noptimiser:\n  rate: 0.5\n", [], {"seed": 3, "optimiser": {"rate": 0.5}}),
        ("optimiser: {rate: 1e-5}\n", [], {"optimiser": {"rate": 1e-5}}),  # which YAML 1.1 reads as text
        ("", ["optimiser.rate=2e-6"], {"optimiser": {"rate": 2e-6}}),
        ("", ["seed=7", "shuffle=true", "optimiser.betas=[0.5, 0.6]"], {"seed": 7, "shuffle": True, "optimiser": {"betas": [0.5, 0.6]}}),
        ("optimiser: {name: adam}\n", ["optimiser.name=null"], {}),
        ("optimiser: {rate: 9}\n", ["optimiser={name: sgd}"], {"optimiser": {"name": "sgd"}}),
        ("", ["optimiser.name=a=b"], {"optimiser": {"name": "a=b"}}),
        ("seed: 1\n", ["seed=2", "seed=3"], {"seed": 3}),
        ("data: null\n", ["data.folder=/", "data.tasks=[gsm8k]", "data.optimiser.rate=2"], {"data": {"folder": "/", "tasks": ["gsm8k"], "optimiser": {"rate": 2}}}),
        ("parts: [{rate: 1}, {rate: 2, betas: [0.5, 0.6]}]\n", ["parts.0.name=sgd", "parts.1.betas.0=0.25"], {"parts": [{"rate": 1, "name": "sgd"}, {"rate": 2, "betas": [0.25, 0.6]}]}),
    ],
)  # fmt: skip
def test_a_file_and_its_overrides_make_a_recipe_with_defaults_for_the_rest(
    tmp_path: Path, text: str, overrides: list[str], expected: dict
) -> None:
    assert load_recipe(Whole, write(tmp_path, text), overrides) == Whole.model_validate(expected)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sed: 3\n", r"recipe\.yaml: .*'sed'.*'seed'"),
        ("optimiser: {rat: 1}\n", r"'optimiser\.rat'.*'rate'"),
        ("optimiser: {zzz: 1}\n", r"'optimiser\.zzz'.*betas, name, rate"),
        ("parts: [{rat: 1}]\n", r"'parts\.0\.rat'.*'rate'"),
        ("seed: many\n", r"recipe.yaml: 'seed': .*integer.* \(got 'many'\)"),
        ("seed: 1.5\n", r"'seed': .*integer.*got 1.5"),
        ("optimiser: 3\n", r"'optimiser': .*\(got 3\)"),
        ("optimiser: {betas: 3}\n", r"'optimiser.betas': .*list"),
        ("optimiser: {betas: [0.9, x]}\n", r"'optimiser.betas.1': .*number.*got 'x'"),
        ("data: {tasks: []}\n", r"'data\.folder' .*data\.folder=VALUE"),
        ("seed: [1\n", r"recipe\.yaml: line \d+ "),
        ("- 1\n- 2\n", r"recipe\.yaml: .* list"),
        ("just words\n", r"recipe\.yaml: .* str"),
        ("{{ seed }}: 1\n", r"recipe\.yaml: line 1 "),
        ("1: 2\n", r"recipe.yaml: '1': .*string"),
        ("seed: 1\nseed: 2\n", r"recipe\.yaml: line 2 .*'seed'"),
        (b"\xff\xfe\x00", r"recipe\.yaml: .*UTF-8"),
    ],
)
def test_mistakes_in_the_file_name_the_field_and_the_fix(
    tmp_path: Path, text: str | bytes, words: str
) -> None:
    refused(words, text=text, folder=tmp_path)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("seed", r"override 'seed' .*section\.field=value"),
        ("=3", r"override '=3' "),
        ("optimiser..rate=3", r"override 'optimiser\.\.rate=3' "),
        ("seed.deep=3", r"override 'seed\.deep=3': 'seed' "),
        ("seeed=3", r"'seeed'.*'seed'"),
        ("seed=[1", r"override 'seed=\[1': "),
        *(
            (f"parts.{place}.rate=3", rf"'parts\.{place}\.rate=3': '{place}' ")
            for place in ("2", "-1", "first")
        ),
    ],
)
def test_mistakes_in_an_override_are_named(tmp_path: Path, override: str, words: str) -> None:
    refused(words, override, text="seed: 1\nparts: [{rate: 1}, {rate: 2}]\n", folder=tmp_path)


def test_bundled_recipes_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "BUNDLED", tmp_path)
    monkeypatch.chdir(tmp_path.parent)
    (tmp_path / "nano.yaml").write_text("seed: 5\n")
    assert load_recipe(Whole, "nano").seed == 5
    assert load_recipe(Whole, "nano.yaml").seed == 5
    (tmp_path.parent / "nano.yaml").write_text("seed: 6\n")
    assert load_recipe(Whole, "nano.yaml").seed == 6  # a file comes before a bundled name
    with pytest.raises(TadError, match=r"'mini': .*nano"):
        find_recipe("mini")
    with pytest.raises(TadError, match="'elsewhere/nano'"):
        find_recipe("elsewhere/nano")


def test_a_text_is_parsed_once_and_an_override_stays_with_its_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "BUNDLED", tmp_path)
    monkeypatch.chdir(tmp_path.parent)
    parse, parsed = config.yaml.load, []
    monkeypatch.setattr(config.yaml, "load", lambda *given: parsed.append(given[0]) or parse(*given))
    for name in ("once", "twice"):
        (tmp_path / f"{name}.yaml").write_text(f"# {name}\noptimiser: {{rate: 0.1, betas: [0.5]}}\n")
    changed = load_recipe(Whole, "once", ["optimiser.rate=7", "optimiser.betas.0=8"])
    assert (changed.optimiser.rate, changed.optimiser.betas) == (7, [8])
    plain = load_recipe(Whole, "once")
    assert (plain.optimiser.rate, plain.optimiser.betas) == (0.1, [0.5])
    assert sorted(text for text in parsed if text.startswith("#")) == [
        (tmp_path / f"{name}.yaml").read_text() for name in ("once", "twice")
    ]


FAMILY = """# Two in one.
# More.
name: "{variant}"
optimiser: {rate: 0.1, betas: [0.5]}
variants:
  small: {seed: 1}
  large: {seed: 2, optimiser: {betas: [0.7, 0.8]}}
"""


class Named(Whole):
    name: str


def test_a_variant_is_laid_over_the_rest_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundled = tmp_path / "bundled"
    bundled.mkdir()
    (bundled / "family.yaml").write_text(FAMILY)
    (bundled / "single.yaml").write_text("seed: 5\n")
    monkeypatch.setattr(config, "BUNDLED", bundled)
    monkeypatch.setattr(config, "recipe_folders", list)
    monkeypatch.chdir(tmp_path)
    assert sorted(config.bundled_recipes()) == ["large", "single", "small"]
    small, large = (load_recipe(Named, name) for name in ("small", "large"))
    assert (small.name, small.seed, small.optimiser.rate, small.optimiser.betas) == ("small", 1, 0.1, [0.5])
    assert (large.name, large.seed, large.optimiser.rate, large.optimiser.betas) == (
        "large",
        2,
        0.1,
        [0.7, 0.8],
    )
    assert load_recipe(Named, "large", ["optimiser.rate=1"]).optimiser.rate == 1
    assert load_recipe(Named, f"{bundled / 'family.yaml'}:small") == small
    for name in ("small", "large"):  # by itself, as a file of one's own
        (tmp_path / "own.yaml").write_text(config.recipe_text(name))
        assert load_recipe(Named, tmp_path / "own.yaml") == load_recipe(Named, name)
    assert config.recipe_text("small").startswith("# Two in one.\n# More.\nname: small\n")


def test_a_file_of_variants_wants_one_of_them(tmp_path: Path) -> None:
    path = tmp_path / "family.yaml"
    path.write_text(FAMILY)
    for source in (path, f"{path}:middle"):
        with pytest.raises(TadError, match=r"family\.yaml:small, .*family\.yaml:large"):
            load_recipe(Named, source)
    (tmp_path / "plain.yaml").write_text("seed: 1\n")
    with pytest.raises(TadError, match=r"plain\.yaml"):
        load_recipe(Whole, f"{tmp_path / 'plain.yaml'}:small")


def test_a_recipe_does_not_change_after_reading() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Whole().seed = 3


def test_errors_of_plain_values_name_where_they_come_from() -> None:
    with pytest.raises(TadError, match=r"the request: .*'x'"):
        parse_recipe(Whole, {"x": 1}, where="the request")


@given(st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.lists(st.floats(0, 1), max_size=3))
def test_any_value_survives_an_override(
    tmp_path_factory: pytest.TempPathFactory, seed: int, rate: float, betas: list[float]
) -> None:
    path = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    path.write_text("")
    overrides = [f"seed={seed}", f"optimiser.rate={rate!r}", f"optimiser.betas={betas!r}"]
    recipe = load_recipe(Whole, path, overrides)
    assert (recipe.seed, recipe.optimiser.rate, recipe.optimiser.betas) == (seed, rate, betas)

"""Options that several commands share: their types and help, how their texts are read, and the model they name.

What can be said about an option without torch is said here, before it is imported: a mistyped path or name costs
a fraction of a second. Options of one command stay with that command.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from tad.errors import TadError

if TYPE_CHECKING:
    from tad.models import LM

BUNDLED = Path(__file__).parents[1] / "bundled"
DEVICES = ("cpu", "cuda", "mps")
# The keys of `tad.decoding.DECODERS`, which cannot be had without torch; a test holds the two together.
DECODERS = (
    "autoregressive",
    "verified",
    "one-by-one",
    "llada",
    "dream",
    "fast-dllm",
    "fast-dllm-prefix",
    "fast-dllm-dual",
    "dparallel",
    "d2f",
    "d3llm",
    "d3llm-cached",
    "tad",
    "tad-cached",
    "tad-leftmost",
    "fast-dllm-v2",
    "sdar",
    "llada2",
    "llada2.1",
)
# The names of `tad.models.FAMILIES`, likewise.
FAMILIES = ("llada", "dream", "fast-dllm-v2", "sdar", "sdar-moe", "llada2", "llama", "qwen2", "qwen3")
# The keys of `tad.models.quantize.KINDS`, likewise.
QUANTIZED = ("fp8", "int8", "int4")
DTYPES = ("bf16", "bfloat16", "fp16", "float16", "half", "fp32", "float32", "float")


def suggest(word: str, known: Sequence[str]) -> str:
    """'did you mean x?' where a known word is near, else all of them."""
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean '{close[0]}'?" if close else f"known: {', '.join(known)}"


def check_source(source: str | None) -> str | None:
    """Refuse a directory that is not there and a name that is not bundled. A hub id, owner/name, is left to the hub."""
    if source is None or Path(source).expanduser().exists():
        return source
    bundled = sorted(path.name for path in BUNDLED.iterdir() if path.is_dir())
    is_path = source.startswith((".", "/", "~"))
    if source in bundled or (source.count("/") == 1 and not is_path):
        return source
    hint = "" if is_path else f", and not a bundled name; {suggest(source, bundled)}"
    raise TadError(f"{source}: no such directory{hint}")


def check_device(device: str | None) -> str | None:
    if device is not None and device.partition(":")[0] not in DEVICES:
        raise TadError(f"--device {device}: should be cpu, cuda, cuda:N or mps")
    return device


def check_decoder(decoder: str | None) -> str | None:
    if decoder is not None and decoder not in DECODERS:
        raise TadError(f"unknown decoder '{decoder}'; {suggest(decoder, DECODERS)}")
    return decoder


def check_among(option: str, known: Sequence[str]) -> Callable[[str | None], str | None]:
    """The check of an option that takes one of these words."""

    def check(value: str | None) -> str | None:
        if value is not None and value not in known:
            raise TadError(f"{option} {value}: {suggest(value, known)}")
        return value

    return check


_MODEL = "A directory, a hub id or a bundled name such as nano-llada."

Model = Annotated[str, typer.Argument(help=_MODEL, callback=check_source)]
OptionalModel = Annotated[str | None, typer.Argument(help=_MODEL, callback=check_source)]
ModelOption = Annotated[str | None, typer.Option(help=_MODEL, callback=check_source)]
Adapter = Annotated[
    str | None,
    typer.Option(help="A PEFT adapter: directory, hub id or bundled name.", callback=check_source),
]
Device = Annotated[
    str | None,
    typer.Option(help="cpu, cuda, cuda:N or mps; default: CUDA if there.", callback=check_device),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="bf16, fp16 or fp32; default: as the model is.", callback=check_among("--dtype", DTYPES)
    ),
]
Quantize = Annotated[
    str | None,
    typer.Option(
        help="Smaller weights: fp8, int8 or int4; merges the adapter.",
        callback=check_among("--quantize", QUANTIZED),
    ),
]
Decoder = Annotated[
    str | None,
    typer.Option(help="A name from `tad decoders`; default: the model's own.", callback=check_decoder),
]
GenLength = Annotated[
    int | None, typer.Option(min=1, help="Positions to generate; default: the model's own.")
]
Seed = Annotated[int, typer.Option(help="Only matters with a temperature.")]
DecoderSettings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A parameter of the decoder; repeat it."),
]
Threshold = Annotated[float | None, typer.Option(help="The same as --set threshold=X.")]
Temperature = Annotated[float | None, typer.Option(help="The same as --set temperature=X.")]
DataDir = Annotated[
    Path | None, typer.Option("--data-dir", help="Directory with the data (default: TAD_DATA, else the hub).")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Live = Annotated[bool, typer.Option("--live/--no-live", help="Draw the canvas on a terminal.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Rows computed at once; decides speed, not results.")]
Store = Annotated[Path, typer.Argument(help="A store made by `tad collect`.")]
Workers = Annotated[
    str | None,
    typer.Option(
        help="'ray': one actor per GPU of a Ray cluster.", callback=check_among("--workers", ("ray",))
    ),
]
RecipeName = Annotated[
    str, typer.Argument(help="A recipe file, or the name of a bundled one (`tad recipes` lists them).")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="section.field=value, any number of times.", show_default=False)
]
RunDir = Annotated[Path | None, typer.Option("--out", help="Directory of the run (default: runs/NAME).")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in the directory.")]
NoSandbox = Annotated[
    bool, typer.Option("--unsafe-no-sandbox", help="Run generated code unprotected, with your rights.")
]


def split_names(text: str) -> list[str]:
    """Names with commas between them."""
    return [name.strip() for name in text.split(",") if name.strip()]


def read_settings(
    settings: list[str] | None, option: str = "--set", **shortcuts: float | None
) -> dict[str, Any]:
    """KEY=VALUE texts of a repeated option, and options that are shortcuts for one of them, as keyword arguments."""
    found: dict[str, Any] = {}
    for setting in settings or ():
        key, equals, value = setting.partition("=")
        owner, dot, key = key.strip().rpartition(".")  # an owner's name, such as nano-word, keeps its hyphens
        if not equals or not key:
            raise TadError(f"{option} {setting}: should be KEY=VALUE")
        key = f"{owner}{dot}{key.replace('-', '_')}"
        if key in found:
            raise TadError(f"{option} {setting}: {key} is set twice")
        found[key] = read_value(value.strip())
    for key, number in shortcuts.items():
        if number is not None:
            if key in found:
                raise TadError(f"--{key} and {option} {key}= are the same parameter; give one")
            found[key] = number
    return found


def read_value(text: str) -> Any:
    """A number, true, false, none, or the text itself. Not YAML, where `off` and `no` would be false."""
    words = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def fill_defaults(
    model: str,
    adapter: str | None,
    decoder: str | None,
    gen_length: int | None,
    settings: dict[str, Any],
) -> tuple[str, int, dict[str, Any]]:
    """Decoder, length and parameters as asked for, else as the model's directory says. What does not depend on the
    weights is refused here, before they are read."""
    from tad.decoding import get_decoder
    from tad.models import DecodingDefaults, find_context, find_defaults

    known = decoder is not None and gen_length is not None
    defaults = DecodingDefaults() if known else find_defaults(model, adapter)
    name, length, own = defaults.fill(decoder, gen_length, settings)
    chosen = get_decoder(name, **own)
    context = find_context(model)
    if (
        context is None or length < context
    ):  # else refused with the prompt, where it is known what fits behind it
        chosen.check(length)
    return name, length, own


def load_model(
    model: str,
    adapter: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    to_decode: bool = False,
    quantize: str | None = None,
) -> LM:
    """`to_decode`: nothing else will be done with it, so its adapter is merged."""
    import torch

    from tad.models import load

    if device is not None and device.startswith("mps") and not torch.backends.mps.is_available():
        raise TadError("--device mps: this machine or this build of torch has no MPS; use --device cpu")
    quieten()
    lm = load(model, adapter=adapter, device=device, dtype=dtype, quantize=cast(Any, quantize))
    if to_decode and lm.conversion is None:
        lm.merge()
    return lm


def quieten() -> None:
    """Switch off transformers' own bars and warnings, which would break the lines of a command."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def busy(what: str) -> AbstractContextManager[Any]:
    """A spinner on standard error, where that is a terminal."""
    from rich.console import Console

    notes = Console(stderr=True)
    return notes.status(what) if notes.is_terminal else nullcontext()

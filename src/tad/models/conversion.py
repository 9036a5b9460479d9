"""The directory of a converted model: an autoregressive parent, and an adapter that acts on masks only (`tad.models.gated`).

It holds the adapter, the trained embedding of its mask (in the same file) and `conversion.json`, which says whose adapter it is,
which token is the mask and how large a block. The parent is not copied: it is found where it was, and refused if it is another.

A model that was converted with all its weights is not this: it is a checkpoint of its own, with `block_size` and
`mask_token_id` in its config.json.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tad.errors import TadError
from tad.files import write_json
from tad.models.stored import check_file, read_json

FILE = "conversion.json"
FORMAT = 1
LARGEST_BLOCK = 4096
_PIECES, _PIECE = 64, 4096  # of a weight file, in its fingerprint
_RESERVED = re.compile(r"reserved|unused|extra_id|extra_token", re.IGNORECASE)


@dataclass(frozen=True)
class MaskToken:
    """The token that stands for a mask, and where it comes from in words."""

    id: int
    row: str


@dataclass(frozen=True)
class Conversion:
    """What `conversion.json` says."""

    folder: Path  # where it is
    parent: str  # a hub id, or the path of a directory or a GGUF file
    parent_files: dict[str, str]  # name of a weight file -> size and fingerprint
    family: str
    block_size: int
    mask_token_id: int
    mask_row: str
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        """Say it in a directory."""
        values = asdict(self)
        del values["folder"]
        write_json(folder / FILE, values)

    def check_parent(self, files: list[Path]) -> None:
        """Refuse weights that are not those the adapter was made for."""
        found = fingerprint_files(files)
        if found != self.parent_files:
            raise TadError(
                f"{self.folder / FILE}: the weights of {self.parent} are not those the adapter was trained on; "
                "put back the checkpoint as it was, or convert again"
            )


def is_conversion(source: str | Path) -> bool:
    """Whether a path is the directory of a converted model that needs its parent."""
    return (Path(source).expanduser() / FILE).is_file()


def read_conversion(folder: Path) -> Conversion:
    """`conversion.json` of a directory, its fields checked."""
    path = folder / FILE
    values = read_json(path)
    if values.get("format") != FORMAT:
        raise TadError(
            f"{path}: format {values.get('format')!r:.40} is not known (only {FORMAT} is); update this package"
        )
    kinds: dict[str, Callable[[Any], bool]] = {
        "parent": lambda value: isinstance(value, str) and 0 < len(value) < 4096 and value.isprintable(),
        "parent_files": lambda value: (
            isinstance(value, dict) and all(isinstance(v, str) for v in value.values())
        ),
        "family": lambda value: isinstance(value, str),
        "block_size": lambda value: type(value) is int and 2 <= value <= LARGEST_BLOCK,
        "mask_token_id": lambda value: type(value) is int and value >= 0,
        "mask_row": lambda value: isinstance(value, str),
    }
    for name, fits in kinds.items():
        if not fits(values.get(name)):
            raise TadError(f"{path}: {name} is {values.get(name)!r:.40}, which is not usable; convert again")
    return Conversion(folder, **{name: values[name] for name in kinds})


def fingerprint_files(files: list[Path]) -> dict[str, str]:
    """Size and a hash of evenly spaced pieces of every file: tells checkpoints apart in milliseconds at any size. It is no
    defence against tampering."""
    found = {}
    for path in sorted(files):
        check_file(path)
        size = path.stat().st_size
        digest = hashlib.blake2b(digest_size=8)
        with path.open("rb") as file:
            for piece in range(_PIECES):
                file.seek((size - _PIECE) * piece // (_PIECES - 1) if size > _PIECE else 0)
                digest.update(file.read(_PIECE))
        found[path.name] = f"{size} {digest.hexdigest()}"
    return found


def choose_mask(
    tokenizer: Any, rows: int, taken: Collection[int | None], given: int | None = None
) -> MaskToken:
    """A token that no text uses: the tokenizer's own mask, a row of the embedding beyond the tokenizer, or a special token that
    neither the chat template nor the end of an answer needs. `given` is the user's choice."""
    names = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items()}
    size = max(tokenizer.get_vocab().values(), default=-1) + 1
    if given is not None:
        if not 0 <= given < rows:
            raise TadError(f"mask={given}: the embedding has rows 0 to {rows - 1}")
        if given in taken:
            raise TadError(f"mask={given}: this token begins or ends texts; choose another")
        if given >= size:
            return MaskToken(given, f"row {given} of the embedding, beyond the tokenizer")
        if given not in names:
            raise TadError(f"mask={given}: this token is part of texts; choose a special token or a free row")
        return MaskToken(given, f"special token {names[given]!r}")
    mask = getattr(tokenizer, "mask_token_id", None)
    if mask is not None and mask not in taken:
        return MaskToken(int(mask), f"mask token {tokenizer.mask_token!r} of the tokenizer")
    if size < rows:
        return MaskToken(size, f"row {size} of the embedding, the first beyond the tokenizer")
    template = str(tokenizer.chat_template)
    used = {value for value in tokenizer.special_tokens_map.values() if isinstance(value, str)}
    free = [
        number
        for number, text in sorted(names.items())
        if number not in taken and text not in used and text not in template and text.strip()
        and tokenizer.added_tokens_decoder[number].special
    ]  # fmt: skip
    reserved = [number for number in free if _RESERVED.search(names[number])]
    if not free:
        raise TadError(
            f"no free token for the mask: all {rows} rows of the embedding have texts, and no special token is unused; "
            "name one that your texts do not need with mask=ID"
        )
    chosen = (reserved or free)[-1]
    return MaskToken(chosen, f"special token {names[chosen]!r}, which the chat template does not use")

"""Where rows come from: a directory of jsonl, jsonl.gz or parquet files, else the Hugging Face hub.

Covers finding files, reading them and naming the place of a bad row. What a row means is the task's affair.
Order of search: the directory given, the directory in TAD_DATA, the hub. A directory given explicitly is final.
"""

from __future__ import annotations

import fnmatch
import gzip
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tad.errors import TadError

SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")


@dataclass(frozen=True)
class Row:
    """One record and where it stands, for error messages."""

    values: Mapping[str, Any]
    place: str

    def __getitem__(self, name: str) -> Any:
        """A required field."""
        if self.values.get(name) is None:
            has = ", ".join(sorted(self.values)) or "nothing"
            raise TadError(f"{self.place}: field '{name}' is missing (the row has: {has})")
        return self.values[name]

    def text(self, name: str) -> str:
        """A required field that must be a string."""
        value = self[name]
        if not isinstance(value, str):
            raise TadError(f"{self.place}: field '{name}' should be a string, it is {type(value).__name__}")
        return self._check_unicode(name, value)

    def texts(self, name: str) -> list[str]:
        """A required field that must be a list of strings."""
        value = self[name]
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise TadError(f"{self.place}: field '{name}' should be a list of strings")
        return [self._check_unicode(name, item) for item in value]

    def _check_unicode(self, name: str, text: str) -> str:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TadError(
                f"{self.place}: field '{name}' holds half of a surrogate pair at character {error.start}; write the whole one"
            ) from None
        return text

    def get(self, name: str, default: Any = None) -> Any:
        value = self.values.get(name)
        return default if value is None else value


@dataclass(frozen=True)
class Source:
    """A dataset: its folder name under a data directory, and where the hub keeps it.

    `hub_files` maps a split to patterns of file names in the hub repository. `whole` names a file that holds every
    split at once; the task then picks rows.
    """

    folder: str
    hub_id: str | None = None
    hub_files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    whole: str | None = None

    def find(self, split: str, data_dir: str | Path | None = None) -> list[Path]:
        """Local files of a split, without touching the network; empty if there are none."""
        directory = self._directory(data_dir)
        if directory is None:
            return []
        for stem in (split, self.whole):
            if stem is None:
                continue
            for suffix in SUFFIXES:
                exact = directory / self.folder / f"{stem}{suffix}"
                if exact.is_file():
                    return [exact]
                shards = sorted((directory / self.folder).glob(f"{stem}-*{suffix}"))
                if shards:
                    return shards
        # A dataset's repository, as it was downloaded.
        patterns = self.hub_files.get(split, ())
        return [path for pattern in patterns for path in sorted((directory / self.folder).glob(pattern))]

    def where(self, split: str, data_dir: str | Path | None = None) -> str:
        """In words, where `read` would take the split from."""
        if files := self.find(split, data_dir):
            return str(files[0] if len(files) == 1 else files[0].parent)
        if data_dir is not None or self.hub_id is None:
            return "not found"
        return f"hub: {self.hub_id}"

    def read(self, split: str, data_dir: str | Path | None = None) -> Iterator[Row]:
        """Rows of a split, from disk or from the hub."""
        files = self.find(split, data_dir)
        if not files:
            files = self._download(split, data_dir)
        for path in files:
            yield from read_rows(path)

    def _directory(self, data_dir: str | Path | None) -> Path | None:
        chosen = data_dir or os.environ.get("TAD_DATA")
        if not chosen:
            return None
        directory = Path(chosen)
        if not directory.is_dir():
            origin = "--data-dir" if data_dir else "TAD_DATA"
            raise TadError(f"{directory}: {origin} is not a directory")
        return directory

    def _download(self, split: str, data_dir: str | Path | None) -> list[Path]:
        wanted = f"{self.folder}/{split}{{{','.join(SUFFIXES)}}}"
        advice = f"put {wanted} into a directory and name it with --data-dir or TAD_DATA"
        if data_dir is not None:
            raise TadError(f"{data_dir}: no data for split '{split}' there; {advice}")
        if self.hub_id is None:
            raise TadError(f"no data for '{self.folder}' split '{split}', and it is not on the hub; {advice}")
        patterns = self.hub_files.get(split)
        if not patterns:
            raise TadError(f"hub dataset {self.hub_id} has no split '{split}'; {advice}")
        import huggingface_hub

        try:
            # One request: `list_repo_files` would retry for half a minute, and log it, before it says there is no network.
            siblings = huggingface_hub.dataset_info(self.hub_id).siblings or []
            names = [sibling.rfilename for sibling in siblings]
            chosen = [name for pattern in patterns for name in sorted(fnmatch.filter(names, pattern))]
            if not chosen:
                raise TadError(f"hub dataset {self.hub_id} has no file like {patterns[0]}; {advice}")
            return [
                Path(huggingface_hub.hf_hub_download(self.hub_id, name, repo_type="dataset"))
                for name in chosen
            ]
        except TadError:
            raise
        except Exception as error:
            # The library lets its transport's own errors through, which are of no common kind.
            cause = " ".join(str(error).split())[:200]
            raise TadError(f"cannot fetch {self.hub_id} from the hub ({cause}); {advice}") from error


def read_rows(path: Path) -> Iterator[Row]:
    """Rows of one jsonl, jsonl.gz or parquet file. A bad line is an error that names file and line."""
    if not path.is_file():
        raise TadError(f"{path}: no such file")
    if path.suffix == ".parquet":
        yield from _read_parquet(path)
    elif path.name.endswith((".jsonl", ".jsonl.gz", ".json")):
        yield from _read_jsonl(path)
    else:
        raise TadError(f"{path}: expected a file ending in {', '.join(SUFFIXES)}")


def _read_jsonl(path: Path) -> Iterator[Row]:
    for place, line in read_lines(path):
        if line.strip():
            values = parse_json(line, place)
            if not isinstance(values, dict):
                raise TadError(f"{place}: a row should be a JSON object, this is {type(values).__name__}")
            yield Row(values, place)


def read_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Place (file:number) and text of each line of a file, which may be compressed (.gz)."""
    if not path.is_file():
        raise TadError(f"{path}: no such file")
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                yield f"{path}:{number}", line.decode("utf-8-sig").rstrip("\r\n")
    except UnicodeDecodeError:
        raise TadError(f"{path}:{number}: is not UTF-8 text") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise TadError(f"{path}:{number + 1}: is not a readable gzip file ({error})") from None


def parse_json(line: str, place: str) -> Any:
    """The value of a line; one that is not JSON is an error that names its place."""
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise TadError(f"{place}: is not valid JSON ({error.msg} at column {error.colno})") from None
    except (ValueError, RecursionError):
        raise TadError(f"{place}: is nested too deep, or holds a number of thousands of digits") from None


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        number = 0
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches():
            for values in batch.to_pylist():
                number += 1
                yield Row(values, f"{path}: row {number}")
    except pyarrow.ArrowInvalid as error:
        raise TadError(f"{path}: is not a readable parquet file ({' '.join(str(error).split())})") from None

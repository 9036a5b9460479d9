"""Prompts as users write them: an argument, a file with one a line or as jsonl, standard input, or token ids.

Errors name the option, or the file and the line. What a prompt means to a model is in `tad.generation`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tad.errors import TadError

if TYPE_CHECKING:
    from tad.generation import Prompt


@dataclass(frozen=True)
class Question:
    """A prompt, or token ids in its place, and where it came from, for errors."""

    prompt: Prompt
    where: str
    ids: list[int] | None = None


def read_questions(
    prompt: str | None = None, file: Path | None = None, ids: str | None = None
) -> list[Question]:
    """The prompts of one command: an argument, the lines of a file or of standard input, or token ids."""
    if sum(given is not None for given in (prompt, file, ids)) > 1:
        raise TadError("give one of a prompt, --file and --ids")
    if ids is not None:
        return [Question(ids, "--ids", _parse_ids(ids))]
    if file is not None and str(file) != "-":
        try:
            text = file.read_text(encoding="utf-8")
        except OSError as error:
            raise TadError(f"--file {file}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise TadError(f"{file}: not UTF-8 text (byte {error.start})") from None
        return _split(text, str(file), jsonl=file.suffix == ".jsonl")
    if prompt is not None and prompt != "-":
        if not prompt.strip():
            raise TadError("prompt: is empty; give a question as the argument, or - to read standard input")
        return [Question(prompt, "prompt")]
    if prompt is None and file is None and sys.stdin.isatty():
        raise TadError("no prompt: give it as an argument, with --file, or on standard input")
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError as error:
        raise TadError(f"standard input: not UTF-8 text (byte {error.start})") from None
    return _split(text, "standard input", jsonl=text.lstrip().startswith('{"'))


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise TadError(f"--ids {text!r}: should be token ids like 1,2,3") from None


def _split(text: str, where: str, jsonl: bool) -> list[Question]:
    """One prompt per line that is not blank."""
    found = []
    for number, line in enumerate(text.split("\n"), start=1):  # not splitlines: JSON text may hold U+2028
        if line.strip():
            place = f"{where}:{number}"
            found.append(Question(_parse_line(line, place) if jsonl else line, place))
    if not found:
        raise TadError(f"{where}: no prompt in it")
    return found


def _parse_line(line: str, where: str) -> Prompt:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise TadError(f"{where}: not JSON ({error.msg} at character {error.pos + 1})") from None
    given = [key for key in ("prompt", "messages") if isinstance(record, dict) and key in record]
    if len(given) != 1:
        raise TadError(f'{where}: should be an object with either "prompt" or "messages"')
    value = record[given[0]]
    if not isinstance(value, str if given == ["prompt"] else list):
        raise TadError(
            f'{where}: "{given[0]}" should be {"text" if given == ["prompt"] else "a list of messages"}'
        )
    if value == []:
        raise TadError(f'{where}: "messages" is empty')
    return value

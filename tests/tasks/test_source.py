"""Finding and reading data: places, formats, and what bad input says."""

from __future__ import annotations

import gzip
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest

from tad.errors import TadError
from tad.tasks import get_task
from tad.tasks.source import Source, read_rows

ROW = {"question": "How many?", "answer": "Two and two.\n#### 4"}


def write_gsm8k(directory: Path, content: str | bytes) -> Path:
    path = directory / "gsm8k" / "test.jsonl"
    path.parent.mkdir(parents=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize(
    ("content", "place", "named"),
    [
        (f"{json.dumps(ROW)}\n\n{{not json\n", ":3: ", "JSON"),
        ("[1, 2]\n", ":1: ", "list"),
        (
            f'{json.dumps(ROW)}\n{{"question": "q", "solution": "s"}}\n',
            ":2: ",
            "'answer'.*question, solution",
        ),
        ('{"question": 3, "answer": "#### 4"}\n', ":1: ", "'question'.*int"),
        ('{"question": "q", "answer": "none"}\n', ":1: ", "'answer'.*####"),
        (b'{"question": "\xff"}\n', ":1: ", "UTF-8"),
        ("\n", "", "'gsm8k' split 'test' is empty"),
    ],
)
def test_a_bad_row_is_reported_with_file_line_and_field(
    tmp_path: Path, content: str | bytes, place: str, named: str
) -> None:
    path = write_gsm8k(tmp_path, content)
    with pytest.raises(TadError, match=named) as caught:
        get_task("gsm8k", tmp_path).examples("test")
    assert f"{path}{place}" in str(caught.value)


DAMAGED = bytearray(gzip.compress(b"".join(b'{"number": %d}\n' % number for number in range(1000))))
DAMAGED[60:90] = bytes(30)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.jsonl.gz", gzip.compress(json.dumps(ROW).encode() * 1000)[:-20]),
        ("rows.jsonl.gz", bytes(DAMAGED)),
        ("rows.parquet", b"not parquet at all"),
    ],
    ids=["truncated", "damaged", "not parquet"],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(TadError, match=rf"{path}.* is not a readable"):
        list(read_rows(path))


def test_a_directory_that_does_not_exist_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TadError, match="--data-dir is not a directory"):
        get_task("gsm8k", tmp_path / "nowhere").examples()
    monkeypatch.setenv("TAD_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(TadError, match="TAD_DATA is not a directory"):
        get_task("gsm8k").examples()


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet", "shards"])
def test_every_format_gives_the_same_examples(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "gsm8k"
    folder.mkdir()
    rows = [{**ROW, "question": f"How many, {number}?"} for number in range(4)]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if kind == "jsonl":
        (folder / "test.jsonl").write_bytes(lines)
    elif kind == "jsonl.gz":
        (folder / "test.jsonl.gz").write_bytes(gzip.compress(lines))
    elif kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "test.parquet")
    else:
        for number in range(2):
            table = pyarrow.Table.from_pylist(rows[2 * number : 2 * number + 2])
            pyarrow.parquet.write_table(table, folder / f"test-0000{number}-of-00002.parquet")
    examples = get_task("gsm8k", tmp_path).examples("test")
    assert [example.question for example in examples] == [row["question"] for row in rows]
    assert [example.answer for example in examples] == [4] * 4


def test_the_directory_given_wins_over_the_one_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gsm8k(tmp_path / "given", json.dumps({**ROW, "question": "given"}))
    write_gsm8k(tmp_path / "environment", json.dumps({**ROW, "question": "environment"}))
    monkeypatch.setenv("TAD_DATA", str(tmp_path / "environment"))
    assert get_task("gsm8k").examples()[0].question == "environment"
    assert get_task("gsm8k", tmp_path / "given").examples()[0].question == "given"


def test_a_directory_without_the_data_says_what_to_put_there(tmp_path: Path) -> None:
    with pytest.raises(
        TadError, match=r"no data for split 'test' there; put gsm8k/test\{.jsonl,.jsonl.gz,.parquet\}"
    ):
        get_task("gsm8k", tmp_path).examples()


def test_without_a_directory_rows_come_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([ROW]), tmp_path / "rows.parquet")
    asked: list[str] = []

    def download(hub_id: str, name: str, repo_type: str) -> str:
        asked.append(f"{repo_type} {hub_id} {name}")
        return str(tmp_path / "rows.parquet")

    names = ["README.md", "main/train-00000-of-00001.parquet", "main/test-00000-of-00001.parquet"]
    found = SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in names])
    monkeypatch.setattr(huggingface_hub, "dataset_info", lambda hub_id: found)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert len(get_task("gsm8k").examples("test")) == 1
    assert asked == ["dataset openai/gsm8k main/test-00000-of-00001.parquet"]


class TransportError(Exception):
    """As a hub's client may raise: of no common kind."""


@pytest.mark.parametrize("kind", [OSError, TransportError])
def test_without_a_network_the_error_says_where_to_put_the_data(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def refuse(*_arguments: object, **_options: object) -> None:
        raise kind("no route to host")

    monkeypatch.setattr(huggingface_hub, "dataset_info", refuse)
    with pytest.raises(
        TadError, match=r"cannot fetch openai/gsm8k from the hub \(no route to host\); put gsm8k/test"
    ):
        get_task("gsm8k").examples("test")


def test_a_hub_that_cannot_be_reached_is_asked_once_and_nothing_else_is_printed(tmp_path: Path) -> None:
    code = "from tad.tasks import get_task\nget_task('gsm8k').examples('test')"
    proxies = ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "tad_data", "hf_hub_offline")
    environment = {name: value for name, value in os.environ.items() if name.lower() not in proxies}
    with socket.socket() as closed:  # bound and not listening: every connection is refused
        closed.bind(("127.0.0.1", 0))
        environment |= {
            "HF_ENDPOINT": f"http://127.0.0.1:{closed.getsockname()[1]}",
            "HF_HOME": str(tmp_path),
        }
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300
        )
    assert done.returncode != 0
    assert not done.stdout
    assert done.stderr.startswith(
        "Traceback"
    )  # the first thing that is printed: no retry was announced before
    assert "tad.errors.TadError: cannot fetch openai/gsm8k from the hub (" in done.stderr.splitlines()[-1]


def test_data_that_is_on_no_hub_says_so(tmp_path: Path) -> None:
    with pytest.raises(
        TadError, match="no data for 'prm12k' split 'train', and it is not on the hub; put prm12k/train"
    ):
        get_task("prm12k").examples()


def test_where_names_the_file_or_the_hub_without_reading(tmp_path: Path) -> None:
    path = write_gsm8k(tmp_path, "{broken")
    assert get_task("gsm8k", tmp_path).where("test") == str(path)
    assert get_task("gsm8k", tmp_path).where("train") == "not found"
    assert get_task("gsm8k").where("train") == "hub: openai/gsm8k"


def test_a_downloaded_repository_of_the_hub_is_a_directory_too(tmp_path: Path) -> None:
    folder = tmp_path / "gsm8k" / "main"
    folder.mkdir(parents=True)
    rows = [ROW]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "test-00000-of-00001.parquet")
    assert [example.answer for example in get_task("gsm8k", tmp_path).examples("test")] == [4]


def test_a_whole_file_serves_every_split(tmp_path: Path) -> None:
    source = Source("things", whole="all")
    (tmp_path / "things").mkdir()
    (tmp_path / "things" / "all.jsonl").write_text('{"a": 1}\n')
    assert [row["a"] for row in source.read("train", tmp_path)] == [1]

"""A server under load: many clients, mixed lengths, some of which hang up; is every answer right, is memory flat, what is batching worth?

    python bench/serve_load.py --tiny --out /tmp/load            # a model of random weights, on a CPU
    python bench/serve_load.py MODEL --requests 2000 --clients 64 --out DIR
    python bench/serve_load.py --shape llada-8b --device cuda --together 1 8 32 64 --rates 2 4 6 8 10 12 --forward auto plain

With `--shape`: the serving engine alone, under clients and under rates of arrivals (`engine_load`). With `--prefix N` prompts
are N tokens longer, and clients ask once more with these N the same in all. Needs neither a tokenizer nor the extra `serve`.

Else starts `tad serve` in a process of its own, twice: with the batch asked for, under the whole load, and with a batch of
one, for the comparison of throughput. Every answer is held to the one decoded alone in this process. The queue is kept
shorter than the number of clients, so that some requests meet a 429, wait as they are told and try again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import engine_load
from machine import describe, describe_machine, save_json
from tad.decoding import get_decoder
from tad.generation import generate
from tad.models import load

if TYPE_CHECKING:
    import httpx

ROOT = Path(__file__).parents[1]
WORDS = [
    "how",
    "many",
    "apples",
    "does",
    "she",
    "have",
    "if",
    "each",
    "of",
    "five",
    "boxes",
    "holds",
    "seven",
]
RETRY_AFTER = 1.0  # seconds, as the server's Retry-After says


@dataclass(frozen=True)
class Question:
    """One of the distinct requests; many clients ask the same ones, so that answers alone are decoded once."""

    text: str
    max_tokens: int
    decoder: str
    seed: int
    temperature: float

    def body(self, model: str, stream: bool) -> dict[str, Any]:
        sent = asdict(self)
        chat = [{"role": "user", "content": sent.pop("text")}]
        return {"model": model, "messages": chat, "stream": stream, **sent}


@dataclass
class Outcome:
    """What one pass of load came to."""

    answered: int = 0
    wrong: list[str] = field(default_factory=list)
    hung_up: int = 0
    refused: int = 0  # 429s, each followed by another try
    errors: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    forwards: int = 0
    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)  # MiB of the server, over time

    def note(self, error: str) -> None:
        self.errors[error] = self.errors.get(error, 0) + 1


def make_questions(
    count: int, lengths: list[int], decoders: list[str], temperatures: list[float]
) -> list[Question]:
    dice = random.Random(0)
    return [
        Question(
            text=" ".join(dice.choices(WORDS, k=dice.randint(1, 12))),
            max_tokens=dice.choice(lengths),
            decoder=dice.choice(decoders),
            seed=dice.randrange(2**31),
            temperature=dice.choice(temperatures),
        )
        for _ in range(count)
    ]


def answer_alone(model: str, device: str | None, questions: list[Question]) -> list[str]:
    """The texts, each decoded in a batch of its own."""
    lm = load(model, device=device)
    texts = []
    for one in questions:
        block = get_decoder(one.decoder, lm.family.name).schedule.block or 1
        length = -(-one.max_tokens // block) * block
        made = generate(lm, one.text, one.decoder, length, one.seed, temperature=one.temperature)
        texts.append(lm.decode(made.decoded.answer[: one.max_tokens]))
    return texts


@contextmanager
def serving(model: str, device: str | None, batch: int, queue: int) -> Iterator[tuple[str, int]]:
    """`tad serve` as a process: its address and process id."""
    command = [sys.executable, *f"-m tad serve {model} --name model --port 0 --no-request-log".split()]
    command += ["--batch", str(batch), "--queue", str(queue), *(["--device", device] if device else [])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line.startswith("serving at "):
        raise SystemExit(f"the server did not start: {line}")
    try:
        yield line.split()[-1], process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=60)
        if code != 0:
            raise SystemExit(f"the server ended with {code}")


def memory_of(process: int) -> float:
    """MiB resident."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def put_load(
    url: str,
    process: int,
    questions: list[Question],
    expected: list[str],
    requests: int,
    clients: int,
    hang_ups: float,
) -> Outcome:
    """`requests` in all from `clients` at once."""
    import httpx

    outcome, left = Outcome(), iter(range(requests))
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)

    async def work(client: httpx.AsyncClient) -> None:
        for number in left:
            dice = random.Random(number)
            which = dice.randrange(len(questions))
            leaves = dice.random() < hang_ups
            await ask(client, questions[which], expected[which], outcome, dice, leaves)

    async def watch() -> None:
        while True:
            outcome.memory.append(memory_of(process))
            await asyncio.sleep(0.5)

    began = time.perf_counter()
    watching = asyncio.create_task(watch())
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits, trust_env=False) as client:
        await asyncio.gather(*(work(client) for _ in range(clients)))
    watching.cancel()
    outcome.seconds = time.perf_counter() - began
    return outcome


async def ask(
    client: httpx.AsyncClient,
    question: Question,
    expected: str,
    outcome: Outcome,
    dice: random.Random,
    leaves: bool,
) -> None:
    """One request until it is answered; one that leaves hangs up somewhere on the way."""
    import httpx

    stream = dice.random() < 0.5
    body = question.body("model", stream)
    patience = dice.random() * 0.5
    while True:
        began = time.perf_counter()
        try:
            asking = fetch(client, body)
            status, text, facts = await (asyncio.wait_for(asking, patience) if leaves else asking)
        except asyncio.TimeoutError:
            outcome.hung_up += 1
            return
        except httpx.HTTPError as error:
            outcome.note(type(error).__name__)
            return
        if status == 429:
            outcome.refused += 1
            await asyncio.sleep(RETRY_AFTER * (1 + dice.random()))
            continue
        if status != 200:
            outcome.note(f"{status} {text[:200]}")
            return
        outcome.latencies.append(time.perf_counter() - began)
        outcome.answered += 1
        if text != expected:
            outcome.wrong.append(f"{question}: {text!r} instead of {expected!r}")
        outcome.tokens += facts["completion_tokens"]
        outcome.forwards += facts["forwards"]
        return


async def fetch(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[int, str, dict[str, int]]:
    """Status, text of the answer and usage."""
    if not body["stream"]:
        response = await client.post("/v1/chat/completions", json=body)
        if response.status_code != 200:
            return response.status_code, response.text, {}
        answer = response.json()
        return 200, answer["choices"][0]["message"]["content"], answer["usage"]
    text, usage = "", {}
    options = {**body, "stream_options": {"include_usage": True}}
    async with client.stream("POST", "/v1/chat/completions", json=options) as response:
        if response.status_code != 200:
            return response.status_code, (await response.aread()).decode(), {}
        async for line in response.aiter_lines():
            data = line.removeprefix("data: ")
            if not line or data == "[DONE]":
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                return 500, data, {}
            usage = chunk.get("usage") or usage
            text += "".join(choice["delta"].get("content", "") for choice in chunk["choices"])
    return 200, text, usage


async def read_totals(url: str) -> dict[str, float]:
    import httpx

    async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
        lines = (await client.get("/metrics")).text.splitlines()
    return {
        line.split()[0]: float(line.split()[1])
        for line in lines
        if line.startswith("tad_") and "{" not in line
    }


def summarise(outcome: Outcome, batch: int, totals: dict[str, float]) -> dict[str, Any]:
    ordered = sorted(outcome.latencies) or [0.0]
    memory = outcome.memory
    quarter = max(1, len(memory) // 4)
    return {
        "batch": batch,
        "answered": outcome.answered,
        "wrong": len(outcome.wrong),
        "hung up": outcome.hung_up,
        "429 then retried": outcome.refused,
        "other errors": sum(outcome.errors.values()),
        "seconds": round(outcome.seconds, 1),
        "answers/s": round(outcome.answered / outcome.seconds, 2),
        "tokens/s": round(outcome.tokens / outcome.seconds, 1),
        "rows per forward": round(totals["tad_row_forwards_total"] / max(1, totals["tad_forwards_total"]), 2),
        "latency p50 s": round(ordered[len(ordered) // 2], 3),
        "latency p95 s": round(ordered[int(len(ordered) * 0.95)], 3),
        "MiB 2nd quarter": round(sum(memory[quarter : 2 * quarter]) / quarter, 1),
        "MiB last quarter": round(sum(memory[-quarter:]) / quarter, 1),
        "cancelled by engine": int(totals["tad_cancelled_total"]),
    }


def run(arguments: argparse.Namespace, model: str) -> dict[str, Any]:
    questions = make_questions(
        arguments.distinct, arguments.lengths, arguments.decoders, arguments.temperatures
    )
    print(f"decoding {len(questions)} distinct requests alone ...", flush=True)
    expected = answer_alone(model, arguments.device, questions)
    rows, wrong = [], []
    for batch, requests, hang_ups in (
        (arguments.batch, arguments.requests, arguments.hang_ups),
        (arguments.batch, arguments.compare, 0.0),
        (1, arguments.compare, 0.0),
    ):
        print(f"batch {batch}: {requests} requests from {arguments.clients} clients ...", flush=True)
        with serving(model, arguments.device, batch, arguments.queue) as (url, process):
            outcome = asyncio.run(
                put_load(url, process, questions, expected, requests, arguments.clients, hang_ups)
            )
            totals = asyncio.run(read_totals(url))
        wrong += outcome.wrong
        rows.append({**summarise(outcome, batch, totals), "errors": outcome.errors, "memory": outcome.memory})
    return {"rows": rows, "wrong": wrong}


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="a directory or a hub id")
    parser.add_argument("--tiny", action="store_true", help="a model of random weights, made on the spot")
    parser.add_argument("--device")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--compare", type=int, default=300, help="requests for the comparison of throughput")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--distinct", type=int, default=120)
    parser.add_argument("--hang-ups", type=float, default=0.1)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--queue", type=int, default=32)
    parser.add_argument("--lengths", type=int, nargs="+", default=[16, 32, 50, 64, 96])
    parser.add_argument(
        "--decoders", nargs="+", default=["tad"], help="names; with --shape also NAME,KEY=VALUE,..."
    )
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.7])
    shape = parser.add_argument_group("with --shape: the engine alone")
    shape.add_argument("--shape", help="a released shape with random weights: llada-8b, dream-7b")
    shape.add_argument("--together", type=int, nargs="*", default=[1, 8, 32], help="numbers of clients")
    shape.add_argument("--rates", type=float, nargs="*", default=[], help="requests per second")
    shape.add_argument(
        "--batches", type=int, nargs="+", default=[32, 1], help="rows at once, for rates; 1: one at a time"
    )
    shape.add_argument(
        "--forward",
        nargs="+",
        default=["auto"],
        choices=("auto", "graph", "plain"),
        help="one after the other",
    )
    shape.add_argument("--prompts", type=int, nargs="+", help="their lengths; default 64 128 192")
    shape.add_argument("--answers", type=int, nargs="+", help="their lengths; default 128 192 256")
    shape.add_argument("--prefix", type=int, default=0, help="tokens that prompts of clients may share")
    shape.add_argument("--seconds", type=float, default=4.0, help="that count, for each row")
    shape.add_argument("--tpf", type=float, default=8.5, help="assumed tokens per forward")
    parser.add_argument("--out", type=Path, help="folder for serve_load.json")
    arguments = parser.parse_args(words)
    arguments.prompts = arguments.prompts or ([16, 32, 48] if arguments.tiny else [64, 128, 192])
    arguments.answers = arguments.answers or ([32, 64] if arguments.tiny else [128, 192, 256])
    if arguments.shape is None and arguments.tiny == (arguments.model is not None):
        parser.error("give a model, --tiny or --shape")
    return arguments


def main() -> None:
    arguments = parse()
    if arguments.shape is not None:
        engine_load.run(arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model
        if arguments.tiny:
            sys.path.insert(0, str(ROOT / "tests"))
            from tiny_lm import write_checkpoint

            model = str(write_checkpoint(Path(folder) / "tiny-llada", scale=40.0))
        result = run(arguments, model)
    result["machine"] = describe_machine(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    result["options"] = {key: str(value) for key, value in vars(arguments).items()}
    save_json(arguments.out and arguments.out / "serve_load.json", result)
    for line in result["wrong"][:5]:
        print(line)
    shown = [key for key in result["rows"][0] if key not in ("errors", "memory")]
    print(f"\n{arguments.model or 'tiny'} on {describe(result)}")
    for key in shown:
        print(f"{key:22s}" + "".join(f"{row[key]:>12}" for row in result["rows"]))
    for row in result["rows"]:
        if row["errors"]:
            print(row["errors"])


if __name__ == "__main__":
    main()

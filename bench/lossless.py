"""What lossless decoding saves: forwards and seconds of `verified` beside those of `autoregressive`, and of prompt lookup.

    python bench/lossless.py CONVERTED --task gsm8k --limit 32 --gen-length 128 --draft 4 8 --ends 0 2 4

Every setting decodes the same prompts, one row at a time; settings take turns problem by problem, so that a busy machine slows all
alike. The texts are compared token by token with those of `autoregressive`. `--lookup` also runs the parent in `transformers` with
drafts copied from the prompt (`prompt_lookup_num_tokens`), greedily, and counts its forwards. Standard errors are over problems.

    python bench/lossless.py toy --write-toy

writes what is needed without a checkpoint: a network of random weights that reads bytes (toy/base), and sums in words to train it on
and to ask it (toy/train.jsonl, toy/test.jsonl).
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tad
from tad.decoding import Decoded, decode
from tad.evaluation.summary import ratio_error, ratio_residuals
from tad.models import LM
from tad.runs.record import describe_machine
from tad.tasks import get_task
from tad.trajectories.privileged import plain_ids

LOOKUP = "prompt lookup"


@dataclass(frozen=True)
class Measured:
    """One setting over all problems."""

    setting: str
    problems: int
    equal: int  # texts that are those of `autoregressive`
    tokens: int
    forwards: int
    tpf: float
    tpf_se: float
    kept_per_cycle: float | None
    tokens_per_second: float
    speedup: float  # over `autoregressive`
    speedup_se: float
    acceptance: list[float]  # share of drafts kept up to each position


@dataclass(frozen=True)
class Answered:
    """One problem in one setting."""

    tokens: list[int]
    forwards: int
    seconds: float
    row: Decoded | None = None


def measure(
    lm: LM,
    prompts: Sequence[list[int]],
    length: int,
    settings: Sequence[dict[str, Any]],
    lookup: Callable[[list[int], int], Answered] | None = None,
) -> list[Measured]:
    """`autoregressive`, then `verified` with each of the settings, then prompt lookup if there is one."""
    found: dict[str, list[Answered]] = {}
    for prompt in prompts:
        runs: list[tuple[str, Callable[[], Answered]]] = [
            ("autoregressive", lambda p=prompt: _decode(lm, p, length, "autoregressive")),  # type: ignore[misc]
            *(
                (_name(one), lambda p=prompt, s=one: _decode(lm, p, length, "verified", **s))  # type: ignore[misc]
                for one in settings
            ),
        ]
        if lookup is not None:
            runs.append((LOOKUP, lambda p=prompt: lookup(p, length)))  # type: ignore[misc]
        for name, run in runs:
            found.setdefault(name, []).append(run())
    reference = found["autoregressive"]
    return [_summary(name, answers, reference) for name, answers in found.items()]


def _decode(lm: LM, prompt: list[int], length: int, decoder: str, **settings: Any) -> Answered:
    began = time.perf_counter()
    (row,) = decode(lm, [prompt], decoder, length, **settings)
    return Answered(row.content, row.forwards, time.perf_counter() - began, row)


def _name(settings: dict[str, Any]) -> str:
    return "verified, " + ", ".join(f"{key} {value}" for key, value in settings.items())


def _summary(name: str, answers: list[Answered], reference: list[Answered]) -> Measured:
    tokens, forwards, seconds = (
        np.array([value(one) for one in answers], dtype=float)
        for value in (lambda one: len(one.tokens), lambda one: one.forwards, lambda one: one.seconds)
    )
    slow = np.array([one.seconds for one in reference])
    rows = [one.row for one in answers if one.row is not None and one.row.drafting is not None]
    cycles = sum(row.drafting.cycles for row in rows)
    widest = max((len(row.drafting.proposed) for row in rows), default=0)
    proposed, kept = np.zeros(widest), np.zeros(widest)
    for row in rows:
        proposed[: len(row.drafting.proposed)] += row.drafting.proposed
        kept[: len(row.drafting.kept)] += row.drafting.kept
    return Measured(
        name,
        len(answers),
        sum(one.tokens == other.tokens for one, other in zip(answers, reference, strict=True)),
        int(tokens.sum()),
        int(forwards.sum()),
        float(tokens.sum() / forwards.sum()),
        float(ratio_error(ratio_residuals(tokens, forwards))),
        float(tokens.sum() / cycles) if cycles else None,
        float(tokens.sum() / seconds.sum()),
        float(slow.sum() / seconds.sum()),
        float(ratio_error(ratio_residuals(slow, seconds))),
        [float(value) for value in kept / np.maximum(proposed, 1)],
    )


def prompt_lookup(folder: Path, ends: Sequence[int], drafts: int) -> Callable[[list[int], int], Answered]:
    """The parent in `transformers`, which drafts by copying what followed the last tokens earlier."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    count = 0

    def counted(*_: Any) -> None:
        nonlocal count
        count += 1

    model.register_forward_hook(counted)

    def run(prompt: list[int], length: int) -> Answered:
        nonlocal count
        count, ids, began = 0, torch.tensor([prompt]), time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=False,
                prompt_lookup_num_tokens=drafts, eos_token_id=list(ends), pad_token_id=ends[0],
            )  # fmt: skip
        return Answered(out[0, len(prompt) :].tolist(), count, time.perf_counter() - began)

    return run


def write_toy(folder: Path) -> None:
    """A small network that reads bytes, with random weights, and templated sums."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import Qwen2Config, Qwen2ForCausalLM

    special = ["<|begin|>", "<|endoftext|>", "<|free|>", "<|im_start|>", "<|im_end|>"]
    torch.manual_seed(5)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=264, hidden_size=96, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=6,
            intermediate_size=256, max_position_embeddings=512, tie_word_embeddings=True,
            bos_token_id=256, eos_token_id=257, pad_token_id=257,
        )
    )  # fmt: skip
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.add_(0.1 * torch.randn(weight.shape))
    model.save_pretrained(folder / "base")
    vocabulary = {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    tokenizer.save(str(folder / "base" / "tokenizer.json"))
    template = (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    settings = {"eos_token": special[1], "pad_token": special[1], "chat_template": template}
    (folder / "base" / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **settings})
    )
    draw = random.Random(0)
    for name, count in (("train", 6000), ("test", 64)):
        rows = [_sum_in_words(draw) for _ in range(count)]
        if name == "test":
            rows = [{**row, "answer": row["answer"].split("#### ")[1], "grader": "number"} for row in rows]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _sum_in_words(draw: random.Random) -> dict[str, str]:
    name = draw.choice(["Tom", "Ann", "Mia", "Leo", "Sam", "Eve"])
    things = draw.choice(["apples", "books", "coins", "pens", "eggs"])
    first, more = draw.randint(2, 30), draw.randint(2, 30)
    both = first + more
    gone = draw.randint(1, both - 1)
    return {
        "question": f"{name} has {first} {things}, buys {more} more and gives away {gone}. How many {things} are left?",
        "answer": f"{name} has {first} + {more} = {both} {things}. After giving away {gone}, {both} - {gone} = {both - gone}"
        f" {things} are left. #### {both - gone}",
    }


def show(found: Sequence[Measured]) -> str:
    """A table in Markdown."""
    lines = [
        "| setting | equal texts | tokens per forward | kept per cycle | tokens/s | x autoregressive |",
        "|---|---|---|---|---|---|",
    ]
    for one in found:
        kept = "-" if one.kept_per_cycle is None else f"{one.kept_per_cycle:.2f}"
        lines.append(
            f"| {one.setting} | {one.equal} of {one.problems} | {one.tpf:.2f} ± {one.tpf_se:.2f} | {kept} |"
            f" {one.tokens_per_second:.1f} | {one.speedup:.2f} ± {one.speedup_se:.2f} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a converted model")
    parser.add_argument("--write-toy", action="store_true", help="write the toy to this directory, and end")
    parser.add_argument("--task", default="gsm8k")
    parser.add_argument("--data-dir")
    parser.add_argument("--limit", type=int, default=32)
    parser.add_argument("--gen-length", type=int, default=128)
    parser.add_argument("--draft", type=int, nargs="+", default=[8])
    parser.add_argument("--ends", type=int, nargs="+", default=[0])
    parser.add_argument("--threshold", type=float, nargs="+", default=[0.0])
    parser.add_argument("--rest", type=int, nargs="+", default=[0])
    parser.add_argument("--lookup", help="the parent's directory, to run prompt lookup with transformers")
    parser.add_argument("--out", type=Path, help="also write the numbers as JSON")
    given = parser.parse_args(arguments)
    if given.write_toy:
        write_toy(Path(given.model))
        return
    lm = tad.load(given.model, dtype="fp32")
    task = get_task(given.task, given.data_dir)
    prompts = [plain_ids(lm, task, example) for example in task.examples()[: given.limit]]
    settings = [
        {"draft": draft, "ends": ends, "threshold": threshold, "rest": rest}
        for draft, ends, threshold, rest in product(given.draft, given.ends, given.threshold, given.rest)
    ]
    lookup = None
    if given.lookup is not None:
        from tad.models.source import locate

        lookup = prompt_lookup(locate(given.lookup), lm.tokens.ends, max(given.draft))
    found = measure(lm, prompts, given.gen_length, settings, lookup)
    print(show(found))
    if given.out is not None:
        facts = {"machine": describe_machine(), "task": given.task, "gen_length": given.gen_length}
        given.out.write_text(json.dumps({**facts, "settings": [asdict(one) for one in found]}, indent=2))


if __name__ == "__main__":
    main()

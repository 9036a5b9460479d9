"""`tad generate`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tad.cli import options
from tad.cli.progress import Progress
from tad.errors import TadError
from tad.prompts import Question, read_questions

if TYPE_CHECKING:
    from rich.console import Console

    from tad.decoding import Decoder, StepCallback
    from tad.generation import Generation
    from tad.models import LM


def generate(
    model: options.Model,
    prompt: Annotated[
        str | None, typer.Argument(help="The question; '-' or nothing reads prompts from standard input.")
    ] = None,
    decoder: options.Decoder = None,
    gen_length: options.GenLength = None,
    adapter: options.Adapter = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    quantize: options.Quantize = None,
    seed: options.Seed = 0,
    settings: options.DecoderSettings = None,
    threshold: options.Threshold = None,
    temperature: options.Temperature = None,
    file: Annotated[
        Path | None, typer.Option(help='Prompts, one a line; or .jsonl with {"prompt"} or {"messages"}.')
    ] = None,
    ids: Annotated[str | None, typer.Option(help="A prompt of token ids, '1,2,3'; answers with ids.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts decoded at once.")] = 1,
    raw: Annotated[bool, typer.Option("--raw", help="Continue plain text, without the chat format.")] = False,
    allow_special: Annotated[
        bool, typer.Option("--allow-special", help="With --raw: control tokens written in the text count.")
    ] = False,
    as_json: options.AsJson = False,
    live: options.Live = True,
    svg: Annotated[
        Path | None, typer.Option(help="Also draw the canvas as a picture that plays (one prompt).")
    ] = None,
) -> None:
    """Answer a prompt, and watch the masks become tokens."""
    overrides = options.read_settings(settings, threshold=threshold, temperature=temperature)
    questions = read_questions(prompt, file, ids)
    if svg is not None and len(questions) > 1:
        raise TadError(f"--svg {svg}: a picture of one prompt, not of {len(questions)}")
    with options.busy(f"loading {model}"):
        from tad.decoding import get_decoder

        name, length, overrides = options.fill_defaults(model, adapter, decoder, gen_length, overrides)
        lm = options.load_model(model, adapter, device, dtype, to_decode=True, quantize=quantize)
    chosen = get_decoder(name, lm.family.name, **overrides)
    chosen.bind(lm)  # refused before any prompt is
    if ids is None and lm.tokenizer is None:
        raise TadError(f"{model}: has no tokenizer; give the prompt as token ids with --ids 1,2,3")
    for question in questions:
        if isinstance(question.prompt, str) and question.ids is None and not raw:
            warn_of_scope(model, question.prompt)
    encoded = [_encode(lm, chosen, question, length, raw, allow_special) for question in questions]
    chosen.bind(lm, length)  # after the prompts, so that the length it asks for fits behind them
    job = _Job(lm, chosen, length, seed, as_ids=ids is not None, model=model, adapter=adapter)
    terminal = sys.stdout.isatty()
    if terminal and live and not as_json and len(questions) == 1:
        job.show_live(encoded[0], svg, questions[0])
        return
    results = job.run(questions, encoded, batch_size)
    if not terminal and len(questions) > 1:  # the answers go somewhere else
        results = Progress().over(results, len(questions))
    for number, (question, answer) in enumerate(results):
        if svg is not None:
            job.draw(answer, svg, question)
        if as_json:
            typer.echo(json.dumps(job.as_record(question, answer), ensure_ascii=False))
            continue
        if number:
            typer.echo()
        if not terminal:
            typer.echo(job.spell_answer(answer))
            continue
        from tad.canvas.text import printable

        typer.echo(printable(job.spell_answer(answer)))
        typer.secho(summary(answer), dim=True)


def _encode(
    lm: LM, decoder: Decoder, question: Question, gen_length: int, raw: bool, allow_special: bool
) -> list[int]:
    from tad.decoding import advise_length
    from tad.generation import encode_prompt

    found = question.ids
    if found is None:
        try:
            found = encode_prompt(lm, question.prompt, raw=raw, allow_special=allow_special)
        except TadError as error:
            raise TadError(f"{question.where}: {str(error).removeprefix('prompt 0').lstrip(': ')}") from None
    if len(found) + gen_length > lm.context:
        raise TadError(
            f"{question.where}: {len(found)} tokens and --gen-length {gen_length} are more than the context of {lm.context}; "
            + advise_length(lm, decoder, len(found))
        )
    return found


# Decoding and printing


def warn_of_scope(model: str, question: str) -> None:
    """Say so where a bundled model is asked what it cannot know."""
    from tad.tasks.nano.samples import explain_scope

    if note := explain_scope(model, question):
        typer.secho(note, err=True, dim=True)


def summary(answer: Generation) -> str:
    """Forwards, tokens per forward by both definitions, and speed."""
    row = answer.decoded
    said = (
        f"{answer.forwards} forwards, {len(row.content)} tokens: {answer.tpf:.2f} per forward"
        f" ({answer.tpf_all:.2f} with the filler), {answer.tokens_per_second:.1f} tokens/s"
    )
    if row.drafting is None or row.kept_per_cycle is None:
        return said
    return (
        f"{said}; {row.drafting.accepted} of {row.drafting.drafted} drafted tokens kept,"
        f" {row.kept_per_cycle:.2f} tokens per cycle"
    )


@dataclass(frozen=True)
class _Job:
    lm: LM
    decoder: Decoder
    gen_length: int
    seed: int
    as_ids: bool
    model: str
    adapter: str | None

    def run(
        self, questions: list[Question], encoded: list[list[int]], batch_size: int
    ) -> Iterator[tuple[Question, Generation]]:
        """Answers in the order of the prompts, each batch as soon as it is done."""
        for low in range(0, len(questions), batch_size):
            batch = slice(low, low + batch_size)
            try:
                answers = self.answer(encoded[batch])
            except TadError as error:
                raise TadError(f"{questions[low].where}: {error}") from None
            yield from zip(questions[batch], answers, strict=True)

    def answer(self, prompts: list[list[int]], on_step: StepCallback | None = None) -> list[Generation]:
        from tad.generation import generate

        return generate(self.lm, prompts, self.decoder, self.gen_length, self.seed, on_step=on_step)

    def show_live(self, encoded: list[int], svg: Path | None, question: Question) -> None:
        from rich.console import Console

        from tad.canvas.terminal import Canvas, LiveCanvas
        from tad.canvas.text import printable

        console = Console()
        block = self.decoder.schedule.block
        canvas = Canvas(self.gen_length, block, self.spell, self.lm.tokens.ends, self.decoder.name)
        with LiveCanvas(canvas, console) as screen:
            (answer,) = self.answer([encoded], screen.take)
            canvas.finish(answer.decoded)
        _print_answer(console, printable(self.spell_answer(answer)), summary(answer))
        if svg is not None:
            self.draw(answer, svg, question)

    def draw(self, answer: Generation, path: Path, question: Question) -> None:
        from tad.canvas.svg import draw_svg
        from tad.files import write_whole

        adapter = f" with {self.adapter}" if self.adapter else ""
        asked = question.prompt if isinstance(question.prompt, str) and question.ids is None else ""
        title = f"{self.model}{adapter}, {self.decoder.name}"
        write_whole(path, draw_svg(answer.decoded, self.spell, title, question=asked))

    def spell(self, ids: list[int]) -> str:
        """Ids as they are shown on the canvas."""
        return " ".join(map(str, ids)) + " " if self.as_ids else self.lm.decode(ids, skip_special=False)

    def spell_answer(self, answer: Generation) -> str:
        return ",".join(map(str, answer.decoded.answer)) if self.as_ids else answer.text

    def as_record(self, question: Question, answer: Generation) -> dict[str, Any]:
        """One answer for machines."""
        from tad.decoding.decoders import describe, parameters

        row = answer.decoded
        return {
            "prompt": question.prompt if question.ids is None else question.ids,
            "text": None if self.lm.tokenizer is None else answer.text,
            "tokens": row.tokens,
            "steps": row.steps,
            "confidence": row.confidence,
            "forwards": row.forwards,
            "tpf": row.tpf,
            "tpf_all": row.tpf_all,
            "seconds": row.seconds,
            **({} if row.drafting is None else {"drafting": asdict(row.drafting)}),
            "seed": self.seed,
            "gen_length": self.gen_length,
            "decoder": {"name": self.decoder.name, **describe(self.decoder), **parameters(self.decoder)},
        }


def _print_answer(console: Console, text: str, facts: str) -> None:
    from rich.rule import Rule
    from rich.text import Text

    console.print(Rule(style="dim"))
    console.print(Text(text), soft_wrap=True)
    console.print(Rule(style="dim"))
    console.print(Text(facts, "bold"))

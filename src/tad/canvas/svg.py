"""The canvas as an SVG that plays: masks become tokens forward by forward, for pages that run no scripts.

One forward takes the same time in every picture, so two of them beside each other show which decoder is faster. End filler
is not drawn.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from html import escape

from tad.canvas.text import END, Spell, continues, printable, reveal_colour, spell_pieces
from tad.decoding import Decoded

_ADVANCE, _LINE, _SIZE, _MARGIN = 8.43, 24, 14, 14  # of the monospace font, in pixels
_ASKED = 3  # lines of the question, at most
_TICK, _REST = 0.15, 3.0  # seconds per forward, and with the whole text before it starts again
_STYLE = f"text{{font:{_SIZE}px ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,monospace;white-space:pre;dominant-baseline:central}}"


def draw_svg(
    row: Decoded, spell: Spell, title: str, columns: int = 88, seconds: float = 15.0, question: str = ""
) -> str:
    """The picture of a decoded row, under the question where one is given; it starts again after `seconds`, or later where
    there are many forwards."""
    asked = textwrap.wrap(printable(question), columns)
    if len(asked) > _ASKED:
        asked = [*asked[: _ASKED - 1], f"{asked[_ASKED - 1][: columns - 4]} ..."]
    top = (2 + len(asked)) * _LINE
    period = max(seconds, row.forwards * _TICK + _REST)
    names: dict[int, str] = {}  # by reveal step: the style of its tokens
    shapes: list[str] = []
    column = line = 0
    spelled = spell_pieces(row.content, spell, row.ends)
    pieces = [
        printable(END if token in row.ends else piece)
        for token, piece in zip(row.content, spelled, strict=True)
    ]
    words = _word_lengths(pieces)
    for step, text, word in zip(row.steps, pieces, words, strict=False):
        if column and column + min(word, columns) > columns:
            column, line = 0, line + 1
        names[step] = reveal_colour(max(step, 1), row.forwards)
        x, y = _MARGIN + column * _ADVANCE, top + line * _LINE
        width = max(1, len(text.strip("\n"))) * _ADVANCE
        shapes.append(
            f'<rect class="m{step}" x="{x:.1f}" y="{y - 8}" width="{width - 2:.1f}" height="16" rx="3"/>'
        )
        shown = text.strip("\n")
        fit = f' textLength="{width:.1f}" lengthAdjust="spacingAndGlyphs"' if shown else ""
        shapes.append(f'<text class="t{step}" x="{x:.1f}" y="{y}"{fit}>{escape(shown)}</text>')
        column, line = (0, line + text.count("\n")) if "\n" in text else (column + len(text), line)
    rules = [_STYLE]
    for step, colour in sorted(names.items()):
        at = 100 * step * _TICK / period
        rules.append(f".t{step}{{fill:{colour};animation:t{step} {period:.2f}s step-end infinite}}")
        rules.append(f".m{step}{{fill:#8884;opacity:0;animation:m{step} {period:.2f}s step-end infinite}}")
        rules.append(f"@keyframes t{step}{{0%{{opacity:0}}{at:.3f}%{{opacity:1}}}}")
        rules.append(f"@keyframes m{step}{{0%{{opacity:1}}{at:.3f}%{{opacity:0}}}}")
    rules.append("@media (prefers-reduced-motion:reduce){*{animation:none!important}}")
    width, height = round(2 * _MARGIN + columns * _ADVANCE), top + (line + 1) * _LINE
    end = row.forwards * _TICK
    count = f"{len(row.content)} tokens in {row.forwards} forwards, {row.tpf:.1f} per forward"
    bar = (
        f'<rect x="0" y="{height - 3}" width="{width}" height="3" fill="#8a63d2">'
        f'<animate attributeName="width" values="0;{width};{width}" keyTimes="0;{end / period:.4f};1" dur="{period:.2f}s" repeatCount="indefinite"/></rect>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">'
        f"<title>{escape(title)}: {count}</title><style>{''.join(rules)}</style>"
        f'<rect width="{width}" height="{height}" rx="8" fill="#1b1a22"/>'
        f'<text x="{_MARGIN}" y="{_LINE - 4}" fill="#cfcbe0">{escape(title)}   {count}</text>'
        f"{''.join(_draw_question(asked))}{''.join(shapes)}{bar}</svg>\n"
    )


def _word_lengths(pieces: Sequence[str]) -> list[int]:
    """Of each piece, the characters of the number or word that begins with it; 0 for what goes on with one."""
    found = [len(piece) for piece in pieces]
    for place in range(len(pieces) - 1, 0, -1):
        if continues(pieces[place - 1], pieces[place]):
            found[place - 1] += found[place]
            found[place] = 0
    return found


def _draw_question(lines: Sequence[str]) -> list[str]:
    return [
        f'<text x="{_MARGIN}" y="{(2 + number) * _LINE - 4}" fill="#8d88a3">{escape(line)}</text>'
        for number, line in enumerate(lines)
    ]

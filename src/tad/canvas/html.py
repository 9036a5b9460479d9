"""A decoded row as HTML, for notebooks: the colour of a token is the forward that revealed it, its strength the confidence."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from tad.canvas.text import END, printable, reveal_colour
from tad.decoding import Decoded

_FAINTEST = 0.35  # opacity of a token without any confidence


def draw_html(row: Decoded, pieces: Sequence[str], title: str = "") -> str:
    """The text with a tooltip per token, and a line of counts. `pieces` is the text of each position; end filler is left out."""
    spans = []
    for place, (token, piece) in enumerate(zip(row.content, pieces, strict=False)):
        shown = END if token in row.ends else printable(piece)
        if not shown:
            continue
        step, sure = row.steps[place], row.confidence[place]
        colour, opacity = reveal_colour(max(step, 1), row.forwards), _FAINTEST + (1 - _FAINTEST) * sure
        spans.append(
            f'<span title="position {place}, forward {step}, confidence {sure:.2f}" '
            f'style="background:{colour};opacity:{opacity:.2f};border-radius:3px">{escape(shown)}</span>'
        )
    counts = f"{len(row.content)} tokens in {row.forwards} forwards, {row.tpf:.2f} per forward"
    ramp = ",".join(reveal_colour(step, 5) for step in range(1, 6))
    return (
        '<div style="font-family:ui-monospace,monospace;line-height:1.7;max-width:60em">'
        f'<div style="white-space:pre-wrap;color:#111;background:#fff;padding:.4em">{"".join(spans)}</div>'
        f'<div style="font-size:85%">{escape(title)}{": " if title else ""}{counts}; forward 1 '
        f'<span style="display:inline-block;width:6em;height:.7em;background:linear-gradient(90deg,{ramp})"></span> '
        f"{row.forwards}; faint: low confidence</div></div>"
    )

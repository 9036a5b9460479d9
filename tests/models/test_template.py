"""Chat templates of strangers: rendered as transformers does, within a time and a memory that are not theirs to choose."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from tiny_checkpoints import write_checkpoint, write_llada_tokenizer

import tad
from tad.errors import TadError
from tad.models import LM, template

TALK = [{"role": "system", "content": " Be <brief>. "}, {"role": "user", "content": "Ünïcode\n'quoted'"}]
SAME = [
    "{% for m in messages %}{{ m.role }}: {{ m['content'] | trim }}\n{% endfor %}",
    "{%- for m in messages %}\n    {%- if loop.first %}\n{{ bos_token }}{% continue %}{% endif %}\n  {{ m | tojson }}\n{% endfor %}",
    "{% generation %}{{ messages | length }}{% endgeneration %}{{ messages[1].content | tojson(indent=2) }}",
    "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}{{ tools }}{{ nothing }}",
    "{{ strftime_now('%Y') }}{% if tools %}x{% endif %}{% set n = namespace(i=0) %}{% set n.i = n.i + 1 %}{{ n.i }}",
]
HOSTILE = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "powers": "{{ 9 ** (9 ** 9) }}",
    "memory": "{{ 'a' * 9999999999 }}",
    "memory in pieces": "{% set n = namespace(s='aaaaaaaa') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "divides": "{{ 1 / 0 }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "syntax": "{% for %}",
    "reaches out": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "long": "{{ 'a' * 99999999 }}",
}


def lm_with(folder: Path, text: str) -> LM:
    write_checkpoint(folder, "llada")
    write_llada_tokenizer(folder, chat_template=text)
    return tad.load(folder)


@pytest.mark.parametrize("text", SAME)
def test_the_same_text_as_transformers(tmp_path: Path, text: str) -> None:
    lm = lm_with(tmp_path, text)
    values = {**lm.tokenizer.special_tokens_map, "messages": TALK, "add_generation_prompt": True}
    wanted = lm.tokenizer.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
    assert template.render(text, {**values, "tools": None}) == wanted
    assert template.render_here(text, {**values, "tools": None}) == wanted


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_one_line_within_seconds_and_the_next_one_renders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(template, "SECONDS", 1.0)
    lm, start = lm_with(tmp_path, HOSTILE[name]), time.monotonic()
    with pytest.raises(TadError, match="chat template") as caught:
        lm.encode("hi")
    assert time.monotonic() - start < 40
    assert "\n" not in str(caught.value)
    assert template.render("{{ 1 + 1 }}", {}) == "2"


def test_one_worker_renders_what_is_asked_one_after_another() -> None:
    template.render("{{ x }}", {"x": 0})
    worker = template._WORKER.process
    assert worker is not None
    for number in range(200):
        assert template.render("{{ x }}", {"x": number}) == str(number)
    assert template._WORKER.process is worker


def test_a_forked_process_renders_on_its_own() -> None:
    assert template.render("{{ x }}", {"x": 1}) == "1"
    child = os.fork()
    if child == 0:
        os._exit(0 if template.render("{{ x }}", {"x": 2}) == "2" else 1)
    assert template.render("{{ x }}", {"x": 3}) == "3"
    assert os.waitpid(child, 0)[1] == 0

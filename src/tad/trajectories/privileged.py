"""Privileged prompts as chats: the question with its reference, as only the teacher sees it.

`rollout` is the form trajectories are collected with (reference and instruction in the user turn) and, by default,
also the teacher's in distillation. `system` is the form the published trainer used: the reference in a system turn.
"""

from __future__ import annotations

from typing import Literal

from tad.errors import TadError
from tad.models import LM
from tad.tasks import Example, Prompt, Task
from tad.tasks.task import EXPLAIN, privileged_prompt

Form = Literal["rollout", "system"]


def plain_ids(lm: LM, task: Task, example: Example, template: str = "tad") -> list[int]:
    """The student's prompt: a chat, or the bare text where the template is one."""
    prompt = task.prompt(example, template)
    if prompt.raw:
        return lm.encode_text(prompt.text + prompt.prefix)
    return lm.encode(_chat(prompt), prompt.prefix)


def privileged_ids(
    lm: LM, task: Task, example: Example, reference: str, form: Form = "rollout", template: str = "tad"
) -> list[int]:
    """The teacher's prompt, with `reference` in it: always a chat."""
    prompt = task.prompt(example, template)
    if prompt.raw:
        raise TadError(
            f"task '{task.name}': template '{template}' has no chat to put a reference in; use another"
        )
    if form == "rollout":
        shown = privileged_prompt(example.question, reference, task.instruction or EXPLAIN)
        return lm.encode(_chat(shown), prompt.prefix)
    return lm.encode([lm.family.reference_turn(reference), *_chat(prompt)], prompt.prefix)


def _chat(prompt: Prompt) -> list[dict[str, str]]:
    """The messages without the prefix, which is encoded after them as it stands."""
    return [{"role": message.role, "content": message.content} for message in prompt.messages]

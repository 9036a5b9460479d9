"""The privileged prompt: the question together with its reference answer, as only a teacher sees it.

One form for every task, so that collection, training and evaluation of the teacher agree word for word.
"""

from __future__ import annotations

from tad.tasks.task import Prompt

EXPLAIN = "Make sure you understand the reference answer, then solve the question yourself and write down every step in detail."
CODE_ONLY = "Make sure you understand the reference answer, then solve the question yourself. Write only the code, no explanation."


def privileged_prompt(question: str, reference: str, instruction: str = EXPLAIN) -> Prompt:
    """One user turn: question, reference answer, and what to do with it."""
    return Prompt.from_user(f"Question: {question}\nReference Answer: {reference}\n{instruction}")

"""Our benchmarks as tasks of lm-evaluation-harness: the prompts and graders of `tad.tasks`, one YAML file per template.

A YAML file names a benchmark and a template in its `metadata`; `data_dir` may be given there too (the harness's
`--metadata`), else TAD_DATA or the hub is used. Programs run in our sandbox: the harness's own execution is never called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from datasets import Dataset
from lm_eval.api.task import ConfigurableTask

from tad.tasks import Example, Verdict, get_task
from tad.tasks import Task as Benchmark

SPLIT = "test"


class TadTask(ConfigurableTask):
    """One benchmark under one template."""

    def __init__(self, config: dict[str, Any]) -> None:
        metadata = config["metadata"]
        self.benchmark: Benchmark = get_task(metadata["benchmark"], metadata.get("data_dir"))
        self.template: str = metadata["template"]
        self.examples: dict[str, Example] = {}
        self.verdicts: dict[tuple[str, str], Verdict] = {}
        super().__init__(config={key: value for key, value in config.items() if key != "class"})

    def download(self, dataset_kwargs: dict[str, Any] | None = None, **unused: Any) -> None:
        """Read the examples; a document is an example's id and its prompt."""
        self.examples = {example.id: example for example in self.benchmark.examples(SPLIT)}
        prompts = {
            name: self.benchmark.prompt(example, self.template) for name, example in self.examples.items()
        }
        self.dataset = {
            SPLIT: Dataset.from_list(
                [
                    {
                        "id": name,
                        "text": prompt.text,
                        "prefix": prompt.prefix,
                        "raw": prompt.raw,
                        "answer": str(self.examples[name].answer),
                    }
                    for name, prompt in prompts.items()
                ]
            )
        }

    def fewshot_context(
        self,
        doc: dict[str, Any],
        num_fewshot: int,
        system_instruction: str | None = None,
        apply_chat_template: bool = False,
        fewshot_as_multiturn: bool = False,
        chat_template: Callable[..., str] | None = None,
        gen_prefix: str | None = None,
    ) -> str:
        """The prompt as text. A raw template stays plain whatever the run does with the others."""
        if doc["raw"]:
            return str(doc["text"] + doc["prefix"])
        context = super().fewshot_context(
            doc,
            num_fewshot=num_fewshot,
            system_instruction=system_instruction,
            apply_chat_template=apply_chat_template,
            fewshot_as_multiturn=fewshot_as_multiturn,
            chat_template=chat_template,
            gen_prefix=gen_prefix,
        )
        return str(context)

    def apply_filters(self) -> None:
        """Grade all texts at once, so that slow graders use every core."""
        super().apply_filters()
        pairs = [
            (instance.doc["id"], text)
            for instance in self.instances
            for text in instance.filtered_resps.values()
        ]
        verdicts = self.benchmark.grade_many([(self.examples[name], text) for name, text in pairs])
        self.verdicts |= dict(zip(pairs, verdicts, strict=True))

    def process_results(self, doc: dict[str, Any], results: list[str]) -> dict[str, float]:
        key = (doc["id"], results[0])
        if key not in self.verdicts:
            self.verdicts[key] = self.benchmark.grade(self.examples[key[0]], key[1])
        return {"acc": float(self.verdicts[key].correct)}

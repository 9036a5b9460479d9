"""The model `tad` of lm-evaluation-harness: our decoders and the published likelihood estimate behind its interface.

Importing this module registers the name. Covers `generate_until` and `loglikelihood`, with or without the chat format (the
harness's `apply_chat_template`); running text has no likelihood here. One process; generated texts equal those of
`tad.generation`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from tqdm import tqdm

from tad.decoding import Decoded, Decoder, decode, get_decoder
from tad.decoding.decoders import parameters
from tad.errors import TadError
from tad.evaluation.lm_eval.likelihood import decodes_greedily, estimate_loglikelihood
from tad.models import LM, Message, load
from tad.models.tokenizer import adds_bos, encode_rendered, escape_control, render_chat

_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_SAMPLING = ("temperature", "top_p", "top_k")


@dataclass
class Totals:
    """What generation has cost so far."""

    texts: int = 0
    forwards: int = 0
    content: int = 0  # tokens up to and including the first end token
    positions: int = 0

    def add(self, row: Decoded) -> None:
        self.texts += 1
        self.forwards += row.forwards
        self.content += len(row.content)
        self.positions += len(row.tokens)


@dataclass(frozen=True)
class Order:
    """What a request asks of generation."""

    limit: int  # tokens
    stop: tuple[str, ...] = ()
    overrides: dict[str, Any] = field(default_factory=dict)  # parameters of the decoder

    @classmethod
    def read(cls, given: dict[str, Any], default_limit: int) -> Order:
        """From the harness's generation arguments; what it has no name for is a parameter of the decoder."""
        rest = dict(given)
        until = rest.pop("until", None) or []
        limits = [rest.pop(name, None) for name in _LENGTHS]
        limit = next((limit for limit in limits if limit is not None), default_limit)
        if not isinstance(limit, int) or limit < 1:
            raise TadError(f"generation_kwargs: max_gen_toks should be a positive integer, not {limit!r}")
        sample = rest.pop("do_sample", None)
        sampling = {name: rest.pop(name) for name in _SAMPLING if rest.get(name) is not None}
        if sample or (sample is None and sampling.get("temperature")):
            rest |= {"temperature": 1.0, **sampling}
        return cls(limit, (until,) if isinstance(until, str) else tuple(until), rest)


# A noncharacter in front of rendered chats: the harness hands texts back, and chats and documents are encoded differently.
_CHAT = "\U0010fffe"


@register_model("tad")
class TadLM(TemplateLM):
    """`pretrained` is a directory, a hub id or a loaded `tad.models.LM`; `overrides` are parameters of the decoder.

    `gen_length` holds where a task names no maximum; it and the decoder are the model's own where they are not given. `mc_draws` masks estimate a likelihood; `check_greedy` also decodes
    each continuation, which only tasks with exact-match scores on likelihoods look at.
    """

    def __init__(
        self,
        pretrained: str | Path | LM,
        adapter: str | None = None,
        decoder: str | Decoder | None = None,
        gen_length: int | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
        dtype: str | None = None,
        revision: str | None = None,
        seed: int = 0,
        mc_draws: int = 128,
        check_greedy: bool = True,
        **overrides: Any,
    ) -> None:
        super().__init__()
        if overrides.pop("trust_remote_code", False):
            raise TadError("trust_remote_code: tad runs no remote code; leave it out")
        if not str(batch_size).isdigit() or int(batch_size) < 1:
            raise TadError(
                f"batch_size {batch_size}: should be a positive integer; there is no automatic one"
            )
        if mc_draws < 1:
            raise TadError(f"mc_draws {mc_draws}: should be at least 1")
        if decoder is not None:
            get_decoder(decoder, **overrides)  # a wrong name is refused before the weights are read
        self.lm = pretrained if isinstance(pretrained, LM) else load(
            pretrained, adapter=adapter, device=device, dtype=dtype, revision=revision
        )  # fmt: skip
        if self.lm.tokenizer is None:
            raise TadError(f"{self.lm.source}: has no tokenizer, and the harness speaks in texts")
        chosen, self.gen_length, overrides = self.lm.defaults.fill(decoder, gen_length, overrides)
        self.decoder = get_decoder(chosen, self.lm.family.name, **overrides)
        self.batch_size, self.seed = int(batch_size), seed
        self.mc_draws, self.check_greedy = mc_draws, check_greedy
        self.totals = Totals()
        self.tokenizer = self.lm.tokenizer
        self._device = self.lm.device

    # Text

    @property
    def eot_token_id(self) -> int:
        return int(self.lm.tokens.eos)

    @property
    def prefix_token_id(self) -> int:
        """What stands in for an empty context."""
        bos = self.lm.tokens.bos
        return self.eot_token_id if bos is None else int(bos)

    @property
    def max_length(self) -> int:
        return self.lm.context

    @property
    def tokenizer_name(self) -> str:
        return self.lm.source.strip("/").replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **unused: Any) -> list[int]:
        """Ids of a text and nothing around it; control tokens count only where a chat template put them."""
        if string.startswith(_CHAT):
            return encode_rendered(self.tokenizer, string.removeprefix(_CHAT))
        return self.lm.encode_text(string)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        if context.startswith(_CHAT):
            continuation = escape_control(self.tokenizer, continuation)
        return super()._encode_pair(context, continuation)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template in use, for the harness's record."""
        return str(self.tokenizer.chat_template or self.lm.family.chat_template) if chat_template else None

    def apply_chat_template(self, chat_history: list[Message], add_generation_prompt: bool = True) -> str:
        """The conversation as text up to the first generated token; `tok_encode` gives the ids of `LM.encode`."""
        messages, prefix = list(chat_history), ""
        if not add_generation_prompt:
            if not messages or messages[-1]["role"] != "assistant":
                raise TadError("a conversation to continue should end with the assistant")
            prefix = messages.pop()["content"]
        text = render_chat(self.tokenizer, self.lm.family, messages, prefix)
        bos = self.tokenizer.bos_token
        return _CHAT + (bos + text if adds_bos(self.tokenizer) and not text.startswith(bos) else text)

    # Requests

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Texts of contexts, cut at the stop strings one after the other.

        Equal requests (a task's repeats) get seeds of their own, which matters with a temperature.
        """
        orders = [Order.read(request.args[1], self.gen_length) for request in requests]
        prompts = [self.tok_encode(request.args[0]) for request in requests]
        seen: Counter[int] = Counter()
        seeds = []
        for request in requests:
            seeds.append(self.seed + seen[id(request)])
            seen[id(request)] += 1
        groups: dict[str, list[int]] = {}
        for number, order in enumerate(orders):
            groups.setdefault(repr((order.limit, sorted(order.overrides.items()))), []).append(number)
        texts: dict[int, str] = {}
        with tqdm(total=len(requests), desc="generate_until", disable=disable_tqdm) as bar:
            for members in groups.values():
                members.sort(key=lambda number: len(prompts[number]))
                for low in range(0, len(members), self.batch_size):
                    batch = members[low : low + self.batch_size]
                    rows = self._decode(
                        [prompts[n] for n in batch], [seeds[n] for n in batch], orders[batch[0]]
                    )
                    for number, row in zip(batch, rows, strict=True):
                        texts[number] = self._read(row, orders[number])
                        self.cache_hook.add_partial("generate_until", requests[number].args, texts[number])
                    bar.update(len(batch))
        return [texts[number] for number in range(len(requests))]

    def _decode(self, prompts: list[list[int]], seeds: list[int], order: Order) -> list[Decoded]:
        decoder = get_decoder(self.decoder, self.lm.family.name, **order.overrides)
        block = decoder.schedule.block or 1
        length = math.ceil(order.limit / block) * block  # whole blocks; what is over the limit is not read
        return decode(self.lm, prompts, decoder, length, seeds)

    def _read(self, row: Decoded, order: Order) -> str:
        self.totals.add(row)
        text = self.lm.decode(row.answer[: order.limit])
        for stop in order.stop:
            text = text.split(stop, 1)[0]
        return text

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **unused: Any,
    ) -> list[tuple[float, bool]]:
        found = []
        for texts, context, target in tqdm(requests, desc="loglikelihood", disable=disable_tqdm):
            value = estimate_loglikelihood(
                self.lm, context, target, self.mc_draws, self.batch_size, self.seed
            )
            greedy = self.check_greedy and decodes_greedily(self.lm, context, target)
            found.append((value, greedy))
            self.cache_hook.add_partial("loglikelihood", texts, found[-1])
        return found

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        raise TadError(
            "loglikelihood_rolling: a masked diffusion model gives no likelihood of running text (perplexity);"
            " use tasks that generate or compare continuations"
        )

    def get_model_info(self) -> dict[str, Any]:
        """For the harness's record of a run: what decoded, and at what cost."""
        totals = self.totals
        return {
            "model_source": self.lm.source,
            "adapter": self.lm.adapter,
            "decoder": {"name": self.decoder.name, **parameters(self.decoder)},
            "gen_length": self.gen_length,
            "mc_draws": self.mc_draws,
            "texts": totals.texts,
            "forwards": totals.forwards,
            "tpf": totals.content / totals.forwards if totals.forwards else None,
            "tpf_all": totals.positions / totals.forwards if totals.forwards else None,
        }

"""What makes a family: the facts the rest of the package asks for, so that it never asks which family it has.

Shapes are not here, and special token ids only for want of others: both come from the checkpoint's own directory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tad.errors import TadError
from tad.models.autoregressive import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from tad.models.layers import Names
from tad.models.llada import LLaDAConfig, LLaDAModelLM
from tad.models.llada2 import LLaDA2MoeConfig, LLaDA2MoeModelLM
from tad.models.qwen import DreamConfig, DreamModel, Fast_dLLM_QwenForCausalLM, FastDLLMConfig
from tad.models.sdar import SDARConfig, SDARForCausalLM, SDARMoeConfig, SDARMoeForCausalLM
from tad.models.shape import NO_TOKEN
from tad.models.transformer import MaskedDiffusionModel

# Rendered text: <bos><header>role</header>\n\ncontent<eot>..., then the assistant's header.
_LLADA_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and bos_token %}{{ bos_token }}{% endif %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + (message['content'] | trim) + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# ChatML, with the default system turn of Qwen2.5 where the conversation has none.
_QWEN_TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}"
    "{% endif %}"
) + _CHATML
# <role>NAME</role>content<|role_end|>...; there always is a system turn, and thinking is off.
_LLADA2_TEMPLATE = (
    "{{ '<role>SYSTEM</role>' }}"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\\n' }}{% endif %}"
    "{{ 'detailed thinking off<|role_end|>' }}"
    "{% for message in messages %}{% if message['role'] != 'system' %}"
    "{{ '<role>' + ('HUMAN' if message['role'] == 'user' else 'ASSISTANT') + '</role>' + message['content'] + '<|role_end|>' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<role>ASSISTANT</role>' }}{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """The facts of one family."""

    name: str
    config_class: type[Any]
    model_class: type[MaskedDiffusionModel]
    logit_shift: int  # the logits for position i are the output of position i - logit_shift
    mask_text: str  # how the tokenizer writes these, where the config does not give the id
    end_of_turn_text: str
    assistant_header: str  # how the chat format opens the assistant's turn
    chat_template: str  # used where the directory has none; "" where each checkpoint has its own
    mask_token_id: int  # as released; for directories in which neither config nor tokenizer names them
    eos_token_id: int
    decoder: str = "tad"  # for who names none
    system: str = ""  # what a system turn of the family starts with before a reference

    def reference_turn(self, reference: str) -> dict[str, str]:
        """The system turn in which the published trainers show a teacher the reference."""
        return {"role": "system", "content": self.system + f"Reference Answer: {reference}"}

    @property
    def model_type(self) -> str:
        return str(self.config_class.model_type)

    @property
    def names(self) -> Names:
        return self.model_class.names


LLADA = Family(
    name="llada",
    config_class=LLaDAConfig,
    model_class=LLaDAModelLM,
    logit_shift=0,
    mask_text="<|mdm_mask|>",
    end_of_turn_text="<|eot_id|>",
    assistant_header="<|start_header_id|>assistant<|end_header_id|>\n\n",
    chat_template=_LLADA_TEMPLATE,
    mask_token_id=126336,
    eos_token_id=126081,
)
DREAM = Family(
    name="dream",
    config_class=DreamConfig,
    model_class=DreamModel,
    logit_shift=1,
    mask_text="<|mask|>",
    end_of_turn_text="<|im_end|>",
    assistant_header="<|im_start|>assistant\n",
    chat_template=_QWEN_TEMPLATE,
    mask_token_id=151666,
    eos_token_id=151643,
    system="You are a helpful assistant.\n\n",
)
FAST_DLLM_V2 = replace(
    DREAM,
    name="fast-dllm-v2",
    config_class=FastDLLMConfig,
    model_class=Fast_dLLM_QwenForCausalLM,
    mask_text="|<MASK>|",
    mask_token_id=151665,
    eos_token_id=151645,
    decoder="fast-dllm-v2",
)
SDAR = Family(
    name="sdar",
    config_class=SDARConfig,
    model_class=SDARForCausalLM,
    logit_shift=0,
    mask_text="<|MASK|>",
    end_of_turn_text="<|im_end|>",
    assistant_header="<|im_start|>assistant\n",
    chat_template=_CHATML,
    mask_token_id=151669,
    eos_token_id=151643,
    decoder="sdar",
)
SDAR_MOE = replace(SDAR, name="sdar-moe", config_class=SDARMoeConfig, model_class=SDARMoeForCausalLM)
LLADA2 = Family(
    name="llada2",
    config_class=LLaDA2MoeConfig,
    model_class=LLaDA2MoeModelLM,
    logit_shift=0,
    mask_text="<|mask|>",
    end_of_turn_text="<|role_end|>",
    assistant_header="<role>ASSISTANT</role>",
    chat_template=_LLADA2_TEMPLATE,
    mask_token_id=156895,
    eos_token_id=156892,
    decoder="llada2",
)
# Autoregressive checkpoints bring their own chat format; they have a mask token only once they are converted.
LLAMA = Family(
    name="llama",
    config_class=LlamaConfig,
    model_class=LlamaForCausalLM,
    logit_shift=1,
    mask_text="",
    end_of_turn_text="<|eot_id|>",
    assistant_header="",
    chat_template="",
    mask_token_id=NO_TOKEN,
    eos_token_id=NO_TOKEN,
    decoder="autoregressive",
)
QWEN2 = replace(
    LLAMA,
    name="qwen2",
    config_class=Qwen2Config,
    model_class=Qwen2ForCausalLM,
    end_of_turn_text="<|im_end|>",
)
QWEN3 = replace(QWEN2, name="qwen3", config_class=Qwen3Config, model_class=Qwen3ForCausalLM)
AUTOREGRESSIVE = (LLAMA, QWEN2, QWEN3)
FAMILIES = {
    family.model_type: family
    for family in (LLADA, DREAM, FAST_DLLM_V2, SDAR, SDAR_MOE, LLADA2, *AUTOREGRESSIVE)
}


def family_named(name: str) -> Family:
    """A family by the name recipes and options give it."""
    for family in FAMILIES.values():
        if family.name == name:
            return family
    raise TadError(f"family '{name}' is not known; known: {', '.join(f.name for f in FAMILIES.values())}")


def family_of(model_type: object, where: str = "config.json") -> Family:
    """The family of a config's `model_type`."""
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        causal = [family.model_type for family in AUTOREGRESSIVE]
        others = sorted(FAMILIES.keys() - set(causal))
        raise TadError(
            f"{where}: model_type {model_type!r:.40} is not supported; known: {', '.join(others)};"
            f" autoregressive: {', '.join(causal)}"
        )
    return FAMILIES[model_type]

"""A new model family: LLaDA's network under other names, with outputs that predict the next position.

    python examples/family.py runs/mine          # writes a small random checkpoint, loads it and decodes

A family is a config (which field of config.json holds which size), a model class (where a checkpoint keeps each part) and the
facts of `Family`: special tokens, the chat format, the shift of the logits. There is one network for all of them; loading,
decoding, training, export and serving ask the family and nothing else.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import AutoConfig, AutoModel

import tad
from tad.decoding import decode
from tad.models import FAMILIES, LLADA, LLaDAConfig, MaskedDiffusionModel
from tad.models.llada import NAMES
from tad.models.shapes import build


class MineConfig(LLaDAConfig):
    """What config.json says under other names than LLaDA's goes into `_sizes`: our name -> its field."""

    model_type = "mine"
    _sizes: ClassVar[dict[str, str]] = {**LLaDAConfig._sizes, "mlp": "ffn_size"}
    ffn_size: int | None = None

    @property
    def shape(self) -> Any:
        return self.read_shape(kv_heads=self.n_kv_heads or self.n_heads, mlp=self.ffn_size, qkv_bias=False)


class MineModel(MaskedDiffusionModel):
    """The class that config.json's `architectures` names; `names` are the keys of its weights."""

    config_class = MineConfig
    names = replace(
        NAMES, embed="embed", layers="blocks", norm="final_norm", head="lm_head", down="down_proj"
    )


MINE = replace(LLADA, name="mine", config_class=MineConfig, model_class=MineModel, logit_shift=1)

FAMILIES[MINE.model_type] = MINE  # from here on `tad.load` knows it
AutoConfig.register(MINE.model_type, MineConfig)
AutoModel.register(MineConfig, MineModel)


SIZES = {"width": 64, "layers": 2, "heads": 4, "kv_heads": 2, "mlp": 96, "vocab": 64, "context": 256}


def write_random(folder: Path) -> Path:
    """A checkpoint as one would download it, without a tokenizer."""
    config = MineConfig.from_sizes(**SIZES, mask_token_id=62, eos_token_id=63)
    build(config, "cpu", torch.float32, seed=0).save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    lm = tad.load(write_random(given.folder), device="cpu")
    row = decode(lm, [[1, 2, 3]], "tad", 32)[0]
    print(f"{lm}: {row.forwards} forwards for {len(row.tokens)} positions")


if __name__ == "__main__":
    main()

"""One process of a distillation on several, as torchrun starts it: `distill_process.py WORLD OUT CHANGES`.

Rank 0 leaves the gradient of the last step (where it can be read) and the number of processes in OUT/seen.pt.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from accelerate import DistributedType, PartialState
from tiny_store import recipe

from tad.training import distill as module
from tad.training.distill import distill
from tad.training.trainer import LossTrainer

seen: dict[str, Any] = {}
clip = LossTrainer._clip_grad_norm


def keep(self: LossTrainer, model: Any) -> Any:
    parameters = self.accelerator.unwrap_model(self.model).student.named_parameters()
    found = {name: p.grad for name, p in parameters if p.requires_grad and p.grad is not None}
    seen["gradient"] = {
        name: (g.full_tensor() if hasattr(g, "full_tensor") else g).clone() for name, g in found.items()
    }
    seen["sharded"] = any(hasattr(g, "full_tensor") for g in found.values())
    seen["engine"] = type(model).__name__
    return clip(self, model)


def shard_on_cpus() -> None:
    """accelerate shards only where it sees GPUs; the sharding itself works on CPUs too, so it is told a tale."""
    arguments = module.training_arguments

    def as_if_on_gpus(*given: Any) -> Any:
        made = arguments(*given)
        assert made.device.type == "cpu"  # asking sets the processes up
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        return made

    module.training_arguments = as_if_on_gpus


def communicate_by_gloo() -> None:
    """DeepSpeed compiles an operator for processes of one machine at first use; gloo needs no compiler."""
    from deepspeed.ops import __compatible_ops__

    __compatible_ops__["deepspeed_shm_comm"] = False


if __name__ == "__main__":
    root, out, changes = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    resume, stop_at = changes.pop("resume", False), changes.pop("stop_at", None)
    if changes.get("distributed") == "fsdp":
        shard_on_cpus()
    if changes.get("distributed") == "deepspeed":
        communicate_by_gloo()
    LossTrainer._clip_grad_norm = keep  # type: ignore[method-assign]
    distill(recipe(root, **changes), out, resume=resume, stop_at=stop_at, quiet=True)
    seen["processes"] = dist.get_world_size() if dist.is_initialized() else 1
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(seen, out / "seen.pt")
    if dist.is_initialized():
        dist.destroy_process_group()

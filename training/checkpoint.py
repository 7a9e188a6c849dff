"""What training goes on from: master weights and what the optimizers remember, beside the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

STATE = "training.safetensors"
MASTER = "master"  # what a weight in float32 is called, beside the names of the optimizers


def save_checkpoint(
    masters: Mapping[str, Parameter], optimizers: Sequence[Optimizer], out: Path
) -> None:
    """Write all of it, in one step: a stop leaves the file of before or this one."""
    state = {f"{MASTER} {name}": weight.detach().cpu() for name, weight in masters.items()}
    for name, weight, optimizer in _optimized_weights(masters, optimizers):
        for key, value in optimizer.state[weight].items():
            state[f"{key} {name}"] = torch.as_tensor(value).detach().cpu().contiguous()
    part = out / f"{STATE}.part"
    save_file(state, part)
    part.replace(out / STATE)


def load_checkpoint(
    masters: Mapping[str, Parameter], optimizers: Sequence[Optimizer], start: Path
) -> bool:
    """Take over what `save_checkpoint` wrote; False, and nothing changed, where a folder holds
    none.
    """
    if not (start / STATE).is_file():
        return False
    state = load_file(start / STATE)
    with torch.no_grad():
        for name, weight, optimizer in _optimized_weights(masters, optimizers):
            weight.copy_(state[f"{MASTER} {name}"])
            optimizer.state[weight] = _optimizer_state(name, state, weight)
    return True


def _optimizer_state(
    name: str, state: Mapping[str, Tensor], weight: Parameter
) -> dict[str, Tensor]:
    """What an optimizer remembers of one weight; counts stay on the host."""
    found: dict[str, Tensor] = {}
    for key, value in state.items():
        kind, _, owner = key.partition(" ")
        if owner == name and kind != MASTER:
            found[kind] = value.to(weight.device) if value.dim() else value
    return found


def _optimized_weights(
    masters: Mapping[str, Parameter], optimizers: Sequence[Optimizer]
) -> Iterator[tuple[str, Parameter, Optimizer]]:
    """Each weight by name with the optimizer that updates it."""
    names = {id(weight): name for name, weight in masters.items()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for weight in group["params"]:
                yield names[id(weight)], weight, optimizer

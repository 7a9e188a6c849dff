"""The stores of a sequence as tensors by name, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from larder.cache.base import Store
from larder.cache.checking import check_ledger
from larder.cache.columns import remembered
from larder.cache.graded import saved_codecs
from larder.cache.latest import is_latest
from larder.cache.layers import Makeup
from larder.cache.parking import INDEX, OBSERVED, PARKING, SLOW
from larder.core.errors import CacheError
from larder.core.spec import ModelSpec


def told(stores: Sequence[Store]) -> dict[str, Tensor]:
    """Copies of all tensors, without slack."""
    return {
        f"{index}.{name}": tensor
        for index, store in enumerate(stores)
        for name, tensor in store.state().items()
    }


def is_slow(name: str) -> bool:
    """Whether a tensor of a sequence's state is of a slow tier: entries, or what finds them."""
    return name.partition(".")[2].startswith((SLOW, INDEX, OBSERVED, PARKING))


def layer_of(name: str) -> int | None:
    """The layer that a tensor of a sequence's state belongs to; None for one of no layer."""
    index = name.partition(".")[0]
    return int(index) if index.isdecimal() else None


def handed_over(
    stores: list[Store], makeup: Makeup, spec: ModelSpec, place: torch.device
) -> dict[str, Tensor]:
    """All tensors, moved to another place layer by layer; the stores are empty afterwards.

    Never more than one layer is held twice. Interrupted, the stores are as before, but not linked.
    """
    handed: dict[str, Tensor] = {}
    given: list[int] = []
    try:
        for index, store in enumerate(stores):
            own = store.state()
            handed |= {f"{index}.{name}": own[name].to(place) for name in own}
            stores[index] = makeup.store(store.layer, spec)
            given.append(index)
    except BaseException:
        for index in given:
            empty = stores[index]
            stores[index] = empty.adopt(empty.layer, _of_layer(handed, index, spec))
        raise
    return handed


def filled(
    stores: Sequence[Store],
    makeup: Makeup,
    spec: ModelSpec,
    state: Mapping[str, Tensor],
    fill: Callable[[Store, dict[str, Tensor]], Store],
) -> list[Store]:
    """What empty stores become by a saved state; they are to be linked.

    Raises:
        CacheError: the state has fewer layers, or others than the makeup says.
    """
    full: list[Store] = []
    for index, store in enumerate(stores):
        own = _of_layer(state, index, spec)
        if not own:
            raise CacheError(
                f"The saved cache has no layer {index}, but the model has "
                f"{len(spec.layers)} layers: it belongs to another model."
            )
        if store.layer in spec.managed:
            _check(makeup, index, own)
        full.append(fill(store, own))
    return full


def _of_layer(state: Mapping[str, Tensor], index: int, spec: ModelSpec) -> dict[str, Tensor]:
    """One layer's tensors on the model's device; lengths and what was parked stay on the host."""
    prefix, host = f"{index}.", torch.device("cpu")
    stays = (f"{prefix}{SLOW}", f"{prefix}{INDEX}", f"{prefix}{OBSERVED}")
    own = {n: t for n, t in state.items() if n.startswith(prefix) and not is_latest(n)}
    is_host = {name: name.endswith(".lengths") or name.startswith(stays) for name in own}
    return {
        name.removeprefix(prefix): t.to(host if is_host[name] else spec.device)
        for name, t in own.items()
    }


def _check(makeup: Makeup, index: int, state: Mapping[str, Tensor]) -> None:
    """See that a saved managed layer is what its cache's description says.

    Raises:
        CacheError: it remembers other numbers, or holds other grades of precision.
    """
    check_ledger(makeup.ledger, index, remembered(state))
    found = saved_codecs(state)
    if found != makeup.codecs:
        raise CacheError(
            f"Layer {index} of the saved cache has {len(found)} coded grades, but they are not the "
            f"{len(makeup.codecs)} of its description: build the cache again."
        )

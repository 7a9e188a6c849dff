"""Registry of model families: the rows of the support table, each with a tiny random model.

Rows lie in the modules `families_*` beside this one; a new module is found by its name. Every row
is tested by `test_families`, and `support_table` writes the table of the documentation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers

from tiny_models import SPREAD, spread_vectors

FOLDER = Path(__file__).parent
# Module whose rows come first in the table.
FIRST = "families_dense"


class Status(Enum):
    """Support of a family, as the table prints it."""

    SUPPORTED = "yes"
    REFUSED = "refused"


@dataclass(frozen=True)
class Family:
    """Model family of transformers.

    Args:
        name: as the table prints it.
        models: published models of the family.
        layers: kinds of layers that the family has.
        architecture: class of transformers with a language-model head.
        config: its configuration, with tiny sizes.
        note: limits, with the way out.
        refusal: regular expression that the message of the refusal contains, for refused families.
    """

    name: str
    models: str
    layers: str
    architecture: str
    config: Callable[[], Any]
    status: Status = Status.SUPPORTED
    note: str = ""
    refusal: str = ""

    def model(self, dtype: torch.dtype = torch.float32) -> Any:
        """Random model in eval mode, the same at every call."""
        kind = getattr(transformers, self.architecture)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            module = kind(self.config())
            spread_vectors(module)
        return module.to(dtype).eval()


def configured(name: str, **options: Any) -> Callable[[], Any]:
    """Builder of a configuration of transformers with the sizes of `TINY`, changed by options."""
    return lambda: getattr(transformers, name)(**(TINY | options))


TINY: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": SPREAD,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@cache
def families() -> tuple[Family, ...]:
    """All rows, in the order of the table."""
    names = sorted(path.stem for path in FOLDER.glob("families_*.py"))
    names.sort(key=lambda name: name != FIRST)
    return tuple(row for name in names for row in import_module(f"architectures.{name}").FAMILIES)


def with_status(status: Status) -> list[Family]:
    """Rows of one status."""
    return [family for family in families() if family.status is status]

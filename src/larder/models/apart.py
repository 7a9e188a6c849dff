"""Configurations of a model's own, so that models which share them are left alone."""

from __future__ import annotations

import copy
from typing import Any

from transformers import PretrainedConfig


class PrivateConfigs:
    """Gives every part of a module copies of the configurations that it refers to.

    transformers keeps the attention implementation in a model's configuration, and lets models
    share one. The former ones are not changed, and `restore` puts them back.
    """

    def __init__(self, module: Any) -> None:
        self._former = [
            (part, name, value)
            for part in module.modules()
            for name, value in vars(part).items()
            if isinstance(value, PretrainedConfig)
        ]
        # Copied together, parts that shared one, or a part of one, still do.
        copies = copy.deepcopy([config for _, _, config in self._former])
        for (part, name, _), own in zip(self._former, copies, strict=True):
            vars(part)[name] = own

    def restore(self) -> None:
        """Give the module its former configurations back."""
        for part, name, former in self._former:
            vars(part)[name] = former

"""Operations as they run where no CPU kernel applies."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from threading import RLock
from typing import Any

import pytest

KERNELS = "larder.ops.cpu"
_lock = RLock()  # threads would restore what others have replaced


def reference(operation: Callable[..., Any]) -> Callable[..., Any]:
    """The operation computed by torch alone: every kernel says that it does not apply."""

    @wraps(operation)
    def run(*args: Any, **named: Any) -> Any:
        with _lock, pytest.MonkeyPatch.context() as patch:
            for module in [m for n, m in sys.modules.items() if n.startswith(KERNELS)]:
                for name in vars(module):
                    if name.startswith("supports"):
                        patch.setattr(module, name, lambda *_: False)
            return operation(*args, **named)

    return run

"""Stand-in for captured graphs on devices without them, for tests and dry runs of benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from larder.models import GraphContractError


class EagerCapture:
    """Stand-in on devices without graphs: it runs the call again, and checks that a graph could.

    A replay must call the same operators in the same order, with the same numbers, on tensors at
    the same addresses, but those that the call made itself.
    """

    def capture(self, call: Callable[[], Tensor]) -> Callable[[], Tensor]:
        call()  # as before a capture of CUDA: what is prepared once is no part of a graph
        with _CallRecorder() as captured:
            out = call()

        def replay() -> Tensor:
            with _CallRecorder() as again:
                fresh = call()
            captured.compare(again)
            return out.copy_(fresh)

        return replay


class _CallRecorder(TorchDispatchMode):
    """Record of operator calls: names, numbers, and addresses of tensors made elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[object, ...]] = []
        self._outside = set[int]()
        self._made: dict[int, Tensor] = {}  # held, so that no address is given twice

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given, _ = tree_flatten((args, kwargs or {}))
        self.calls.append((func.name(), *map(self._note, given)))
        out = func(*args, **(kwargs or {}))
        for tensor in tree_flatten(out)[0]:
            if isinstance(tensor, Tensor) and _address(tensor) not in self._outside:
                self._made[_address(tensor)] = tensor
        return out

    def compare(self, other: _CallRecorder) -> None:
        """Raise GraphContractError unless another record is the same."""
        for index, (call, later) in enumerate(zip(self.calls, other.calls, strict=False)):
            if call != later:
                raise GraphContractError(
                    f"Call {index} of a replay is {later}, but {call} was captured: a graph "
                    "repeats the latter. Write what changes into static buffers before the replay."
                )
        if len(self.calls) != len(other.calls):
            raise GraphContractError(
                f"A replay calls {len(other.calls)} operators, but {len(self.calls)} were captured."
            )

    def _note(self, given: object) -> object:
        if not isinstance(given, Tensor):
            return given if isinstance(given, int | float | str | None) else str(given)
        if _address(given) in self._made:
            return "made"
        self._outside.add(_address(given))
        return given.data_ptr()


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()

"""Pages of one layer, and who holds them.

    pages of a layer   [ null page | page 1 | page 2 | ... ]     page: P entries of one kv head

Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

import torch
from jaxtyping import Float, Int32, Int64
from torch import Tensor

from larder.core.errors import CacheError
from larder.core.part import LOG_COUNT, Ledger
from larder.core.spec import POSITION_BYTES, LayerSpec
from larder.ops.paged_attention import AttentionBackend
from larder.ops.pages import append_rows, append_step

NULL_PAGE = 0


class LayerPages:
    """Pages of one layer.

    Args:
        positions: storage of the true positions of all entries, the null page among them.
        backend: attention over the pages.

    Attributes:
        columns: storage of the columns of `ledger`; 0 for a new entry.
        scalars: storage of its scalars, at the first page of a kv head; NaN for a new head.
        page_bytes: bytes of a page, without these.
    """

    def __init__(
        self,
        layer: LayerSpec,
        dtype: torch.dtype,
        positions: Int32[Tensor, "N P"],
        backend: AttentionBackend,
    ) -> None:
        (num_pages, page_tokens), device = positions.shape, positions.device
        self.layer, self.page_tokens, self.backend = layer, page_tokens, backend
        self.positions = positions
        self.columns = torch.zeros(0, num_pages, page_tokens, device=device)
        self.scalars, self.ledger = torch.zeros(0, num_pages, device=device), Ledger()
        shape = num_pages, page_tokens, layer.head_dim
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.page_bytes = page_tokens * (2 * layer.head_dim * dtype.itemsize + POSITION_BYTES)
        self.sinks = torch.tensor(layer.sinks, dtype=torch.float32, device=device)
        self.serials = count()  # of leases
        # Called where pages are missing, with their number.
        self.grow_arena: Callable[[int], None] = lambda missing: None
        self._holders = [0] * num_pages
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))

    @property
    def num_pages(self) -> int:
        """N."""
        return len(self._holders)

    def grow(self, num_pages: int) -> None:
        """Grow to at least `num_pages` pages, in new memory with the present entries.

        Raises:
            torch.OutOfMemoryError: there is no room for them; nothing has changed.
        """
        held, stored = self.num_pages, (self.keys, self.values)
        if held >= num_pages:
            return
        fresh = [tensor.new_zeros(num_pages, *tensor.shape[1:]) for tensor in stored]
        for target, source in zip(fresh, stored, strict=True):
            target[:held] = source
        self.keys, self.values = fresh
        self._holders += [0] * (num_pages - held)
        self._free = [*range(num_pages - 1, held - 1, -1), *self._free]

    def take(self, wanted: int) -> list[int]:
        """Free pages, as many as wanted.

        Raises:
            CacheError: there are not as many; nothing was taken.
        """
        if wanted > len(self._free):
            self.grow_arena(wanted - len(self._free))
        if wanted > len(self._free):
            raise CacheError(
                f"Layer {self.layer.index} needs {wanted} more pages of {self.page_tokens} "
                f"entries, but {len(self._free)} of {self.num_pages - 1} are free: give PageArena "
                "a larger num_pages, drop caches, or take a smaller budget."
            )
        pages = [self._free.pop() for _ in range(wanted)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Count one more holder of pages."""
        for page in pages:
            self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Count one holder less; pages without any are free."""
        for page in pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def is_shared(self, page: int) -> bool:
        """True if several leases hold a page."""
        return self._holders[page] > 1

    def copy_page(self, source: int, target: int) -> None:
        """Copy the entries of a page."""
        for stored in (self.keys, self.values, self.positions):
            stored[target] = stored[source]
        self.columns[:, target] = self.columns[:, source]
        self.scalars[:, target] = self.scalars[:, source]

    def column(self, name: str) -> Float[Tensor, "N P"]:
        """Numbers of a ledger column that the arena holds, as a view."""
        return self.columns[self.ledger.columns.index(name)]

    def scalar(self, name: str) -> Float[Tensor, " N"]:
        """Numbers of a ledger scalar that the arena holds, by page, as a view."""
        return self.scalars[self.ledger.scalars.index(name)]

    @property
    def biases(self) -> Float[Tensor, "N P"] | None:
        """Column that attention adds to logits; None where no policy has it."""
        return self.column(LOG_COUNT) if LOG_COUNT in self.ledger.columns else None

    def append(
        self, slots: Int64[Tensor, " M"], keys: Float[Tensor, "M D"], values: Float[Tensor, "M D"]
    ) -> None:
        """Write keys and values of new entries into rows of the pool, and zeros in all columns."""
        self.write(slots, keys, values)
        if len(self.columns):
            self.columns.flatten(1, 2).index_fill_(1, slots, 0.0)

    def write(
        self, rows: Int64[Tensor, " M"], keys: Float[Tensor, "M D"], values: Float[Tensor, "M D"]
    ) -> None:
        """Replace keys and values of some rows of the pool."""
        append_rows(self.keys, rows, keys)
        append_rows(self.values, rows, values)

    def append_step(
        self,
        slots: Int64[Tensor, " S"],
        keys: Float[Tensor, "K B D"],
        values: Float[Tensor, "K B D"],
    ) -> None:
        """Write one entry of each head of B sequences; segment b * K + k is head k of b."""
        append_step((self.keys, self.values), slots, keys, values)

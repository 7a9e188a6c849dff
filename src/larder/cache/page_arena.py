"""Page allocator: entries of all sequences of a model, in pages per layer (the arena).

Keys, values, positions and ledger columns of an entry are in the same row of a page. Addresses stay
valid in a captured graph until the arena grows. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from weakref import WeakMethod

import torch

from larder.cache.block_tables import BlockTables, reserve_step
from larder.cache.layer_pages import LayerPages
from larder.cache.page_lease import PageLease, has_biases
from larder.core.errors import CacheError
from larder.core.part import Ledger
from larder.core.spec import LayerSpec, ModelSpec
from larder.ops.paged_attention import PAGE_TOKENS, AttentionBackend, choose_backend


class PageArena:
    """Pages of the layers of a model that may have them.

    Args:
        num_pages: pages of each layer; a sequence takes at least one per kv head.
        page_tokens: entries of a page; FlashAttention 2 requires a multiple of 256.
        backend: attention over the pages; None for the fastest one of the device.
        max_pages: pages of each layer that the arena grows to where none are free; None for
            `num_pages`.

    Attributes:
        num_moves: how often pages may have moved to other memory, where graphs do not follow.
        columns, scalars: numbers of a ledger, float32: per entry, and per page, of which the first
            one of a kv head has those of the head. The ledger names them in their order.

    Raises:
        CacheError: `num_pages` or `page_tokens` is below 1.
    """

    def __init__(
        self,
        spec: ModelSpec,
        num_pages: int,
        page_tokens: int = PAGE_TOKENS,
        backend: AttentionBackend | None = None,
        max_pages: int | None = None,
    ) -> None:
        if num_pages < 1 or page_tokens < 1:
            raise CacheError(
                f"An arena needs at least one page of one entry, got num_pages={num_pages} and "
                f"page_tokens={page_tokens}."
            )
        layers = [layer for layer in spec.layers if can_page(layer)]
        self._max_pages = max(num_pages, max_pages or 0)
        shape = len(layers), num_pages + 1, page_tokens
        self.positions = torch.zeros(shape, dtype=torch.int32, device=spec.device)
        self.columns = torch.zeros(0, *shape, device=spec.device)
        self.scalars = torch.zeros(0, *shape[:2], device=spec.device)
        self.ledger = Ledger()
        self.pages: dict[int, LayerPages] = {}
        for layer, positions in zip(layers, self.positions, strict=True):
            own = backend or choose_backend(spec.device, spec.dtype, layer.head_dim, page_tokens)
            self.pages[layer.index] = LayerPages(layer, spec.dtype, positions, own)
        self._share_planes()
        self._steps: dict[tuple[int, bool], BlockTables] = {}
        self.num_moves = 0
        if self._max_pages > num_pages:
            grow = WeakMethod(self._grow)  # an arena in a cycle would be freed late
            for own in self.pages.values():
                own.grow_arena = partial(_call, grow)

    @property
    def nbytes(self) -> int:
        """Bytes of the pages of all layers."""
        exact = sum(pages.num_pages * pages.page_bytes for pages in self.pages.values())
        return exact + self.columns.nbytes + self.scalars.nbytes

    @property
    def page_tokens(self) -> int:
        """P, entries of a page."""
        return self.positions.shape[2]

    def hold_ledger(self, ledger: Ledger) -> None:
        """Hold columns and scalars of a ledger: a plane of float32 beside the positions for each.

        They stay for as long as the arena. Where one is new, tables of steps, and graphs that were
        captured with them, are not valid afterwards.
        """
        known = self.ledger
        columns = tuple(name for name in ledger.columns if name not in known.columns)
        scalars = tuple(name for name in ledger.scalars if name not in known.scalars)
        if not columns and not scalars:
            return
        zeros = self.columns.new_zeros(len(columns), *self.columns.shape[1:])
        unknown = self.scalars.new_full((len(scalars), *self.scalars.shape[1:]), torch.nan)
        self.columns = torch.cat([self.columns, zeros])
        self.scalars = torch.cat([self.scalars, unknown])
        self.ledger = Ledger(known.columns + columns, known.scalars + scalars)
        self.num_moves += 1
        self._share_planes()
        self._steps.clear()

    def block_tables(self, batch_len: int, width: int, is_biased: bool = False) -> BlockTables:
        """Tables of steps of `batch_len` sequences, the same ones until they get too narrow.

        Args:
            width: most pages of a kv head.
            is_biased: whether attention adds the column with biases, if there is one.
        """
        held = self._steps.get((batch_len, is_biased))
        if held is None or held.width < width:
            held = self.new_tables(batch_len, 2 * width, is_biased)
            self._steps[batch_len, is_biased] = held
        return held

    def new_tables(self, batch_len: int, width: int, is_biased: bool = False) -> BlockTables:
        """Tables of steps that no other caller has; see `block_tables`."""
        planes = self.positions, self.columns
        return BlockTables(*planes, list(self.pages.values()), batch_len, width, is_biased)

    def prepare_step(
        self, leases: Sequence[Sequence[PageLease]], positions: Sequence[int]
    ) -> BlockTables:
        """Tables for one more entry of some sequences, whose pages are reserved.

        Args:
            leases: of each sequence, one per layer of `pages`.
            positions: true position of each new entry.

        Raises:
            CacheError: a layer has no pages left.
        """
        reserve_step(leases)
        width = max(lease.table.shape[1] for own in leases for lease in own)
        tables = self.block_tables(len(leases), width, has_biases(leases))
        tables.update(leases, positions)
        return tables

    def _grow(self, missing: int) -> None:
        """Grow to twice as many pages of every layer, or by `missing` pages, up to the most.

        Tables of steps, and graphs that were captured with them, are not valid afterwards.
        """
        num_pages = min(store.num_pages for store in self.pages.values())
        wanted = min(max(2 * num_pages, num_pages + missing), self._max_pages + 1)
        if wanted < num_pages + missing:
            return
        self.num_moves += 1
        try:
            self._move_planes(wanted)
            for store in self.pages.values():
                store.grow(wanted)
        except torch.OutOfMemoryError:  # layers that have not grown keep what they had
            return

    def _move_planes(self, num_pages: int) -> None:
        """Move positions and numbers of ledgers into new memory of at least as many pages."""
        layers, held, page_tokens = self.positions.shape
        if held >= num_pages:
            return
        shape = layers, num_pages, page_tokens
        positions = self.positions.new_zeros(shape)
        columns = self.columns.new_zeros(len(self.columns), *shape)
        scalars = self.scalars.new_full((len(self.scalars), *shape[:2]), torch.nan)
        positions[:, :held], columns[:, :, :held] = self.positions, self.columns
        scalars[:, :, :held] = self.scalars
        self.positions, self.columns, self.scalars = positions, columns, scalars
        self._share_planes()
        self._steps.clear()

    def _share_planes(self) -> None:
        """Give every layer its part of positions, columns and scalars."""
        for index, store in enumerate(self.pages.values()):
            store.positions, store.columns = self.positions[index], self.columns[:, index]
            store.scalars, store.ledger = self.scalars[:, index], self.ledger


def _call(grow: WeakMethod[Callable[[int], None]], missing: int) -> None:
    """Call the method of an arena that is still there."""
    if (method := grow()) is not None:
        method(missing)


def can_page(layer: LayerSpec) -> bool:
    """True for layers whose entries may be in pages: with keys and values of all tokens."""
    is_whole = layer.sliding_window is None and layer.kv_source is None
    return is_whole and not layer.latent_rank

"""Arena of pages: keys and values of all sequences of a model, in pages per layer.

It is allocated once, so that addresses stay valid in a captured graph. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from larder.cache.block_tables import BlockTables, reserve_step
from larder.cache.layer_pages import LayerPages, PageLease
from larder.core.errors import CacheError
from larder.core.spec import LayerSpec, ModelSpec
from larder.ops.paged_attention import PAGE_TOKENS, AttentionBackend, choose_backend


class PageArena:
    """Pages of the layers of a model that may have them.

    Args:
        num_pages: pages of each layer; a sequence takes at least one per kv head.
        page_tokens: entries of a page; FlashAttention 2 requires a multiple of 256.
        backend: attention over the pages; None for the fastest one of the device.

    Raises:
        CacheError: `num_pages` or `page_tokens` is below 1.
    """

    def __init__(
        self,
        spec: ModelSpec,
        num_pages: int,
        page_tokens: int = PAGE_TOKENS,
        backend: AttentionBackend | None = None,
    ) -> None:
        if num_pages < 1 or page_tokens < 1:
            raise CacheError(
                f"An arena needs at least one page of one entry, got num_pages={num_pages} and "
                f"page_tokens={page_tokens}."
            )
        layers = [layer for layer in spec.layers if can_page(layer)]
        shape = len(layers), num_pages + 1, page_tokens
        self.positions = torch.zeros(shape, dtype=torch.int32, device=spec.device)
        self.pages: dict[int, LayerPages] = {}
        for layer, positions in zip(layers, self.positions, strict=True):
            form = spec.device, spec.dtype, layer.head_dim, page_tokens
            own = backend or choose_backend(*form)
            self.pages[layer.index] = LayerPages(layer, spec.dtype, positions, own)
        self._steps: dict[int, BlockTables] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the pages of all layers."""
        return sum(pages.num_pages * pages.page_bytes for pages in self.pages.values())

    def block_tables(self, batch_len: int, width: int) -> BlockTables:
        """Tables of steps of `batch_len` sequences, the same ones until they get too narrow.

        Args:
            width: most pages of a kv head.
        """
        held = self._steps.get(batch_len)
        if held is None or held.width < width:
            held = BlockTables(self.positions, list(self.pages.values()), batch_len, 2 * width)
            self._steps[batch_len] = held
        return held

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
        tables = self.block_tables(len(leases), width)
        tables.update(leases, positions)
        return tables


def can_page(layer: LayerSpec) -> bool:
    """True for layers whose entries may be in pages: with keys and values of all tokens."""
    is_whole = layer.sliding_window is None and layer.kv_source is None
    return is_whole and not layer.latent_rank

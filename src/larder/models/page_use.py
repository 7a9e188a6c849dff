"""Use of pages: whether the caches of a loaded model hold their entries in an arena that grows.

By default on CUDA devices, where decode steps over pages are one attention call per layer, and
graphs where the model's steps can be captured. On a CPU pages are for tests of the same path: plain
storage is read faster there.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from larder.core.arguments import check_type
from larder.core.errors import BadParameter

if TYPE_CHECKING:
    from larder.models.decoder import Decoder

FIRST_PAGES = 4  # pages per kv head that an arena begins with
MOST_PAGES = 2**31 // 256  # rows of a layer are counted in int32


class PageUse(Enum):
    """Which caches are held in pages.

    AUTO: those of a model on one CUDA device.
    ON: those on any device.
    OFF: none.
    """

    AUTO = "auto"
    ON = "on"
    OFF = "off"


def page_use(name: str, option: str = "pages") -> PageUse:
    """Use of pages by its name.

    Args:
        option: where the name was given, for the message.

    Raises:
        BadParameter: it is no use of pages.
    """
    check_type(option, name, str, "auto, on or off")
    if name not in {use.value for use in PageUse}:
        raise BadParameter(f"{option} must be auto, on or off, got {name!r}.")
    return PageUse(name)


def set_pages(decoder: Decoder, use: PageUse) -> None:
    """Use pages for the caches of a decoder that are made from now on, or do not.

    Layers without pages, as those with a sliding window, hold their entries as before.
    """
    is_cuda = decoder.spec.device.type == "cuda"
    is_fit = is_cuda and not decoder.spec.layer_devices
    if use is PageUse.OFF or (use is PageUse.AUTO and not is_fit):
        decoder.use_pages(None)
        return
    from larder.cache.page_arena import PageArena, can_page

    heads = [layer.kv_heads for layer in decoder.spec.layers if can_page(layer)]
    if not heads:
        decoder.use_pages(None)
        return
    arena = PageArena(decoder.spec, FIRST_PAGES * max(heads), max_pages=MOST_PAGES)
    if not is_cuda:
        decoder.use_pages(arena)
        return
    from larder.models.decode_graph import CudaGraphCapture

    decoder.use_pages(arena, CudaGraphCapture())

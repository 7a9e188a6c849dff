"""Bytes made fewer by zstd, and back, never into more memory than was agreed on."""

from __future__ import annotations

from larder.core.errors import Damaged

ZSTD_LEVEL = (
    1  # entropy coding alone finds nearly all there is; higher levels are slower for nothing
)


def compress(data: bytes | memoryview) -> bytes:
    """Fewer bytes that `decompress` makes these of."""
    import zstandard

    return zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_content_size=True).compress(data)


def decompress(data: bytes | memoryview, size: int) -> bytes:
    """The bytes again.

    Args:
        size: how many they are; a frame that says otherwise is not opened.

    Raises:
        Damaged: this is no zstd frame of so many bytes.
    """
    import zstandard

    try:
        claimed = zstandard.frame_content_size(data)
        if claimed != size:
            raise Damaged(f"A compressed part claims {claimed} bytes instead of {size}.")
        found = zstandard.ZstdDecompressor().decompress(data, max_output_size=max(size, 1))
    except zstandard.ZstdError as error:
        raise Damaged(f"A compressed part cannot be opened ({error}).") from error
    if len(found) != size:
        raise Damaged(f"A compressed part has {len(found)} bytes instead of {size}.")
    return found

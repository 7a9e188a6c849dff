"""Blended layer: dense entries that were put together from texts read apart.

They are what CacheBlend (Yao et al., arXiv:2405.16444) makes of cached chunks: an approximation of
the entries that the whole text would have. The form has a name of its own so that no such cache is
ever shared as the exact cache of a prefix, also after it was saved and restored.
"""

from __future__ import annotations

from larder.cache.forms.dense import DenseLayer


class BlendedLayer(DenseLayer):
    """Dense storage of entries that depend on how they were read."""

    has_public_name = False


Part = BlendedLayer

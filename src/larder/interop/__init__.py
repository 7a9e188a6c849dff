"""Larder inside transformers: caches for `generate`, lm-eval and kvpress."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

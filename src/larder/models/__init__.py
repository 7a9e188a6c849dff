"""Model loading, attention, calibration and the models that come with Larder."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

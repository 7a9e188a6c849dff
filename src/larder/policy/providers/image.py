"""Provider of which tokens are of images: 1 for those, 0 for text. Read by `image_weight`."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor

from larder.policy.providers.base import ImageProvider


class Image(ImageProvider):
    """Column `image`."""

    def measure(self, is_image: Bool[Tensor, " N"]) -> Float[Tensor, " N"]:
        return is_image.float()


Part = Image

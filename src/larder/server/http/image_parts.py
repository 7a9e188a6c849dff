"""Images in the content of messages: data URLs, decoded and checked."""

from __future__ import annotations

import re
from base64 import b64decode
from binascii import Error as Base64Error
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.util import find_spec
from io import BytesIO

from larder.server.api_errors import invalid_request
from larder.session.transcript.chat_template import image_mark

MAX_IMAGES = 64  # of a request
MAX_PIXELS = 1 << 25  # of all images of a request, repeated ones counted again: 100 MB decoded
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_DATA_URL = re.compile(r"data:image/[a-z+.-]{1,20};base64,", re.IGNORECASE)


@dataclass
class RequestImages:
    """Images of the messages of one request.

    Args:
        files: file of each image, by its SHA-256.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    _count: int = 0
    _pixels: int = 0

    def mark(self, url: str) -> str:
        """Mark that stands for an image in the text of its message.

        Raises:
            ApiError: 400: the URL is no data URL of an image, or the image cannot be read.
        """
        self._count += 1
        if self._count > MAX_IMAGES:
            raise _refused(f"The request has more than {MAX_IMAGES} images: send fewer.")
        data = _decoded(url)
        self._pixels += _checked_pixels(data, MAX_PIXELS - self._pixels)
        digest = sha256(data).hexdigest()
        self.files[digest] = data
        return image_mark(digest)


def _decoded(url: str) -> bytes:
    head = _DATA_URL.match(url)
    if head is None:
        raise _refused(
            f"The address of an image begins with {url[:32]!r}, but nothing is fetched here: send "
            "the image itself, as data:image/png;base64,..."
        )
    try:
        return b64decode(url[head.end() :], validate=True)
    except (Base64Error, ValueError) as error:
        raise _refused(f"An image is no valid base64 ({error}): encode its file again.") from error


def placed_mark(url: str, role: str, images: RequestImages | None) -> str:
    """Mark of an image in a message of a role.

    Args:
        images: takes the image; None where there may be none.

    Raises:
        ApiError: 400: images are not taken here, or as `RequestImages.mark`.
    """
    if images is None or role != "user":
        raise _refused(
            "An image stands where only texts are read: send it in a message of the user to "
            "/v1/chat/completions or /v1/messages, of a server whose model sees."
        )
    return images.mark(url)


def _checked_pixels(data: bytes, most: int) -> int:
    """Pixels of an image of a known format, which is decoded once to see that it can be.

    Args:
        most: largest number of pixels.
    """
    if find_spec("PIL") is None:
        raise _refused("This server cannot read images: install larder[vision] there.")
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if width * height <= most:
                image.load()
    except UnidentifiedImageError as error:
        raise _refused(
            f"An image is in none of the formats {', '.join(FORMATS)}: convert it."
        ) from error
    except (OSError, EOFError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise _refused(f"An image cannot be read ({error}): send it again.") from error
    if width * height > most:
        raise _refused(
            f"An image has {width} x {height} pixels, with which the request has more than "
            f"{MAX_PIXELS:,}: make the images smaller, or send fewer."
        )
    return width * height


def _refused(message: str) -> Exception:
    return invalid_request(message, "messages")

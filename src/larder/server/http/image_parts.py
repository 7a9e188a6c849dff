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
MAX_PIXELS = 1 << 25  # of an image: 100 MB decoded
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

    def mark(self, url: str) -> str:
        """Mark that stands for an image in the text of its message.

        Raises:
            ApiError: 400: the URL is no data URL of an image, or the image cannot be read.
        """
        self._count += 1
        if self._count > MAX_IMAGES:
            raise _refused(f"The request has more than {MAX_IMAGES} images: send fewer.")
        data = _decoded(url)
        _check(data)
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
        raise _refused(f"An image is no valid base64 ({error}): encode its file anew.") from error


def _check(data: bytes) -> None:
    """Check that a file is an image of a known format and size, without decoding its pixels."""
    if find_spec("PIL") is None:
        raise _refused("This server cannot read images: install larder[vision] there.")
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if width * height <= MAX_PIXELS:
                image.load()
    except UnidentifiedImageError as error:
        raise _refused(
            f"An image is in none of the formats {', '.join(FORMATS)}: convert it."
        ) from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise _refused(f"An image cannot be read ({error}): send it anew.") from error
    if width * height > MAX_PIXELS:
        raise _refused(
            f"An image has {width} x {height} pixels, more than {MAX_PIXELS:,}: make it smaller."
        )


def _refused(message: str) -> Exception:
    return invalid_request(message, "messages")

"""What a replica tells whoever asked it: plain values that travel between processes."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from larder.core.errors import LarderError
from larder.server.request import Refusal, Report
from larder.server.web.refusing import as_refusal

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Begun:
    """The request was taken."""


@dataclass(frozen=True)
class Text:
    """The next piece of the answer."""

    text: str


@dataclass(frozen=True)
class Failed:
    """There is no answer, or no more of it; the fields are those of `Refusal`."""

    message: str
    status: int
    code: str
    param: str | None = None
    retry_after: float | None = None

    @staticmethod
    def of(error: Exception) -> Failed:
        """What a client may know of an error; the log has the rest."""
        if not isinstance(error, LarderError):
            LOG.error("A replica has failed.", exc_info=error)
        told = as_refusal(error)
        return Failed(str(told), told.status, told.code, told.param, told.retry_after)

    @property
    def refusal(self) -> Refusal:
        """The error that it was."""
        return Refusal(self.message, self.status, self.code, self.param, self.retry_after)


@dataclass(frozen=True)
class Told:
    """What a method of a hub has returned."""

    value: Any


Frame = Begun | Text | Report | Failed

"""What a replica tells whoever asked it: plain values that travel between processes."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from larder.core.errors import LarderError
from larder.server.http.error_responses import as_api_error
from larder.server.request import ApiError, Report

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class StartFrame:
    """The request was taken."""


@dataclass(frozen=True)
class TextFrame:
    """The next piece of the answer."""

    text: str


@dataclass(frozen=True)
class ErrorFrame:
    """There is no answer, or no more of it; the fields are those of `ApiError`."""

    message: str
    status: int
    code: str
    param: str | None = None
    retry_after: float | None = None

    @staticmethod
    def of(error: Exception) -> ErrorFrame:
        """What a client may know of an error; the log has the rest."""
        if not isinstance(error, LarderError):
            LOG.error("A replica has failed.", exc_info=error)
        told = as_api_error(error)
        return ErrorFrame(str(told), told.status, told.code, told.param, told.retry_after)

    @property
    def refusal(self) -> ApiError:
        """The error that it was."""
        return ApiError(self.message, self.status, self.code, self.param, self.retry_after)


@dataclass(frozen=True)
class ResultFrame:
    """What a method of a hub has returned."""

    value: Any


Frame = StartFrame | TextFrame | Report | ErrorFrame

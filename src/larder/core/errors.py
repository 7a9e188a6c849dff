"""Everything that can go wrong in Larder, as one tree.

    LarderError                 exit code 1; the message is one line
    ├── UsageError              exit code 2: flags or spelling contradict each other
    │   ├── SpellingError       a policy sentence does not parse
    │   └── UnknownName         no part, preset or model of that name
    ├── BadParameter            a part was given a value outside its range
    │   └── TooLittle           what was drawn by chance holds less than was asked for
    ├── BudgetError             the memory asked for cannot hold what must be kept
    ├── InputError              a file or conversation cannot be read
    ├── ModelError              a model cannot be loaded, or asks for what Larder cannot honour
    ├── ScoreError              a scorer returned what no budget can rank
    ├── CacheError              a cache was asked for something its form cannot do
    ├── StoreError              what is kept outside the process cannot be kept or had
    │   ├── Damaged             bytes are not what was written
    │   ├── Refused             what is kept is whole, but not for who asks
    │   ├── Superseded          somebody else has written a newer state
    │   ├── StoreSlow           an answer did not come in time
    │   └── StoreFull           nothing more can be written
    └── DependencyError         an optional package is missing

A message names the thing, the value, the rule and the way out.
"""

from __future__ import annotations


class LarderError(Exception):
    """Base of every error that Larder raises on purpose. `exit_code` is what the CLI returns."""

    exit_code: int = 1


class UsageError(LarderError):
    """The request contradicts itself or names something that does not exist."""

    exit_code = 2


class SpellingError(UsageError):
    """A policy sentence does not parse."""


class UnknownName(UsageError):
    """No part, preset or model of that name."""


class BadParameter(LarderError):
    """A part was given a value outside its range."""

    exit_code = 2


class TooLittle(BadParameter):
    """What was drawn by chance holds less than was asked for; another seed may hold more."""


class BudgetError(LarderError):
    """The memory asked for cannot hold what must be kept."""

    exit_code = 2


class InputError(LarderError):
    """A file or a conversation cannot be read."""


class ModelError(LarderError):
    """A model cannot be loaded, or asks for something that Larder cannot honour."""


class ScoreError(LarderError):
    """A scorer returned what no budget can rank."""


class CacheError(LarderError):
    """A cache was asked for something that its form cannot do."""


class StoreError(LarderError):
    """What is kept outside the process cannot be kept or had."""


class Damaged(StoreError):
    """Bytes are not what was written: what they held must be computed again."""


class Refused(StoreError):
    """What is kept is whole, but not for who asks.

    Args:
        reason: one word, by which refusals are counted.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class Superseded(StoreError):
    """Somebody else has written a newer state: load it, and repeat what was to be written."""


class StoreSlow(StoreError):
    """An answer did not come in time, or is not waited for any more."""


class StoreFull(StoreError):
    """Nothing more can be written: no room, no permission, or no working disk."""


class DependencyError(LarderError):
    """An optional package is missing."""

"""Exception hierarchy of Larder.

    LarderError                 exit code 1; the message is one line
    ├── UsageError              exit code 2: contradictory or invalid flags or spelling
    │   ├── SpellingError       a policy sentence does not parse
    │   └── UnknownName         no part, preset or model of that name
    ├── BadParameter            a parameter has a value outside its range
    │   └── TooLittle           a random draw holds fewer items than requested
    ├── BudgetError             the budget cannot hold the protected entries
    ├── InputError              a file or conversation cannot be read
    ├── ModelError              a model cannot be loaded or is not supported
    │   └── MissingWeights      a method's weights for a model are not trained yet
    ├── ScoreError              a scorer returned what no budget can rank
    ├── CacheError              the cache form does not support an operation
    ├── StoreError              a store cannot read or write a record
    │   ├── Damaged             stored bytes fail their checksum or do not parse
    │   ├── Refused             a valid record does not fit this reader
    │   ├── Superseded          a newer state has been written meanwhile
    │   ├── StoreSlow           a store operation timed out
    │   └── StoreFull           the store cannot accept more bytes
    └── DependencyError         an optional package is missing

A message names the thing, the value, the rule and the way out.
"""

from __future__ import annotations


class LarderError(Exception):
    """Base of every error that Larder raises on purpose. `exit_code` is what the CLI returns.

    Examples:
        >>> try:
        ...     larder.Policy.parse("snapvk")
        ... except larder.LarderError as error:
        ...     print(type(error).__name__, error.exit_code)
        UnknownName 2
    """

    exit_code: int = 1


class UsageError(LarderError):
    """Invalid request: contradictory options, or a name that does not exist."""

    exit_code = 2


class SpellingError(UsageError):
    """Policy sentence that does not parse."""


class UnknownName(UsageError):
    """Unknown name of a part, preset or model."""


class BadParameter(LarderError):
    """Parameter value outside its range."""

    exit_code = 2


class TooLittle(BadParameter):
    """Random draw with fewer items than requested; another seed may hold more."""


class BudgetError(LarderError):
    """Budget too small for the protected entries, or for the bytes that are asked for.

    Args:
        tier: name of the memory tier that is full; empty for other budgets.
    """

    exit_code = 2

    def __init__(self, message: str, tier: str = "") -> None:
        super().__init__(message)
        self.tier = tier


class TenantBudgetError(BudgetError):
    """Budget of one tenant that is used up; memory of other tenants does not help."""


class InputError(LarderError):
    """File or conversation that cannot be read."""


class ModelError(LarderError):
    """Model that cannot be loaded, or needs something that Larder does not support."""


class MissingWeights(ModelError):
    """Learned weights that no file holds for a model; `larder train` makes them."""


class ScoreError(LarderError):
    """Scores that no budget can rank, such as NaN or a wrong shape."""


class CacheError(LarderError):
    """Operation that the form of the cache does not support."""


class StoreError(LarderError):
    """Failure of a store outside the process to read or write a record."""


class Damaged(StoreError):
    """Corrupt stored bytes: their content must be computed again."""


class Refused(StoreError):
    """Valid record that does not fit this reader: another model, policy, tenant or format.

    Args:
        reason: one word, the label of the refusal counter.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class Superseded(StoreError):
    """Write conflict with a newer state: load that state and repeat the write."""


class StoreSlow(StoreError):
    """Store operation that timed out or was abandoned."""


class StoreFull(StoreError):
    """Store that cannot accept more bytes: no space, no permission, or a failing disk."""


class DependencyError(LarderError):
    """Missing optional package."""

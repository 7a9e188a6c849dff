"""Requirements of policy parts: the inputs that a part has provided, named on its class."""

from __future__ import annotations

from typing import ClassVar

from larder.core.ledger import Ledger


class PolicyPart:
    """Base of all policy parts, with the names of the inputs that a part reads.

    An input that depends on parameters is returned by the method instead.
    """

    # Names of the providers that it reads, files of `larder.policy.providers`.
    needs: ClassVar[frozenset[str]] = frozenset()
    # Names of the tallies whose columns it reads, files of `larder.policy.tallies`.
    tallies: ClassVar[frozenset[str]] = frozenset()
    # Names of the measurements of a model that it looks up, files of `larder.models.measurements`.
    calibrations: ClassVar[frozenset[str]] = frozenset()
    # State that the cache holds for it.
    ledger: ClassVar[Ledger] = Ledger()

    def required_providers(self) -> frozenset[str]:
        """Names of the providers that these parameters need."""
        return self.needs

    def required_tallies(self) -> frozenset[str]:
        """Names of the tallies that these parameters need."""
        return self.tallies

    def required_calibrations(self) -> frozenset[str]:
        """Names of the calibrations that these parameters need."""
        return self.calibrations

    def required_ledger(self) -> Ledger:
        """State that the cache holds for these parameters."""
        return self.ledger

    def observes_whole_text(self) -> bool:
        """True if it needs the queries of a whole context in one pass.

        `whole()` then reads a context in one block, however long it is.
        """
        return False

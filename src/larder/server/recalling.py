"""Sessions that are not in memory, brought there from where they are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from larder.core.errors import InputError
from larder.models.decoder import Decoder
from larder.server import archive
from larder.server.keeper import ANSWERED, PAUSES, Recalled
from larder.server.refusals import invalid
from larder.server.rule import Rule
from larder.server.sessions import Sessions
from larder.server.sitting import Sitting
from larder.store.records import PINNED, YES

Lookup = Callable[[str, str], Recalled | None]


class Recalling:
    """For the model's thread.

    Args:
        lookup: finds what is kept of a tenant's session.
        rules: that sessions may be held under; the first is the usual one.
        weigh: takes a session in, or refuses it.
    """

    def __init__(
        self,
        decoder: Decoder,
        sessions: Sessions,
        lookup: Lookup,
        rules: Sequence[Rule],
        weigh: Callable[[Sitting], Sitting],
    ) -> None:
        self._decoder, self._sessions, self._lookup = decoder, sessions, lookup
        self._rules, self._weigh = rules, weigh

    def recall(self, tenant: str, *names: str | None) -> None:
        """Have sessions be in memory that are kept elsewhere, with their forks."""
        for name in names:
            number, tried = 1, name
            while tried is not None and not self._sessions.has(tenant, tried):
                found = self._lookup(tenant, tried)
                if found is None:
                    break
                root = self.receive(tenant, tried, found).root
                number += 1
                tried = f"{root}~{number}"

    def imported(self, tenant: str, name: str, data: bytes) -> Sitting:
        """A session that `archive.told` has told.

        Raises:
            InputError: it is damaged, or another model's.
            Refusal: there is one of that name.
        """
        told = archive.read(data, self._decoder.spec.fingerprint, self._decoder.vocabulary)
        root = told.root if name.startswith(f"{told.root}~") else name
        sitting = self._sessions.open(tenant, name, self._rules[0], root)
        sitting.opening, sitting.said, sitting.epoch = told.opening, told.said, len(told.said)
        if told.said:
            self._sessions.remember(sitting)
        return sitting

    def receive(self, tenant: str, name: str, found: Recalled) -> Sitting:
        """A session that was found, in memory from now on.

        Raises:
            Refusal: there is no room, or it is another model's.
        """
        if self._sessions.has(tenant, name):
            return self._sessions.find(tenant, name)
        try:
            sitting = self.imported(tenant, name, found.data)
        except InputError as error:
            raise invalid(str(error), "session") from error
        sitting.written, sitting.logged = found.epoch, len(sitting.said)
        sitting.epoch = int(found.labels.get("epoch", len(sitting.said)))
        sitting.made = float(found.labels.get("made", sitting.made))
        sitting.answered = float(found.labels.get(ANSWERED, 0.0))
        sitting.pauses.extend(map(float, found.labels.get(PAUSES, "").split()))
        sitting.is_pinned = found.labels.get(PINNED) == YES
        for rule in self._rules:
            if found.kept is not None and str(rule.policy) == found.policy:
                sitting.rule, sitting.kept = rule, found.kept
                sitting.is_lossless = found.kept.is_lossless
                break
        return self._weigh(sitting)

"""Turns that outlive the process: each is written before the end of its answer is told.

What is written is what was said, token for token; caches are computed again. A disk that is full or
slow does not stop answers: that is counted, and the turn is written with the next one.
"""

from __future__ import annotations

from collections import Counter

from larder.core.errors import BudgetError, Refused, StoreError, Superseded
from larder.core.spec import ModelSpec
from larder.server import archive
from larder.server.refusals import superseded
from larder.server.request import Refusal
from larder.server.scheduler import Keeper
from larder.server.sitting import Said, Sitting
from larder.store.identity import Identity
from larder.store.sessions import Asking
from larder.store.store import Store


class Persisting(Keeper):
    """Writes sessions to a store. For the model's thread.

    `failed` counts turns that could not be written, by kind of error.
    """

    def __init__(self, store: Store, spec: ModelSpec) -> None:
        self._store = store
        self._nobody = Asking(Identity.of({}), "", spec)  # asks for the log alone
        self.failed: Counter[str] = Counter()
        self.written_bytes = 0

    def commit(self, sitting: Sitting, said: Said) -> None:
        """Write the session.

        Raises:
            Refusal: somebody else has gone on with it meanwhile.
        """
        data = archive.told(sitting)
        own = sitting.tenant, sitting.name, sitting.ids
        try:
            record = self._store.sessions.save(*own, transcript=data, expected=sitting.written)
        except Superseded as error:
            sitting.is_stale = True
            raise superseded(sitting.name) from error
        except (BudgetError, StoreError) as error:
            self.failed[type(error).__name__] += 1
            return
        sitting.written = record.epoch
        self.written_bytes += len(data) + 4 * sitting.tokens

    def recall(self, tenant: str, name: str) -> tuple[bytes, int] | None:
        """A session as it was written last, and its epoch; None where there is none.

        Raises:
            Refusal: it cannot be had, for what else would be served might be another one.
        """
        try:
            loaded = self._store.sessions.load(tenant, name, self._nobody)
        except (Refused, StoreError) as error:
            self.failed[type(error).__name__] += 1
            raise Refusal(
                f"Session {name!r} cannot be read back: {error}", 503, "session_unreadable"
            ) from error
        if loaded is None or loaded.transcript is None:
            return None
        return loaded.transcript, loaded.record.epoch

    def remove(self, sitting: Sitting) -> None:
        """Have the store forget a session."""
        if sitting.written:
            self._store.sessions.remove(sitting.tenant, sitting.name)

"""Sessions that a request may mean, brought to memory before it is said which it does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from larder.server.awaiting import Awaited
from larder.server.keeper import Keeper
from larder.server.naming import root_of
from larder.server.request import Request
from larder.server.rule import Rule
from larder.server.sessions import Sessions


class Gathering:
    """Safe from the threads that `call` and `recall` are safe from.

    Args:
        keeper: knows which sessions are kept.
        awaited: what is to stay in memory.
        call: has a function be called where sessions are at home.
        recall: has a tenant's session be in memory, if it is kept.
        guessing: a block in which a session is had that nobody has named.
    """

    def __init__(
        self,
        sessions: Sessions,
        keeper: Keeper,
        awaited: Awaited,
        call: Callable[[Callable[[], Any]], Any],
        recall: Callable[[str, str], object],
        guessing: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._sessions, self._keeper, self._awaited = sessions, keeper, awaited
        self._call, self._recall, self._guessing = call, recall, guessing

    @contextmanager
    def these(self, tenant: str, *names: str | None) -> Iterator[None]:
        """While sessions are in memory, where they are kept at all, and do not leave it.

        Raises:
            Refusal: one is kept, and cannot be had.
        """
        with self._awaited.these(tenant, *names):
            for name in names:
                if name is not None:
                    self._recall(tenant, name)
            yield

    @contextmanager
    def meant(self, request: Request, rule: Rule) -> Iterator[None]:
        """While all sessions are there that a request may mean; if it makes a branch, its family.

        A branch is to have a name that none has, be it in memory or not.
        """
        tenant, sessions = request.tenant, self._sessions
        with self.these(tenant, request.session, request.follows):
            names = self._names(request)
            with self._awaited.these(tenant, *names):
                self.guess(tenant, names)
                root = self._call(lambda: sessions.branching(request, rule))
                with self._awaited.these(tenant, root):
                    lost = [] if root is None else self.guess(tenant, self.family(tenant, root))
                    self._call(lambda: sessions.avoid(tenant, lost))
                    yield

    def guess(self, tenant: str, names: Iterable[str]) -> list[str]:
        """Have sessions be in memory that nobody has named; those that cannot be had."""
        lost = list(dict.fromkeys(names))
        for name in tuple(lost):
            with self._guessing(name):
                self._recall(tenant, name)
                lost.remove(name)
        return lost

    def family(self, tenant: str, name: str) -> Sequence[str]:
        """What a session began as, and all that are kept and began as that, if it can be told."""
        root = root_of(name)
        found = [root]
        with self._guessing(root):
            found += self._keeper.branches(tenant, root)
        return found

    def _names(self, request: Request) -> Sequence[str]:
        """Sessions that a request may mean, unless the one it means is in memory."""
        if not (request.is_nameless or request.session):
            return ()
        if self._call(lambda: self._sessions.settles(request)):
            return ()
        if request.session is not None:
            return self.family(request.tenant, request.session)
        return self._keeper.names(request.tenant, request.turns)

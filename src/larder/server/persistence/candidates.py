"""Sessions that a request may mean, brought to memory before it is said which it does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from larder.core.session_name import root_name
from larder.server.persistence.base import SessionPersistence
from larder.server.persistence.residency_locks import ResidencyLocks
from larder.server.persistence.restore import SessionRestorer
from larder.server.request import Request, SessionUnreadableError
from larder.server.serving_policy import ServingPolicy
from larder.server.session_index import SessionIndex

Result = TypeVar("Result")
MAX_FAMILY = 8  # of a family, that are brought to memory whatever was said in them


class CandidateLoader:
    """Safe from the threads that `call` and `recall` are safe from.

    Args:
        keeper: knows which sessions are kept.
        awaited: what is to stay in memory.
        call: has a function be called where sessions are at home.
        recall: has a tenant's session be in memory, if it is kept.
        recalling: says what becomes of sessions that cannot be had.
    """

    def __init__(
        self,
        sessions: SessionIndex,
        keeper: SessionPersistence,
        awaited: ResidencyLocks,
        call: Callable[[Callable[[], Any]], Any],
        recall: Callable[[str, str], object],
        recalling: SessionRestorer,
    ) -> None:
        self._sessions, self._keeper, self._awaited = sessions, keeper, awaited
        self._call, self._recall, self._recalling = call, recall, recalling

    @contextmanager
    def these(self, tenant: str, *names: str | None) -> Iterator[None]:
        """While sessions are in memory, where they are kept at all, and do not leave it.

        Raises:
            Refusal: one is kept, and cannot be had.
        """
        with self._awaited.these(tenant, *names):
            for name in self._lacking(tenant, names):
                self._recall(tenant, name)
            yield

    def having(self, request: Request, rule: ServingPolicy, take: Callable[[], Result]) -> Result:
        """What `take` returns, which is called once all sessions are there that a request may mean.

        Where the request makes a branch it gets a name that none has, be it in memory or not.

        Args:
            take: takes the request where sessions are at home.

        Raises:
            Refusal: a session that the request names is kept, and cannot be had.
        """
        tenant, sessions = request.tenant, self._sessions
        named = [name for name in (request.session, request.follows) if name is not None]
        with self._awaited.these(tenant, *named):
            made = list[Result]()  # nobody waits for the model's thread twice where all is there
            lacking = self._call(lambda: self._begun(request, rule, named, take, made))
            lost = [name for name in lacking if not self._is_had(request, name)]
            if made:
                return made[0]
            names = [name for name in self._names(request) if name not in lost]
            with self._awaited.these(tenant, *names):
                self.guess(tenant, names)
                root = self._call(lambda: self._root_or(request, rule, take, made))
                if root is None:
                    return made[0]
                with self._awaited.these(tenant, root):
                    family = self.family(tenant, root)

                    def branched() -> Result:
                        sessions.avoid(tenant, root, family)
                        return take()

                    return self._call(branched)

    def _is_had(self, request: Request, name: str) -> bool:
        """Have a session be in memory that a request names; False where it is to be begun again.

        Raises:
            Refusal: it is kept, and cannot be had.
        """
        try:
            self._recall(request.tenant, name)
        except SessionUnreadableError as error:
            self._recalling.begin_again(error, request)
            return False
        return True

    def guess(self, tenant: str, names: Iterable[str]) -> list[str]:
        """Have sessions be in memory that nobody has named; those that cannot be had."""
        lost = self._lacking(tenant, names)
        for name in tuple(lost):
            with self._recalling.guessing(name):
                self._recall(tenant, name)
                lost.remove(name)
        return lost

    def family(self, tenant: str, name: str) -> Sequence[str]:
        """What a session began as, and all that are kept and began as that, if it can be told."""
        root = root_name(name)
        found = [root]
        with self._recalling.guessing(root):
            found += self._keeper.branches(tenant, root)
        return found

    def _lacking(self, tenant: str, names: Iterable[str | None]) -> list[str]:
        """Those that are not in memory."""
        told, has = [each for each in dict.fromkeys(names) if each is not None], self._sessions.has
        return self._call(lambda: [e for e in told if not has(tenant, e)]) if told else []

    def _begun(
        self,
        request: Request,
        rule: ServingPolicy,
        named: Sequence[str],
        take: Callable[[], Any],
        made: list[Any],
    ) -> list[str]:
        """Take a request that goes on with a session that is there, or begins one; else those that
        it names and that are not there. Where sessions are at home."""
        sessions = self._sessions
        lacking = [name for name in named if not sessions.has(request.tenant, name)]
        is_looked_for = request.is_nameless or request.session is not None
        if lacking or (is_looked_for and not sessions.settles(request)):
            return lacking
        self._root_or(request, rule, take, made)
        return []

    def _root_or(
        self, request: Request, rule: ServingPolicy, take: Callable[[], Any], made: list[Any]
    ) -> str | None:
        """The root of what a request makes a branch of; else it is taken. Where sessions are at
        home."""
        root = self._sessions.branching(request, rule)
        if root is None:
            made.append(take())
        return root

    def _names(self, request: Request) -> Sequence[str]:
        """Sessions that a request may mean."""
        if request.is_nameless:
            return self._keeper.names(request.tenant, request.turns)
        if request.session is None:
            return ()
        family = self.family(request.tenant, request.session)
        if len(family) <= MAX_FAMILY:
            return family
        return (family[0], *self._keeper.names(request.tenant, request.turns))

"""Corrected layer: tiered, with retrospective correction of the latest decode steps.

Choi, Kang, Jo, Kim, "Retrospective Sparse Attention for Efficient Long-Context Generation" (2025),
arXiv:2508.09001: each decode step replays the latest tokens. A replayed token attends to the
entries fetched for the new token that were fetched neither for it nor for any token since; the
result is merged with its former output by log-sum-exp, as if it had attended to the union,

    O_up = (e^L O + e^L' O') / (e^L + e^L'),    L = ln of the sum of its weights,

and passes through the layers above, which replace its keys and values. Only outputs and their L
are stored of former tokens. As in the paper, the query is that of the replay, and entries seen
before are not attended to again.

Differences: entries are tracked instead of pages, because pages of some indexes change; and layers
without offload repeat their former outputs, which are unchanged below the first correction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from larder.cache.forms.base import AttentionCall, AttentionState
from larder.cache.forms.tiered import TieredLayer
from larder.cache.new_tokens import NewTokens
from larder.cache.offload.page_selection import PageSelection
from larder.cache.spec import with_prefix
from larder.core.errors import CacheError
from larder.core.spec import LayerSpec
from larder.core.types import AppendKind, Mode, Queries
from larder.ops.attention import merge_attention, ragged_attention
from larder.ops.packing import starts_of

SET_STRIDE = 1 << 40  # added per set; entry numbers are far below
PARKED = "parked"
OUTS, SUMS, PLACES, SEEN, COUNTS, IDS = "outs", "sums", "places", "seen", "seen.lengths", "ids"
PAST = "past."  # before these names in a state
NO_ENTRIES = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class PastAnswer:
    """Attention output of a recent token.

    Args:
        position: its true position.
        seen: offloaded entries it attended to, per set.
        parked: offloaded entries of each kv head then; it saw later ones before their offload.
    """

    position: int
    out: Float[Tensor, "H 1 D"]
    lse: Float[Tensor, "H 1"]
    seen: Int64[Tensor, " E"]
    parked: Int64[Tensor, " K"]

    def copy(self) -> PastAnswer:
        """Answer with copies of all tensors."""
        own = (self.out, self.lse, self.seen, self.parked)
        return PastAnswer(self.position, *(each.clone() for each in own))


class CorrectedLayer(TieredLayer):
    """Tiered layer that stores the outputs of the latest `recall.corrected` tokens."""

    has_public_name = False
    reads_in_place = False

    _past: tuple[PastAnswer, ...] = ()
    _ids: Int64[Tensor, " P"] = NO_ENTRIES
    _used: PageSelection | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        """Ids of the tokens to replay with the next one."""
        return tuple(self._ids[: len(self._past)].tolist())

    def record_ids(self, ids: Sequence[int]) -> None:
        """Record the ids of the tokens read last."""
        latest = torch.cat([self._ids, torch.tensor(ids, dtype=torch.int64)])
        self._ids = latest[len(latest) - len(self._past) :]
        self._count_bytes()

    def observe(self, new: NewTokens, state: AttentionState) -> None:
        super().observe(new, state)
        if len(new) > 1 or self._append_kind is not AppendKind.STEP:
            self._past = ()  # texts attend to everything: nothing to correct
        else:
            used = NO_ENTRIES if self._used is None else _selected_entries(self._used)
            parked = torch.tensor(self._slow.lengths)
            latest = PastAnswer(int(new.positions[0]), *state, used, parked)
            self._past = (*self._past, latest)[-self.parking.recall.corrected :]
        self._count_bytes()

    def attend_replayed(
        self, replayed: NewTokens, answer: Callable[[], Queries]
    ) -> Float[Tensor, "H N D"]:
        """Attention of the replayed latest tokens; replaces their entries, corrects their outputs.

        Raises:
            CacheError: they are not the latest entries of the layer.
        """
        former = self._past
        indices = [past.position for past in former]
        if self._ragged.shared_nbytes:
            self._ragged.separate()  # entries are written
        held = self._ragged.entries()
        tails = [
            held.head_positions(head)[-len(indices) :].tolist()
            for head in range(len(replayed.keys))
        ]
        if replayed.positions.tolist() != indices or any(tail != indices for tail in tails):
            raise CacheError(
                f"Layer {self.layer.index} cannot correct its outputs at positions "
                f"{replayed.positions.tolist()}, which are not its latest entries: protect at "
                "least as many recent tokens as are corrected."
            )
        ends = torch.tensor([s + n for s, n in zip(held.starts, held.lengths, strict=True)])
        rows = (ends[:, None] + torch.arange(-len(indices), 0)).flatten().to(held.keys.device)
        held.keys[rows] = replayed.keys.flatten(0, 1).to(held.keys)
        held.values[rows] = replayed.values.flatten(0, 1).to(held.values)
        new = answer()
        queries = replayed.queries.split(1, 1)
        mended = [self._mended(past, own) for past, own in zip(former, queries, strict=True)]
        self._past = (*mended, self._past[-1])[-self.parking.recall.corrected :]
        self._count_bytes()
        return torch.cat(
            [*(self.output((past.out, past.lse), new.dtype) for past in mended), new], 1
        )

    def truncate(self, length: int) -> None:
        """Drop entries at `length` and later; no remaining token is corrected any more."""
        super().truncate(length)
        self._forget_past()

    def drop_range(self, start: int, stop: int) -> None:
        """Drop entries at [start, stop); no remaining token is corrected any more."""
        super().drop_range(start, stop)
        self._forget_past()

    def _forget_past(self) -> None:
        self._past, self._ids = (), NO_ENTRIES
        self._count_bytes()

    def state(self) -> dict[str, Tensor]:
        state, past = super().state(), self._past
        if not past:
            return state
        parts = {
            OUTS: torch.stack([each.out for each in past]),
            SUMS: torch.stack([each.lse for each in past]),
            PLACES: torch.tensor([each.position for each in past]),
            SEEN: torch.cat([each.seen for each in past]),
            COUNTS: torch.tensor([len(each.seen) for each in past]),
            PARKED: torch.stack([each.parked for each in past]),
            IDS: self._ids.clone(),
        }
        return state | {PAST + name: part for name, part in parts.items()}

    @classmethod
    def adopt(cls, layer: LayerSpec, state: dict[str, Tensor]) -> CorrectedLayer:
        store = super().adopt(layer, state)
        assert isinstance(store, CorrectedLayer)
        if PAST + OUTS in state:
            own = with_prefix(PAST, state)
            seen = own[SEEN].cpu().split(own[COUNTS].tolist())
            store._past = tuple(
                PastAnswer(
                    position=position, out=own[OUTS][n], lse=own[SUMS][n], seen=seen[n], parked=held
                )
                for n, (position, held) in enumerate(
                    zip(own[PLACES].tolist(), own[PARKED].cpu(), strict=True)
                )
            )
            store._ids = own[IDS].cpu()
            store._count_bytes()
        return store

    def _like(self) -> CorrectedLayer:
        copy = super()._like()
        assert isinstance(copy, CorrectedLayer)
        copy._past, copy._ids = self._past, self._ids
        copy._count_bytes()
        return copy

    def _copy_tensors(self) -> None:
        self._past = tuple(past.copy() for past in self._past)
        self._ids = self._ids.clone()
        super()._copy_tensors()

    def own_tensors(self) -> tuple[Tensor, ...]:
        own = [part for past in self._past for part in (past.out, past.lse, past.seen, past.parked)]
        return (*super().own_tensors(), *own, self._ids)

    def attention_calls(self, new: NewTokens) -> Iterator[AttentionCall]:
        self._used = None
        return super().attention_calls(new)

    def _offloaded_calls(self, queries: Queries, mode: Mode) -> Iterable[AttentionCall]:
        calls = super()._offloaded_calls(queries, mode)
        taken = self._leader_selection(self._slow.entries())
        self._used = self.fetcher.selection if taken is None else taken
        return calls

    def _mended(self, past: PastAnswer, query: Float[Tensor, "H 1 D"]) -> PastAnswer:
        """Corrected output of a token, with the newly fetched entries it has not seen."""
        if self._used is None:
            return past
        fetched = _selected_entries(self._used)
        held, sets = self._slow.entries(), len(self._used.pages)
        group = sets // self.layer.kv_heads
        was_there = fetched % SET_STRIDE < past.parked[fetched // SET_STRIDE // group]
        fresh = fetched[was_there & ~torch.isin(fetched, past.seen)].sort().values
        if not len(fresh):
            return past
        owners = fresh // SET_STRIDE
        lengths = torch.bincount(owners, minlength=sets)
        rows = torch.tensor(held.starts)[owners // group] + fresh % SET_STRIDE
        keys, values = torch.empty(2, len(rows), self.layer.head_dim, dtype=self.fetcher.like[0])
        held.gather(rows, keys, values)
        near = keys.to(query.device), values.to(query.device)
        layout = starts_of(lengths), lengths, self.layer.scaling
        out, lse = ragged_attention(query, *near, *layout, softcap=self.layer.softcap)
        mended = merge_attention([past.out, out], [past.lse, lse])
        return PastAnswer(past.position, *mended, torch.cat([past.seen, fresh]), past.parked)


def _selected_entries(selection: PageSelection) -> Int64[Tensor, " E"]:
    """Entries of the selected pages, numbered apart for each set."""
    numbers = selection.numbers.flatten(1)
    numbered = numbers + SET_STRIDE * torch.arange(len(numbers))[:, None]
    return numbered[numbers >= 0]


Part = CorrectedLayer

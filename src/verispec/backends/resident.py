"""What a backend knows of the sequences that run: one row of arrays each, written by `bind` and by the rows of passes.

    table[row]       slots by position          slot_tokens[slot]   the token whose K/V the slot holds
    seeds[row] ...   how the sequence samples   next_token, length  where a burst left it, for rows the host cannot name

The tokens a penalty looks at are those of the row's own context, so nothing has to be sent or undone for them: the path
of a draft is context like everything else. Shared by the backends that compute on the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from verispec.backends.protocol import FROM_STATE, BackendLimits, Noise, Pass, Rows
from verispec.errors import InputError
from verispec.kv import DUMP_SLOT, NUM_RESERVED
from verispec.sampling.draw import NO_TOKEN
from verispec.sampling.rows import Sampler, SamplingRows, log_or_off

Int32 = NDArray[np.int32]
Mask = NDArray[np.bool_]
_Edits = tuple[NDArray[Any], ...]  # row numbers, ids and values
_NO_IDS, _NO_VALUES = np.zeros(0, np.int64), np.zeros(0, np.float32)


class Fed(NamedTuple):
    """The last tokens drawn by some sequences, and those tokens' positions. Rounds move them on in place."""

    seq_rows: Int32  # [S]
    token_ids: NDArray[np.int64]  # [S]
    t: NDArray[np.int64]  # [S]


class Resident:
    """Arrays indexed by the rows of the slot table; row 0 is the padding's."""

    def __init__(self, limits: BackendLimits) -> None:
        count = limits.num_seq_rows + 1
        self._vocab_size = limits.vocab_size
        self.table = np.zeros((count, limits.context_len), np.int32)
        self.slot_tokens = np.zeros(limits.num_slots + NUM_RESERVED, np.int32)
        self.seeds = np.zeros(count, np.uint64)
        self.sample_index = np.zeros(count, np.int64)
        self.temperature = np.zeros(count, np.float32)
        self.top_k = np.zeros(count, np.int64)
        self.top_p = np.ones(count, np.float32)
        self.log_min_p = np.full(count, -math.inf, np.float32)
        self.min_lens = np.zeros(count, np.int64)  # no stop before this length
        self.limits = np.full(count, limits.context_len, np.int64)
        self.stop_ids = np.full((count, 1), NO_TOKEN, np.int64)  # padded; wider when a sequence has more
        self.has_edits = np.zeros(count, np.bool_)  # penalties, bias or a least length
        self._masks = np.zeros((limits.num_masks, -(-limits.vocab_size // 32)), np.uint32)
        self._masks[:1] = ~np.uint32(0)
        self._samplers: dict[int, Sampler] = {}
        self.next_tokens = np.full(count, NO_TOKEN, np.int64)  # NO_TOKEN: has ended
        self.lengths = np.zeros(count, np.int64)

    def bind(self, seq_row: int, sampler: Sampler) -> None:
        """Write everything of one sequence; nothing of the row's last owner stays."""
        params = sampler.params
        self.seeds[seq_row] = sampler.key.seed
        self.sample_index[seq_row] = sampler.key.sample_index
        self.temperature[seq_row] = params.temperature
        self.top_k[seq_row] = params.top_k
        self.top_p[seq_row] = params.top_p
        self.log_min_p[seq_row] = log_or_off(np.array([params.min_p], np.float32))[0]
        self.min_lens[seq_row] = sampler.prompt_len + params.min_tokens
        self.limits[seq_row] = min(sampler.limit, self.table.shape[1])
        stop_ids = [i for i in sampler.stop_ids if 0 <= i < self._vocab_size]
        missing = len(stop_ids) - self.stop_ids.shape[1]
        if missing > 0:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, missing)), constant_values=NO_TOKEN)
        self.stop_ids[seq_row] = NO_TOKEN
        self.stop_ids[seq_row, : len(stop_ids)] = stop_ids
        self.has_edits[seq_row] = params.has_penalties or bool(params.logit_bias) or params.min_tokens > 0
        self._samplers[seq_row] = sampler
        self.next_tokens[seq_row] = NO_TOKEN

    def set_masks(self, first: int, allowed: NDArray[np.uint32]) -> None:
        """Write rows of the mask table."""
        num_masks, width = self._masks.shape
        if not num_masks:
            raise InputError("this backend has no masks")
        if allowed.ndim != 2 or allowed.shape[1] != width or not 1 <= first <= num_masks - len(allowed):
            raise InputError(f"masks {first}.. of shape {allowed.shape} do not fit [1 to {num_masks}, {width}]")
        self._masks[first : first + len(allowed)] = allowed

    def take(self, pass_: Pass) -> Pass:
        """Note what the pass says of slots and tokens. Returns it with the rows named that the host could not name."""
        update = pass_.table_update
        self.table[update.seq_rows, update.positions] = update.slots
        rows = pass_.rows
        unnamed = rows.token_ids == FROM_STATE
        if unnamed.any():
            rows = self._named(rows, unnamed)
            pass_ = replace(pass_, rows=rows)
        self.slot_tokens[rows.slots] = rows.token_ids
        return pass_

    def _named(self, rows: Rows, unnamed: Mask) -> Rows:
        """Rows that go on from where a burst left their sequences; those of ended ones are padding."""
        at = np.flatnonzero(unnamed)
        seq_rows = rows.seq_rows[at]
        ended = self.next_tokens[seq_rows] == NO_TOKEN
        positions = np.where(ended, 0, self.lengths[seq_rows] - 1).astype(np.int32)
        rows = copied(rows)
        rows.token_ids[at] = np.maximum(self.next_tokens[seq_rows], 0)
        rows.positions[at], rows.slots[at] = positions, self.table[seq_rows, positions]
        rows.prefix_lens[at], rows.tail_lens[at] = positions + 1, 0
        idled(rows, at[ended])
        return rows

    def sampling(self, rows: Rows, drawn: Int32, noise: Noise | None = None) -> SamplingRows:
        """The sampling inputs of some rows of a pass."""
        seq_rows = rows.seq_rows[drawn]
        t = rows.positions[drawn].astype(np.int64) + 1
        penalties: list[_Edits] = []
        bias: list[_Edits] = []
        if self.has_edits[seq_rows].any():
            edited = [(i, int(drawn[i])) for i in np.flatnonzero(self.has_edits[seq_rows]).tolist()]
            penalties = [e for i, row in edited if (e := self._penalties(i, rows, row))]
            bias = [e for i, row in edited if (e := self._bias(i, int(rows.seq_rows[row]), int(t[i])))]
        return SamplingRows(
            seeds=self.seeds[seq_rows],
            t=t if noise is None else noise.t,
            sample_index=self.sample_index[seq_rows],
            stream=np.zeros(len(drawn), np.int64) if noise is None else noise.stream,
            temperature=self.temperature[seq_rows],
            top_k=self.top_k[seq_rows],
            top_p=self.top_p[seq_rows],
            log_min_p=self.log_min_p[seq_rows],
            penalty_rows=_joined([p[0] for p in penalties], _NO_IDS),
            penalty_ids=_joined([p[1] for p in penalties], _NO_IDS),
            repetition=_joined([p[2] for p in penalties], _NO_VALUES),
            penalty=_joined([p[3] for p in penalties], _NO_VALUES),
            bias_rows=_joined([b[0] for b in bias], _NO_IDS),
            bias_ids=_joined([b[1] for b in bias], _NO_IDS),
            bias=_joined([b[2] for b in bias], _NO_VALUES),
            masks=None if rows.masks is None else rows.masks[drawn].astype(np.int64),
            allowed=self._masks,
        )

    def _penalties(self, i: int, rows: Rows, row: int) -> _Edits | None:
        """Row number, ids, factors and amounts: of every token of the output, and for repetition of the prompt too."""
        seq_row = int(rows.seq_rows[row])
        sampler = self._samplers[seq_row]
        params = sampler.params
        if not params.has_penalties:
            return None
        tail = rows.tails[row, : rows.tail_lens[row]]
        context = np.concatenate([self.table[seq_row, : rows.prefix_lens[row]], tail])
        tokens = self.slot_tokens[context].astype(np.int64)
        first = 0 if params.repetition_penalty != 1.0 else sampler.prompt_len
        ids = np.unique(tokens[first:])
        counts = np.zeros(len(ids), np.int64)
        np.add.at(counts, np.searchsorted(ids, tokens[sampler.prompt_len :]), 1)
        amounts = np.where(counts > 0, params.presence_penalty + params.frequency_penalty * counts, 0.0)
        factors = np.full(len(ids), params.repetition_penalty, np.float32)
        return np.full(len(ids), i, np.int64), ids, factors, amounts.astype(np.float32)

    def _bias(self, i: int, seq_row: int, t: int) -> _Edits | None:
        """Row number, ids and values; stop ids are banned before the least length."""
        bias = {k: b for k, b in self._samplers[seq_row].params.logit_bias if k < self._vocab_size}
        if t < self.min_lens[seq_row]:
            bias |= {int(k): -math.inf for k in self.stop_ids[seq_row] if k != NO_TOKEN}
        if not bias:
            return None
        ids = np.fromiter(bias, np.int64, len(bias))
        return np.full(len(bias), i, np.int64), ids, np.fromiter(bias.values(), np.float32, len(bias))

    def goes_on(self, fed: Fed) -> Mask:
        """Whether sequences have a further token to draw behind these."""
        seq_rows, token_ids, t = fed
        stops = (self.stop_ids[seq_rows] == token_ids[:, None]).any(axis=1) & (t + 1 >= self.min_lens[seq_rows])
        return np.asarray((token_ids != NO_TOKEN) & ~stops & (t + 1 < self.limits[seq_rows]))

    def remember(self, fed: Fed) -> None:
        """Where a burst left its sequences."""
        self.next_tokens[fed.seq_rows] = np.where(self.goes_on(fed), fed.token_ids, NO_TOKEN)
        self.lengths[fed.seq_rows] = fed.t + 1

    def is_padding(self, rows: Rows, drawn: Int32) -> Mask:
        """Which of the rows stand for a sequence that had ended."""
        return np.asarray(rows.slots[drawn] == DUMP_SLOT)


def _joined(parts: Sequence[NDArray[Any]], empty: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate(parts) if parts else empty


def copied(rows: Rows) -> Rows:
    """Rows that can be written, with room for a tail of one slot."""
    tails = rows.tails if rows.tails.shape[1] else np.zeros((len(rows), 1), np.int32)
    columns = (rows.token_ids, rows.positions, rows.slots, rows.seq_rows, rows.prefix_lens, tails, rows.tail_lens)
    return replace(Rows(*(column.copy() for column in columns)), masks=rows.masks)


def idled(rows: Rows, at: NDArray[Any]) -> None:
    """Turn some rows into padding."""
    rows.positions[at], rows.slots[at], rows.prefix_lens[at] = 0, DUMP_SLOT, 0
    rows.tails[at, 0], rows.tail_lens[at] = DUMP_SLOT, 1

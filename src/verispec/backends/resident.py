"""What a backend knows of the sequences that run: one row of arrays each, written by `bind` and by the rows of passes.

    table[row]       slots by position          slot_tokens[slot]   the token whose K/V the slot holds
    sampled[.][row]  how the sequence samples   next_token, length  where a burst left it, for rows the host cannot name

The tokens a penalty looks at are those of the row's own context, so nothing has to be sent or undone for them: the path
of a draft is context like everything else. Shared by the backends that compute on the host.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from verispec.backends.protocol import FROM_STATE, NO_UPDATE, BackendLimits, Noise, Pass, Rows
from verispec.errors import InputError
from verispec.kv import DUMP_SLOT, NUM_RESERVED
from verispec.sampling.draw import NO_TOKEN
from verispec.sampling.rows import NO_EDITS, Sampler, SamplingRows, log_or_off

Int32 = NDArray[np.int32]
Mask = NDArray[np.bool_]
_Edits = dict[str, NDArray[Any]]  # fields of SamplingRows
_SAMPLED = {
    "seeds": np.uint64,
    "sample_index": np.int64,
    "temperature": np.float32,
    "top_k": np.int64,
    "top_p": np.float32,
    "log_min_p": np.float32,
}


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
        self.unsent = NO_UPDATE  # entries that changed in rounds and that the backend's own table lacks
        self.slot_tokens = np.zeros(limits.num_slots + NUM_RESERVED, np.int32)
        self._sampled = {name: np.zeros(count, dtype) for name, dtype in _SAMPLED.items()}
        self.min_lens = np.zeros(count, np.int64)  # no stop before this length
        self.limits = np.full(count, limits.context_len, np.int64)
        self.stop_ids = np.full((count, 1), NO_TOKEN, np.int64)  # padded; wider when a sequence has more
        self.has_edits = np.zeros(count, np.bool_)  # penalties, bias or a least length
        self._masks = np.zeros((limits.num_masks, -(-limits.vocab_size // 32)), np.uint32)
        self._masks[:1] = ~np.uint32(0)
        self._prompt_lens = np.zeros(count, np.int64)
        self._penalties = np.zeros((3, count))  # repetition, presence, frequency
        self._has_penalties = np.zeros(count, np.bool_)
        self._bias_ids = np.full((count, 1), NO_TOKEN, np.int64)  # padded as stop ids are
        self._bias = np.zeros((count, 1), np.float32)
        self.next_tokens = np.full(count, NO_TOKEN, np.int64)  # NO_TOKEN: has ended
        self.lengths = np.zeros(count, np.int64)

    def bind(self, seq_row: int, sampler: Sampler) -> None:
        """Write everything of one sequence; nothing of the row's last owner stays."""
        params = sampler.params
        log_min_p = log_or_off(np.array([params.min_p], np.float32))[0]
        values = (*sampler.key, params.temperature, params.top_k, params.top_p, log_min_p)
        for column, value in zip(self._sampled.values(), values, strict=True):
            column[seq_row] = value
        self.min_lens[seq_row] = sampler.prompt_len + params.min_tokens
        self.limits[seq_row] = min(sampler.limit, self.table.shape[1])
        bias = {i: value for i, value in params.logit_bias if i < self._vocab_size}
        stop_ids = [i for i in sampler.stop_ids if 0 <= i < self._vocab_size]
        self.stop_ids = _written(self.stop_ids, seq_row, stop_ids, NO_TOKEN)
        self._bias_ids = _written(self._bias_ids, seq_row, [*bias], NO_TOKEN)
        self._bias = _written(self._bias, seq_row, [*bias.values()], 0)
        self._prompt_lens[seq_row] = sampler.prompt_len
        self._penalties[:, seq_row] = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        self._has_penalties[seq_row] = params.has_penalties
        self.has_edits[seq_row] = params.edits_logits
        self.next_tokens[seq_row] = NO_TOKEN

    def set_masks(self, first: int, allowed: NDArray[np.uint32]) -> None:
        num_masks, width = self._masks.shape
        if not num_masks:
            raise InputError("this backend has no masks")
        if allowed.ndim != 2 or allowed.shape[1] != width or not 1 <= first <= num_masks - len(allowed):
            raise InputError(f"masks {first}.. of shape {allowed.shape} do not fit [1 to {num_masks}, {width}]")
        self._masks[first : first + len(allowed)] = allowed

    def renew_mask(self, mask: int, allowed: NDArray[np.uint32]) -> None:
        """Of a row of the table that a burst has for itself."""
        self._masks[mask] = allowed

    def take(self, pass_: Pass) -> Pass:
        """Note what the pass says of slots and tokens. Returns it with the rows named that the host could not name."""
        if len(self.unsent):
            pass_ = replace(pass_, table_update=self.unsent.followed_by(pass_.table_update))
            self.unsent = NO_UPDATE
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
        seq_rows = rows.seq_rows[drawn]
        t = rows.positions[drawn].astype(np.int64) + 1
        edits = NO_EDITS
        if self.has_edits[seq_rows].any():
            edits = self._penalised(rows, drawn) | self._biased(seq_rows, t)
        return SamplingRows(
            **{name: column[seq_rows] for name, column in self._sampled.items()},
            t=t if noise is None else noise.t,
            stream=np.zeros(len(drawn), np.int64) if noise is None else noise.stream,
            masks=None if rows.masks is None else rows.masks[drawn].astype(np.int64),
            allowed=self._masks,
            **edits,
        )

    def _penalised(self, rows: Rows, drawn: Int32) -> _Edits:
        """Of every token of the output, and for repetition of the prompt too."""
        at = np.flatnonzero(self._has_penalties[rows.seq_rows[drawn]])
        of = drawn[at]
        seq_rows, prefix_lens = rows.seq_rows[of], rows.prefix_lens[of]
        lengths = prefix_lens + rows.tail_lens[of]
        e = np.repeat(np.arange(len(at)), lengths)  # [context of all] whose context it is
        position = np.arange(len(e)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        slots, in_tail = self.table[seq_rows[e], position], position >= prefix_lens[e]
        slots[in_tail] = rows.tails[of[e[in_tail]], (position - prefix_lens[e])[in_tail]]
        is_output = position >= self._prompt_lens[seq_rows[e]]
        counts = is_output | (self._penalties[0, seq_rows[e]] != 1)
        keys = e[counts] * self._vocab_size + self.slot_tokens[slots[counts]]
        keys, which = np.unique(keys, return_inverse=True)
        num_output = np.bincount(which, is_output[counts], len(keys))
        e, ids = np.divmod(keys, self._vocab_size)
        repetition, presence, frequency = self._penalties[:, seq_rows[e]]
        amounts = np.where(num_output > 0, presence + frequency * num_output, 0.0)
        repetition, amounts = repetition.astype(np.float32), amounts.astype(np.float32)
        return {"penalty_rows": at[e], "penalty_ids": ids, "repetition": repetition, "penalty": amounts}

    def _biased(self, seq_rows: Int32, t: NDArray[np.int64]) -> _Edits:
        """Stop ids are banned before the least length, whatever their bias."""
        rows, i = np.nonzero(self._bias_ids[seq_rows] != NO_TOKEN)
        ids, values = self._bias_ids[seq_rows[rows], i], self._bias[seq_rows[rows], i]
        early = (t < self.min_lens[seq_rows])[:, None]
        banned_rows, i = np.nonzero((self.stop_ids[seq_rows] != NO_TOKEN) & early)
        banned = self.stop_ids[seq_rows[banned_rows], i]
        kept = ~np.isin(rows * self._vocab_size + ids, banned_rows * self._vocab_size + banned)
        rows = np.concatenate([rows[kept], banned_rows])
        order = np.argsort(rows, kind="stable")
        values = np.concatenate([values[kept], np.full(len(banned), -math.inf, np.float32)])
        ids = np.concatenate([ids[kept], banned])
        return {"bias_rows": rows[order], "bias_ids": ids[order], "bias": values[order]}

    def sample_keys(self, seq_rows: Int32) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Seeds and sample indices."""
        return self._sampled["seeds"][seq_rows], self._sampled["sample_index"][seq_rows]

    def is_greedy(self, seq_row: int) -> bool:
        return not self._sampled["temperature"][seq_row]

    def goes_on(self, fed: Fed) -> Mask:
        """Whether sequences have a further token to draw behind these."""
        seq_rows, token_ids, t = fed
        stops = (self.stop_ids[seq_rows] == token_ids[:, None]).any(axis=1) & (t + 1 >= self.min_lens[seq_rows])
        return np.asarray((token_ids != NO_TOKEN) & ~stops & (t + 1 < self.limits[seq_rows]))

    def remember(self, fed: Fed) -> None:
        """Where a burst left its sequences."""
        self.next_tokens[fed.seq_rows] = np.where(self.goes_on(fed), fed.token_ids, NO_TOKEN)
        self.lengths[fed.seq_rows] = fed.t + 1


def _written(table: NDArray[Any], row: int, values: Sequence[float], padding: int) -> NDArray[Any]:
    """The table with these values in a row, wider if they need it."""
    if len(values) > table.shape[1]:
        table = np.pad(table, ((0, 0), (0, len(values) - table.shape[1])), constant_values=padding)
    table[row, : len(values)], table[row, len(values) :] = values, padding
    return table


def copied(rows: Rows, width: int = 1) -> Rows:
    """Rows that can be written, with room for tails of so many slots."""
    tails = np.pad(rows.tails, ((0, 0), (0, max(0, width - rows.tails.shape[1]))))
    columns = (rows.token_ids, rows.positions, rows.slots, rows.seq_rows, rows.prefix_lens, tails, rows.tail_lens)
    return replace(Rows(*(column.copy() for column in columns)), masks=rows.masks)


def idled(rows: Rows, at: NDArray[Any]) -> None:
    """Turn some rows into padding."""
    rows.positions[at], rows.slots[at], rows.prefix_lens[at] = 0, DUMP_SLOT, 0
    rows.tails[at, 0], rows.tail_lens[at] = DUMP_SLOT, 1

"""A backend whose slots hold hashes of their history: one wrong slot, position, mask or store changes the output.

Its logits are a Markov table over the last token, so that n-gram drafts are sometimes right, plus a term hashed from
the whole context, so that any error in the context shows. Fast passes hash differently, as other shapes do on a real
device. `sabotage` breaks row purity on purpose: the control that shows a test can fail.
"""

from __future__ import annotations

import numpy as np

from verispec.backends.audit import CANDIDATE_SHAPES, KernelProbe
from verispec.backends.checks import check_pass
from verispec.backends.outputs import HostLogits, collect
from verispec.backends.protocol import PADDING_SEQ_ROW, BackendLimits, Pass, PassKind, PassResult, ReadyTicket
from verispec.backends.resident import Resident
from verispec.backends.rounds import run_rounds
from verispec.kv import DUMP_SLOT, NUM_RESERVED, ZERO_SLOT
from verispec.sampling.rows import Sampler

GOLDEN = 0x9E3779B97F4A7C15
WORD = 2**64 - 1


def mix(x: np.ndarray | int) -> np.ndarray:
    """splitmix64's finaliser."""
    x = np.atleast_1d(np.asarray(x, np.uint64))
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def combine(*parts: int) -> int:
    """A hash of them, mixed as above, in plain integers: most of this backend's time went into arrays of one."""
    h = 0
    for part in parts:
        h = (h * 31 + part + GOLDEN) & WORD
        h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9 & WORD
        h = (h ^ (h >> 27)) * 0x94D049BB133111EB & WORD
        h ^= h >> 31
    return h


class FakeBackend:
    shapes = CANDIDATE_SHAPES
    arithmetics = ("fake",)
    weights_version = 0

    def __init__(
        self,
        *,
        vocab_size: int = 16,
        context_len: int = 128,
        num_slots: int = 256,
        num_seq_rows: int = 32,
        max_tail: int = 64,
        num_stores: int = 1,
        num_masks: int = 8,
        follows: bool = True,
        looks_up: bool = False,
        model_seed: int = 0,
        sabotage: str = "",
        nan_token: int | None = None,
    ) -> None:
        self.limits = BackendLimits(
            vocab_size, context_len, num_slots, num_seq_rows, max_tail, num_stores, num_masks=num_masks,
            follows=follows, looks_up=looks_up,
        )  # fmt: skip
        rng = np.random.default_rng(model_seed)
        self.markov = rng.standard_normal((num_stores, vocab_size, vocab_size)).astype(np.float32) * 3
        self.kv = np.zeros((num_stores, num_slots + NUM_RESERVED), np.uint64)
        self.kv[:] = mix(np.arange(num_slots + NUM_RESERVED) + 999)  # rubbish that nobody may read
        self._places = np.arange(context_len + max_tail, dtype=np.uint64) * np.uint64(GOLDEN)
        self.resident = Resident(self.limits)
        self.sabotage = sabotage
        self.nan_token = nan_token
        self.passes: list[Pass] = []

    def bind(self, seq_row: int, sampler: Sampler) -> None:
        self.resident.bind(seq_row, sampler)

    def set_masks(self, first: int, allowed: np.ndarray) -> None:
        self.resident.set_masks(first, allowed)

    def submit(self, pass_: Pass) -> ReadyTicket:
        check_pass(pass_, self.limits)
        return ReadyTicket(run_rounds(self.resident, pass_, self.run))

    def run(self, pass_: Pass) -> PassResult:
        """One round; every round is recorded as the pass it is."""
        self.passes.append(pass_)
        hashes = self._write(pass_)
        wanted = pass_.wanted.head_rows()
        with np.errstate(over="ignore"):
            ids = np.arange(self.limits.vocab_size, dtype=np.uint64)
            words = mix(hashes[wanted][:, None] + ids * np.uint64(GOLDEN))  # [R, V]
        logits = self.markov[pass_.store, pass_.rows.token_ids[wanted]]
        logits = logits + ((words >> np.uint64(40)).astype(np.float32) / 2**24 - np.float32(0.5)) * 2
        if self.nan_token is not None:
            logits[pass_.rows.token_ids[wanted] == self.nan_token] = np.nan
        with np.errstate(invalid="ignore"):  # NaN is a value here, as on a real device
            return collect(pass_, self.resident, wanted, HostLogits(logits))

    def _write(self, pass_: Pass) -> np.ndarray:
        """Compute every row's hash in position order, so that rows see the rows before them, and store it."""
        rows, kv = pass_.rows, self.kv[pass_.store]
        salt = combine(pass_.store, hash(pass_.view) % 2**32 if pass_.view != type(pass_.view)() else 0)
        if pass_.kind is PassKind.FAST:
            salt = combine(salt, 77, len(rows))
        hashes = np.zeros(len(rows), np.uint64)
        kv[DUMP_SLOT] = combine(int(kv[DUMP_SLOT]), len(rows))  # what padding rows write: never twice the same
        for row in np.argsort(rows.positions, kind="stable").tolist():
            if rows.seq_rows[row] == PADDING_SEQ_ROW:
                continue
            context = self.resident.table[rows.seq_rows[row], : rows.prefix_lens[row]]
            if rows.tail_lens[row]:
                context = np.concatenate([context, rows.tails[row, : rows.tail_lens[row]]])
            assert context[-1] == rows.slots[row], "a row's own slot is the last of its context"
            assert (context != ZERO_SLOT).all(), "a masked entry is read as context"
            folded = mix(kv[context[:-1]] + self._places[: len(context) - 1]).sum()
            h = combine(int(rows.token_ids[row]), int(rows.positions[row]), int(folded), salt)
            if self.sabotage == "row_index":
                h = combine(h, row)
            hashes[row] = kv[rows.slots[row]] = h
        return hashes

    def poison(self, slots: list[int]) -> None:
        """Overwrite free slots, so that reading one shows."""
        for slot in slots:
            self.kv[:, slot] = mix(self.kv[:, slot] + np.uint64(12345))

    def fingerprint(self, store: int = 0) -> dict[str, str]:
        return {"arithmetic": "fake", "store": str(store)}

    def device(self) -> dict[str, str]:
        return {}

    def wrong_answers(self) -> tuple[str, ...] | None:
        return None

    def probes(self) -> list[KernelProbe]:
        def run(x: np.ndarray) -> np.ndarray:
            y = x * 2
            return y + np.arange(len(x), dtype=np.float32)[:, None] if self.sabotage else y

        return [KernelProbe("double", 8, run)]

    def close(self) -> None:
        pass

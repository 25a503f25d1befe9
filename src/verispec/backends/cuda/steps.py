"""The two ends of a round on the device: what the host sends for a pass, where it is unpacked, and what comes back.

One copy brings everything a pass needs: bindings, table entries, rows, draws and who goes on. The rest a round reads
from records of the sequences, so that further rounds need no host.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from verispec.backends.cuda.arguments import current_stream, filled, pointers, struct
from verispec.backends.cuda.compiler import Kernel, Modules
from verispec.backends.cuda.drawing import DrawInputs
from verispec.backends.cuda.kernels import RowInputs
from verispec.backends.protocol import BackendLimits
from verispec.kv import DUMP_SLOT, NUM_RESERVED
from verispec.sampling.rows import Sampler, log_or_off

Int32 = NDArray[np.int32]
MAX_ROUNDS = 255  # of one pass, behind its first
MAX_UPDATES = 1 << 16  # table entries that travel with a pass
MAX_STOPS = 16  # stop ids of a sequence that the device can look for
HEADER = (
    "round", "binds", "binds_at", "updates", "updates_at", "rows_at", "tail_width", "tails_at", "groups", "groups_at",
    "draws", "draws_at", "fed", "fed_at", "members", "members_at", "out_width",
)  # fmt: skip
_AT = {name: i for i, name in enumerate(HEADER)}
RECORD = (
    "seed_low", "seed_high", "sample", "temperature", "top_k", "top_p", "log_min_p", "limit", "next", "length",
    "broken", "num_stops",
)  # fmt: skip
RECORD_WORDS = 32
NEXT, LENGTH, BROKEN = (RECORD.index(name) for name in ("next", "length", "broken"))
_ROWS = ("token_ids", "positions", "slots", "seq_rows", "prefix_lens", "ready_lens", "tails")
_DRAWS = ("seeds", "counters", "temperature", "top_k", "top_p", "log_min_p", "masks")
_StepArgs = struct(
    "StepArgs",
    *pointers("sent", "records", "table", "slot_tokens", *_ROWS, "groups", "row_ids", *_DRAWS),
    *pointers("drawn", "logprobs", "not_finite", "out"),
    ("table_width", ctypes.c_longlong),
    *((name, ctypes.c_int) for name in ("tail_width", "rows", "num_groups", "head_rows", "is_round")),
)


class StepSizes(NamedTuple):
    """What one captured round has; `is_round`: one row for each member, wherever its record says it is."""

    rows: int
    head_rows: int
    num_groups: int = 0
    is_round: bool = False


class StepState:
    """The static tensors of a backend: what is sent, what is kept of sequences, the inputs of a pass, the results."""

    def __init__(self, limits: BackendLimits, max_rows: int, device: str) -> None:
        def zeros(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        count, rows = limits.num_seq_rows + 1, max_rows
        self.max_words = len(HEADER) + count * (RECORD_WORDS + 5) + rows * (15 + limits.max_tail) + 3 * MAX_UPDATES
        self.sent = zeros(self.max_words)
        self.records = zeros(count, RECORD_WORDS)
        self.slot_tokens = zeros(limits.num_slots + NUM_RESERVED)
        self.groups = zeros(rows, 2)
        self.row_ids = zeros(rows)
        self.allowed = zeros(limits.num_masks, -(-limits.vocab_size // 32))  # the mask table
        self.out = zeros((MAX_ROUNDS + 1) * 2 * rows)
        names = ("token_ids", "positions", "slots", "seq_rows", "prefix_lens", "ready_lens")
        table = zeros(count, limits.context_len)
        table[0] = DUMP_SLOT  # the context of padding
        self.inputs = RowInputs(**{n: zeros(rows) for n in names}, tails=zeros(rows, limits.max_tail), table=table)
        self.draws = DrawInputs(
            seeds=zeros(rows, 2), counters=zeros(rows, 3), top_k=zeros(rows), masks=zeros(rows),
            **{n: zeros(rows, dtype=torch.float32) for n in ("temperature", "top_p", "log_min_p")},
        )  # fmt: skip


class StepKernels:
    """`begin` and `end` of a round, put on the current stream."""

    def __init__(self, cache_folder: Path | None = None) -> None:
        self._modules, self._kernels = Modules(cache_folder), dict[str, Kernel]()

    def begin(self, state: StepState, sizes: StepSizes) -> None:
        """The inputs of the next pass."""
        self.launch("steps.cu", "begin_round", _arguments(state, sizes))

    def end(
        self, state: StepState, sizes: StepSizes, drawn: torch.Tensor, logprobs: torch.Tensor, not_finite: torch.Tensor
    ) -> None:
        """Results of the round, and where it leaves its sequences."""
        args = _arguments(state, sizes)
        self.launch("steps.cu", "end_round", filled(args, drawn=drawn, logprobs=logprobs, not_finite=not_finite))

    def launch(self, source: str, name: str, args: ctypes.Structure) -> None:
        """One block on the current stream."""
        if name not in self._kernels:
            self._kernels[name] = self._modules.kernel(source, name, {})
        self._kernels[name].launch((1, 1, 1), 1024, args, stream=current_stream())


def _arguments(state: StepState, sizes: StepSizes) -> ctypes.Structure:
    inputs, draws = state.inputs, state.draws
    return filled(
        _StepArgs(), sent=state.sent, records=state.records, table=inputs.table, slot_tokens=state.slot_tokens,
        groups=state.groups, row_ids=state.row_ids, out=state.out, table_width=inputs.table.shape[1],
        tail_width=inputs.tails.shape[1], **sizes._asdict(),
        **{name: getattr(inputs, name) for name in _ROWS}, **{name: getattr(draws, name) for name in _DRAWS},
    )  # fmt: skip


def record_of(sampler: Sampler, limits: BackendLimits) -> Int32:
    """A sequence as the device knows it: nothing of the row's last owner stays."""
    params, words = sampler.params, np.zeros(RECORD_WORDS, np.int32)
    seed = np.array([sampler.key.seed], np.uint64).view(np.int32)  # low word first
    floats = np.array([params.temperature, params.top_p, params.min_p], np.float32)
    floats[2:] = log_or_off(floats[2:])
    temperature, top_p, log_min_p = floats.view(np.int32).tolist()
    stops = [i for i in sampler.stop_ids if 0 <= i < limits.vocab_size][:MAX_STOPS]
    top_k, limit = min(params.top_k, limits.vocab_size), min(sampler.limit, limits.context_len)
    words[:2] = seed
    words[2 : len(RECORD)] = (
        sampler.key.sample_index, temperature, top_k, top_p, log_min_p, limit, -1, 0, 0, len(stops)
    )  # fmt: skip
    words[len(RECORD) : len(RECORD) + len(stops)] = stops
    return words


class Parcel:
    """What is sent for a pass, written into a host buffer part by part."""

    def __init__(self, words: Int32) -> None:
        self._words = words
        self._end = len(HEADER)
        words[: self._end] = 0

    def __len__(self) -> int:
        return self._end

    def set(self, name: str, value: int) -> None:
        """A number of the header."""
        self._words[_AT[name]] = value

    def put(self, name: str, *columns: NDArray[np.signedinteger[Any]]) -> None:
        """Columns of one length, one behind the other, and where they begin."""
        self._words[_AT[f"{name}_at"]] = self._end
        for column in columns:
            end = self._end + column.size
            self._words[self._end : end] = column.reshape(-1)
            self._end = end

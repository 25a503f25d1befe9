"""The draw as Python calls on torch tensors: tokens and log-probabilities with the bits of `verispec.sampling`.

Sampling parameters are data on the device, so one captured graph serves them all; filters are one kernel more. Logits
that a request's penalties and bias change come in as a second tensor.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import NamedTuple

import torch

from verispec.backends.cuda.arguments import current_stream, filled, pointers, struct
from verispec.backends.cuda.compiler import NOT_KEPT, Cubins, Kernel, Modules
from verispec.backends.cuda.kernels import RowInputs

_MIN_CHUNK, _MAX_CHUNK = 1024, 16384  # ids of one block
_CHILDREN_CHUNK = 2048  # the most, as draw.cuh has it
MASS_CHUNK = 1024  # ids whose probabilities draw_masses adds up
_ENOUGH_BLOCKS = 1024
_PARAMETERS = ("seeds", "counters", "temperature", "top_k", "top_p", "log_min_p", "masks")
_DrawArgs = struct(
    "DrawArgs",
    *pointers("raw", "edited", *_PARAMETERS, "allowed", "tops", "best", "sums", "kept", "token_ids", "logprobs"),
    *pointers("keys", "offered", "shares", "share_rows", "masses", "totals", "busy"),
    *((name, ctypes.c_int) for name in ("vocab", "mask_words", "chunk", "chunks", "k", "per_chunk")),
)
_FilterArgs = struct(
    "FilterArgs", ("draw", _DrawArgs), *pointers("bin_counts", "bin_weights", "likely", "num_listed", "listed", "ends")
)
_NUM_BINS, _NUM_LISTED = 2048, 4096  # as filter.cu has them
_AdvanceArgs = struct(
    "AdvanceArgs",
    *pointers("drawn", "token_ids", "positions", "slots", "prefix_lens", "ready_lens", "counters", "seq_rows", "table"),
    ("table_width", ctypes.c_longlong),
    ("rows", ctypes.c_int),
)
_NoiseArgs = struct("NoiseArgs", *pointers("out"), ("first", ctypes.c_uint), ("count", ctypes.c_uint))


@dataclass(frozen=True, slots=True)
class DrawInputs:
    """Sampling parameters of each row, on the device."""

    seeds: torch.Tensor  # [R, 2] int32 bits, low word first
    counters: torch.Tensor  # [R, 3] int32 bits: t, sample index, stream
    temperature: torch.Tensor  # [R] float32
    top_k: torch.Tensor  # [R] int32, 0 is off
    top_p: torch.Tensor  # [R] float32, 1 is off
    log_min_p: torch.Tensor  # [R] float32, -inf is off
    masks: torch.Tensor | None = None  # [R] int32, rows of the mask table; 0 allows everything


class Shares(NamedTuple):
    """Probabilities that stay on the device, and their sums. Those of row i of a pass are row `rows[i]`, -1: no row."""

    values: torch.Tensor  # [R, V] float32
    masses: torch.Tensor  # [R, V / MASS_CHUNK] float64
    rows: torch.Tensor  # [rows of the pass] int32

    @classmethod
    def of(cls, num_rows: int, vocab: int, rows: torch.Tensor) -> Shares:
        """Allocate them."""
        values = torch.empty(num_rows, vocab, dtype=torch.float32, device=rows.device)
        masses = torch.empty(num_rows, -(-vocab // MASS_CHUNK), dtype=torch.float64, device=rows.device)
        return cls(values, masses, rows)


class DrawKernels:
    """The draw of up to `rows` rows. `token_ids` (-1: nothing to draw) and `logprobs` hold the last results, `totals`
    what makes log-probabilities of raw logits: the largest of each row, and the logarithm of their sum."""

    def __init__(self, vocab: int, rows: int, cubins: Cubins = NOT_KEPT, device: str = "cuda") -> None:
        self._modules, self._kernels = Modules(cubins), dict[tuple[str, ...], Kernel]()
        self._vocab, most, self._chunks, self._device = vocab, -(-vocab // _MIN_CHUNK), 0, device
        self._filtering: dict[str, torch.Tensor] = {}
        empty = self._empty
        self.token_ids, self.logprobs = empty(rows, dtype=torch.int32), empty(rows, dtype=torch.float32)
        self.totals = empty(rows, 2, dtype=torch.float32)
        self._scratch = {
            "tops": empty(rows, 2, most), "best": empty(rows, most), "sums": empty(rows, most),
        }  # fmt: skip
        self._kept, self._all_kept = empty(rows), torch.full((rows,), -1, dtype=torch.int64, device=device)

    def _empty(self, *size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=self._device)

    def draw(
        self, logits: torch.Tensor, inputs: DrawInputs, rows: int, *, filters: bool, edited: torch.Tensor | None = None,
        allowed: torch.Tensor | None = None, busy: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Tokens of the first `rows` rows of logits [R, V]. Without `filters` no row may have one on, without
        `allowed`, the mask table [masks, V / 32], no row a mask. Nothing is drawn while `busy`, one word, is 0."""
        args = self._tops(logits, inputs, rows, filters=filters, edited=edited, allowed=allowed, busy=busy)
        self._launch("draw_best", (self._chunks, rows, 1), 256, args)
        self._launch("draw_token", (rows, 1, 1), 32, args)

    def children(
        self, logits: torch.Tensor, inputs: DrawInputs, rows: int, *, k: int, filters: bool,
        edited: torch.Tensor | None = None, allowed: torch.Tensor | None = None, shares: torch.Tensor | None = None,
        kept: Shares | None = None, busy: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """The k best children of each row: [3, R, k] int32, ids (-1: there are no more), and the bits of log p + noise
        and of log p. Probabilities are left in `shares` [R, V], or in `kept`, with their sums."""
        found = torch.empty(3, rows, k, dtype=torch.int32, device=logits.device)
        args = self._tops(
            logits, inputs, rows, filters=filters, edited=edited, allowed=allowed, max_chunk=_CHILDREN_CHUNK, busy=busy
        )  # fmt: skip
        per_chunk = min(k, args.chunk)
        keys = torch.empty(rows, self._chunks, per_chunk, dtype=torch.int64, device=logits.device)
        filled(args, keys=keys, offered=found, shares=shares, k=k, per_chunk=per_chunk)
        if kept is not None:
            filled(args, shares=kept.values, share_rows=kept.rows, masses=kept.masses)
        self._launch("draw_children", (self._chunks, rows, 1), 256, args)
        if k:
            self._launch("draw_offered", (rows, 1, 1), 256, args)
        if shares is not None or kept is not None:
            self._launch("draw_shares", (self._chunks, rows, 1), 256, args)
        if kept is not None:
            self._launch("draw_masses", (kept.masses.shape[1], rows, 1), 256, args)
        return found

    def _tops(
        self, logits: torch.Tensor, inputs: DrawInputs, rows: int, *, filters: bool, edited: torch.Tensor | None,
        allowed: torch.Tensor | None, busy: torch.Tensor | None, max_chunk: int = _MAX_CHUNK,
    ) -> ctypes.Structure:  # fmt: skip
        """The largest logits, and what the filters keep: what every further kernel begins with."""
        chunk = _MIN_CHUNK
        while chunk < max_chunk and rows * self._vocab > chunk * _ENOUGH_BLOCKS:
            chunk *= 2
        chunks = self._chunks = -(-self._vocab // chunk)
        args = filled(
            _DrawArgs(), raw=logits, edited=logits if edited is None else edited, token_ids=self.token_ids,
            logprobs=self.logprobs, totals=self.totals, kept=self._kept if filters else self._all_kept,
            vocab=self._vocab, chunk=chunk, chunks=chunks, allowed=allowed, busy=busy,
            mask_words=0 if allowed is None else allowed.shape[1],
            **self._scratch, **{name: getattr(inputs, name) for name in _PARAMETERS},
        )  # fmt: skip
        self._launch("draw_top", (chunks, rows, 1), 256, args)
        if filters:
            filter_args = filled(_FilterArgs(draw=args), **self._filter_scratch())
            self._launch("filter_bins", (chunks, rows, 1), 256, filter_args)
            self._launch("filter_ends", (rows, 1, 1), 1024, filter_args)
            self._launch("filter_list", (chunks, rows, 1), 256, filter_args)
            self._launch("filter_kept", (rows, 1, 1), 1024, filter_args)
        return args

    def _filter_scratch(self) -> dict[str, torch.Tensor]:
        """Made when filters are first wanted: most of it must be zero between draws, and the kernels see to that."""
        if not self._filtering:
            rows, empty = len(self._kept), self._empty
            self._filtering = {
                "bin_counts": empty(rows, _NUM_BINS, dtype=torch.int32), "bin_weights": empty(rows, _NUM_BINS),
                "likely": empty(rows, dtype=torch.int32), "num_listed": empty(rows, dtype=torch.int32),
                "listed": empty(rows, _NUM_LISTED), "ends": empty(rows, 3, dtype=torch.int32),
            }  # fmt: skip
        return self._filtering

    def sums(self, rows: int) -> torch.Tensor:
        """The weights of each row that the last call added up. int64"""
        return self._scratch["sums"].flatten()[: rows * self._chunks].view(rows, self._chunks).sum(1)

    def advance(self, inputs: RowInputs, draws: DrawInputs, rows: int) -> None:
        """The drawn tokens become the rows of the next pass, without the host."""
        names = ("token_ids", "positions", "slots", "prefix_lens", "ready_lens", "seq_rows", "table")
        args = filled(
            _AdvanceArgs(), drawn=self.token_ids, counters=draws.counters, table_width=inputs.table.shape[1], rows=rows,
            **{name: getattr(inputs, name) for name in names},
        )  # fmt: skip
        self._launch("advance_rows", (-(-rows // 256), 1, 1), 256, args)

    def noise(self, first: int, count: int) -> torch.Tensor:
        """The noise of `count` words from `first` on. float32"""
        out = torch.empty(count, dtype=torch.float32, device=self._device)
        self._launch("noise_of_words", (132 * 8, 1, 1), 256, filled(_NoiseArgs(), out=out, first=first, count=count))
        return out

    def _launch(self, name: str, grid: tuple[int, int, int], threads: int, args: ctypes.Structure) -> None:
        source = "filter.cu" if name.startswith("filter_") else "draw.cu"
        is_masked = getattr(getattr(args, "draw", args), "allowed", None)
        self.launch(source, name, grid, threads, args, defines={"MASKED": 1} if is_masked else {})

    def launch(
        self, source: str, name: str, grid: tuple[int, int, int], threads: int, args: ctypes.Structure, *,
        defines: dict[str, int],
    ) -> None:  # fmt: skip
        """On the current stream."""
        key = (name, *defines)
        if key not in self._kernels:
            self._kernels[key] = self._modules.kernel(source, name, defines)
        self._kernels[key].launch(grid, threads, args, stream=current_stream())

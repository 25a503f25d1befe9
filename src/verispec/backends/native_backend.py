"""The native backend: C++ kernels for CPUs that compute on the file's own blocks, and give the same bits everywhere.

Every row is reduced in an order that the kernel fixes, so rows are pure at every shape and no padding is needed; and
every float operation is one IEEE operation, so neither the CPU, its vector unit nor the threads change a bit.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verispec.backends import hopper_answers, native_answers
from verispec.backends import native_library as native
from verispec.backends.audit import KernelProbe, Progress, no_progress
from verispec.backends.blas import cpu_name, num_cores
from verispec.backends.checks import check_pass
from verispec.backends.cuda.arrange import ROW_SIZES
from verispec.backends.cuda.bits import bf16_bits
from verispec.backends.native_model import NativeModel, StoredModel
from verispec.backends.native_pack import LANES
from verispec.backends.options import HOPPER, QUANTISED, BackendOptions, NativeOptions
from verispec.backends.outputs import Handle
from verispec.backends.probe_rows import probe_rows
from verispec.backends.protocol import (
    Burst,
    BurstResult,
    DrawResult,
    NoisyTopKResult,
    Pass,
    PassResult,
    ReadyTicket,
    Rows,
    TopKResult,
    View,
    Wanted,
)
from verispec.backends.resident import Fed, Resident
from verispec.backends.rounds import before, no_rounds, run_rounds
from verispec.kv import DUMP_SLOT, NUM_RESERVED, TARGET_STORE
from verispec.model.architecture import Architecture
from verispec.sampling.draw import NO_TOKEN
from verispec.sampling.rows import SampleKey, Sampler, SamplingRows, plain_rows
from verispec.sampling.weights import SAMPLING, Totals
from verispec.sampling.weights import logprobs as logprobs_from
from verispec.types import SamplingParams

# By arithmetic: every shape up to 64, then steps; or those of a GPU. Rows are pure at all, and the audit shows it.
SHAPES = {"cpu-1": (*range(1, 65), *range(80, 129, 16), *range(160, 257, 32)), HOPPER: ROW_SIZES}
_PROBED_LENGTHS = (1, 15, 17, 200)
_ROW_ARRAYS = ("token_ids", "positions", "slots", "seq_rows", "prefix_lens", "tails", "tail_lens")
EMBEDDING = -1  # as the first layer of a part of a pass: what comes before layer 0

Float32 = NDArray[np.float32]


class NativeBackend:
    """One slot table, and per model the packed weights and a K/V store under the same slot ids."""

    weights_version = 0

    def __init__(
        self, models: Sequence[StoredModel], options: NativeOptions, *, progress: Progress = no_progress
    ) -> None:
        self.limits = options.limits([m.architecture for m in models])
        self._options = options
        self.arithmetics, self.shapes = options.SERVES["arithmetic"], SHAPES[options.arithmetic]
        self._num_threads = num_cores() if options.threads is None else options.threads
        self._kernels = native.Kernels(self._num_threads, options.isa)
        self._models = [
            NativeModel(
                model, self._kernels, options, context_len=self.limits.context_len,
                progress=partial(_report, progress, i, len(models)),
            )
            for i, model in enumerate(models)
        ]  # fmt: skip
        self.stores = [_KVStore(m.architecture, options.num_slots, options.kv_dtype) for m in models]
        self.resident = Resident(self.limits)

    @property
    def isa(self) -> str:
        """The instruction set of the kernels in use; it changes no bit."""
        return self._kernels.isa

    @property
    def weights_nbytes(self) -> int:
        """Memory of all packed weights."""
        return sum(model.nbytes for model in self._models)

    @property
    def _arithmetic(self) -> int:
        return native.ARITHMETICS.index(self._options.arithmetic)

    def bind(self, seq_row: int, sampler: Sampler) -> None:
        """A sequence takes this row of the table."""
        self.resident.bind(seq_row, sampler)

    def set_masks(self, first: int, allowed: NDArray[np.uint32]) -> None:
        """Write rows of the mask table."""
        self.resident.set_masks(first, allowed)

    def submit(self, pass_: Pass) -> ReadyTicket:
        """Run the pass now."""
        check_pass(pass_, self.limits)
        burst = pass_.burst
        if burst is None or len(burst.drafts) > 1 or self.resident.has_edits[pass_.rows.seq_rows[burst.rows]].any():
            return ReadyTicket(run_rounds(self.resident, pass_, self.run))  # penalties and bias are kept in Python
        if _has_nothing_else(pass_, burst):
            return ReadyTicket(self._whole(pass_, burst))
        return ReadyTicket(run_rounds(self.resident, pass_, self.run, self._further))

    def run(self, pass_: Pass) -> PassResult:
        """One round of a pass that was checked."""
        x, hidden = self.forward(pass_)
        head_rows = pass_.wanted.head_rows()
        if not len(head_rows):
            return PassResult(hidden=hidden)
        logits, totals = self.logits(pass_.store, x[head_rows])
        result = self._outputs(pass_, head_rows, logits, totals)
        return result if hidden is None else replace(result, hidden=hidden)

    def _whole(self, pass_: Pass, burst: Burst) -> PassResult:
        """A pass of a burst's rows alone: all of its rounds in one call."""
        pass_ = self.resident.take(pass_)
        fed, width = before(pass_, burst), 1 + int(burst.draft_lens.max())
        found = self._rounds(pass_, burst, fed, burst.rounds + 1)
        self.resident.remember(fed)
        count = 1 + found.accepted[:, 0]  # of round 0, whose draws are the pass's
        assert pass_.wanted.draw is not None
        draw = DrawResult(
            np.full(len(pass_.wanted.draw.rows), NO_TOKEN, np.int64),
            np.zeros(len(pass_.wanted.draw.rows), np.float32),
        )
        sequence, i = np.nonzero(np.arange(width) < count[:, None])
        at = np.searchsorted(pass_.wanted.draw.rows, burst.rows[sequence] + i)
        draw.token_ids[at], draw.logprobs[at] = found.token_ids[sequence, i], found.logprobs[sequence, i]
        columns = count[:, None] + np.arange(width * burst.num_rounds)
        inside = np.minimum(columns, found.token_ids.shape[1] - 1)
        tokens = np.take_along_axis(found.token_ids, inside, axis=1)
        tokens[columns > inside] = NO_TOKEN
        further = found._replace(token_ids=tokens, logprobs=np.take_along_axis(found.logprobs, inside, axis=1))
        return PassResult(draw=draw, burst=further)

    def _further(self, pass_: Pass, burst: Burst, fed: Fed) -> BurstResult:
        """All rounds but the first in one call."""
        return self._rounds(pass_, burst, fed, burst.rounds)

    def _rounds(self, pass_: Pass, burst: Burst, fed: Fed, rounds: NDArray[np.int32]) -> BurstResult:
        """So many rounds of each sequence, in one call; `fed` moves on."""
        resident, (seq_rows, tokens, t) = self.resident, fed
        first, first_tokens = t.copy(), tokens.copy()
        found = no_rounds(burst, int(rounds.max()))
        stop_ids = resident.stop_ids[seq_rows]
        arrays: dict[str, NDArray[np.generic]] = {
            "seq_rows": np.ascontiguousarray(seq_rows, np.int32),
            "rounds": np.ascontiguousarray(rounds, np.int32), "draft_lens": burst.draft_lens,
            "stop_ids": stop_ids, "min_lens": resident.min_lens[seq_rows], "limits": resident.limits[seq_rows],
            "earlier": resident.slot_tokens[resident.table[seq_rows, np.maximum(t - 1, 0)]].astype(np.int64),
            "tokens": tokens, "t": t, "drawn": found.token_ids, "logprobs": found.logprobs, "drafts": found.drafts,
            "accepted": found.accepted,
        }  # fmt: skip
        struct = native.Burst(
            num_sequences=len(seq_rows),
            num_rounds=int(rounds.max()),
            num_stop_ids=stop_ids.shape[1],
            max_draft=found.drafts.shape[2],
            **{name: native.address(array) for name, array in arrays.items()},
        )
        model, (rows, alive) = self._models[pass_.store], self._rows(pass_)
        sampling, also_alive = _sampling(resident.sampling(pass_.rows, burst.rows))
        skipped, drafting = [], None
        if burst.drafts:
            part = burst.drafts[0]
            skipped = self._skipped(part.store, part.view)
            drafting = ctypes.byref(native.Drafting(
                ctypes.pointer(self._models[part.store].struct), ctypes.pointer(self.stores[part.store].struct),
                *map(native.address, skipped), part.first_rows, part.least_logprob,
            ))  # fmt: skip
        self._kernels.call(
            "vs_burst", ctypes.byref(model.struct), ctypes.byref(rows), ctypes.byref(self.stores[pass_.store].struct),
            *self._skipped(pass_.store, pass_.view), ctypes.byref(sampling), ctypes.byref(struct), drafting,
        )  # fmt: skip
        del alive, also_alive, skipped
        tokens_of = np.concatenate([first_tokens[:, None], found.token_ids[:, :-1]], axis=1)  # that had rows
        i, j = np.nonzero(np.arange(tokens_of.shape[1]) < (t - first)[:, None])
        resident.slot_tokens[resident.table[seq_rows[i], first[i] + j]] = tokens_of[i, j]
        return found

    def _skipped(self, store: int, view: View) -> list[NDArray[np.uint8]]:
        layers = range(self._models[store].architecture.num_layers)
        return [np.array([(i, is_mlp) in view.skipped for i in layers], np.uint8) for is_mlp in (False, True)]

    def forward(self, pass_: Pass) -> tuple[Float32, Float32 | None]:
        """The residual stream behind the last layer, and what is wanted of it before: layers up to there, and so on."""
        model, wanted, start = self._models[pass_.store], pass_.wanted.hidden, pass_.start
        arch, x = model.architecture, np.zeros((len(pass_.rows), model.architecture.hidden_size), np.float32)
        live = np.flatnonzero(pass_.rows.slots != DUMP_SLOT)
        if len(live) < len(x) and wanted is None and start is None:  # nobody asks for what padding gives
            if len(live):
                columns = (getattr(pass_.rows, name)[live] for name in _ROW_ARRAYS)
                x[live], _ = self.forward(replace(pass_, rows=Rows(*columns)))
            return x, None
        rows, alive = self._rows(pass_)
        structs = [ctypes.byref(part) for part in (model.struct, rows, self.stores[pass_.store].struct)]
        skipped = self._skipped(pass_.store, pass_.view)
        layers = () if wanted is None else wanted.layers
        found: dict[int, Float32] = {}
        first = EMBEDDING
        for end in sorted({*layers, arch.num_layers} | ({0} if start is not None else set())):
            self._kernels.call("vs_layers", *structs, *skipped, x, first, end)
            first = end
            if end == 0 and start is not None:
                x[start.rows] = start.states
            if wanted is not None and end in layers:
                found[end] = x[wanted.rows]
        del alive
        return x, None if wanted is None else np.stack([found[i] for i in layers], axis=1)

    def _rows(self, pass_: Pass) -> tuple[native.RowArrays, list[NDArray[np.generic]]]:
        """The structure, and the arrays it points to."""
        rows = pass_.rows
        arrays = [np.ascontiguousarray(getattr(rows, name), np.int32) for name in _ROW_ARRAYS]
        addresses = dict(zip(_ROW_ARRAYS, map(native.address, arrays), strict=True))
        struct = native.RowArrays(
            num_rows=len(rows),
            tail_width=rows.tails.shape[1],
            table_width=self.resident.table.shape[1],
            table=native.address(self.resident.table),
            **addresses,
        )
        return struct, [*arrays]

    def logits(self, store: int, hidden: Float32) -> tuple[Float32, Float32]:
        """[R, V], and the totals of each row, [R, 2]."""
        logits = np.empty((len(hidden), self.limits.vocab_size), np.float32)
        totals = np.empty((len(hidden), 2), np.float32)
        struct = ctypes.byref(self._models[store].struct)
        self._kernels.call("vs_logits", struct, hidden, len(hidden), logits, totals)
        return logits, totals

    def _outputs(self, pass_: Pass, head_rows: NDArray[np.int32], logits: Float32, totals: Float32) -> PassResult:
        wanted, resident = pass_.wanted, self.resident

        def at(rows: NDArray[np.int32]) -> NDArray[np.int32]:
            return np.searchsorted(head_rows, rows).astype(np.int32)

        logprobs = top_k = noisy = handle = None
        if wanted.logprobs is not None:
            rows = at(wanted.logprobs.rows)
            logprobs = logprobs_from(logits[rows, wanted.logprobs.token_ids], Totals(*totals[rows].T))
        if wanted.top_k is not None:
            rows = at(wanted.top_k.rows)
            ids, values = self._best(logits, rows, wanted.top_k.k)
            top_k = TopKResult(ids, logprobs_from(values, Totals(*totals[rows].T)))
        if wanted.noisy_top_k is not None:
            part = wanted.noisy_top_k
            sampling = resident.sampling(pass_.rows, part.rows, part.noise)
            noisy = self._noisy_best(logits, at(part.rows), sampling, part.k)
        if wanted.distribution is not None:
            # Not for what is committed under `match`, so the shared code will do.
            rows = at(wanted.distribution.rows)
            sampling = resident.sampling(pass_.rows, wanted.distribution.rows)
            handle = Handle(np, logits[rows], sampling, Totals(*totals[rows].T))
        draw = None
        if wanted.draw is not None:
            sampling = resident.sampling(pass_.rows, wanted.draw.rows, wanted.draw.noise)
            draw = self._draw(sampling, at(wanted.draw.rows), logits, totals)
        return PassResult(
            draw=draw,
            logprobs=logprobs,
            top_k=top_k,
            noisy_top_k=noisy,
            distribution=handle,
        )

    def _draw(self, sampling: SamplingRows, rows: NDArray[np.int32], logits: Float32, totals: Float32) -> DrawResult:
        token_ids, logprobs = np.empty(len(rows), np.int64), np.empty(len(rows), np.float32)
        struct, alive = _sampling(sampling)
        self._kernels.call(
            "vs_draw", logits, rows, totals, self.limits.vocab_size, ctypes.byref(struct), token_ids, logprobs
        )
        del alive
        return DrawResult(token_ids, logprobs)

    def _best(self, logits: Float32, rows: NDArray[np.int32], k: int) -> tuple[NDArray[np.int64], Float32]:
        ids, values = np.empty((len(rows), k), np.int64), np.empty((len(rows), k), np.float32)
        self._kernels.call("vs_top_k", logits, rows, len(rows), self.limits.vocab_size, k, ids, values)
        return ids, values

    def _noisy_best(self, logits: Float32, rows: NDArray[np.int32], sampling: SamplingRows, k: int) -> NoisyTopKResult:
        ids = np.empty((len(rows), k), np.int64)
        values, logprobs = np.empty((2, len(rows), k), np.float32)
        struct, alive = _sampling(sampling)
        self._kernels.call(
            "vs_noisy_top_k", logits, rows, self.limits.vocab_size, ctypes.byref(struct), k, ids, values, logprobs
        )
        del alive
        return NoisyTopKResult(ids, values, logprobs)

    def kv(self, store: int, slots: NDArray[np.int64]) -> tuple[NDArray[np.generic], NDArray[np.generic]]:
        """Copies of K and V at these slots, [layers, slots, kv_heads, head_dim]; for tests and debugging."""
        return self.stores[store].k[:, slots], self.stores[store].v[:, slots]

    def fingerprint(self, store: int = TARGET_STORE) -> dict[str, str]:
        """Kernels, dtypes and model shapes: no CPU, no library, because bits depend on none."""
        return fingerprint([self._models[store].architecture], self._options)

    def device(self) -> dict[str, str]:
        """What the speed depends on."""
        return {
            "cpu": cpu_name(),
            "isa": self.isa,
            "build": self._kernels.build,
            "threads": str(self._num_threads),
        }

    def wrong_answers(self) -> tuple[str, ...]:
        """The known-answer tests of these models' kernels that fail on this library, instruction set and threads."""

        def like_this(model: StoredModel, options: NativeOptions) -> NativeBackend:
            return NativeBackend([model], replace(options, threads=self._num_threads, isa=self.isa))

        if self._options.arithmetic == HOPPER:
            return hopper_answers.wrong_answers(like_this)
        types = frozenset[str]().union(*(model.type_names for model in self._models))
        is_gemma = any(model.architecture.family == "gemma3" for model in self._models)
        quantises, cases = self._options.weights == QUANTISED, native_answers.cases(self._options.kv_dtype)
        chosen = [case for case in cases if case.concerns(types, quantises=quantises, is_gemma=is_gemma)]
        return native_answers.wrong_answers(chosen, like_this)

    def probes(self) -> list[KernelProbe]:
        """Every row kernel of the target's model, attention and sampling included."""
        model = self._models[TARGET_STORE]
        arch, layer = model.architecture, model.layer(0)
        matrices = {name: getattr(layer, name) for name in ("q", "k", "v", "o", "gate", "up", "down")}
        matrices["head"] = model.struct.head
        probes = [KernelProbe(name, m.num_in, partial(self._linear, m)) for name, m in matrices.items()]
        probes += [
            KernelProbe("norm", arch.hidden_size, partial(self._probe_norm, layer, arch)),
            KernelProbe("logits", arch.hidden_size, lambda x: self.logits(TARGET_STORE, np.ascontiguousarray(x))[0]),
            KernelProbe("activation", 2 * arch.mlp_size, partial(self._probe_activation, layer, arch)),
            KernelProbe("attention", arch.num_heads * arch.head_dim, partial(self._probe_attention, model)),
        ]
        vocab_size = self.limits.vocab_size
        probes.append(KernelProbe("logprob", vocab_size, self._probe_totals))
        probes.append(KernelProbe("draw", vocab_size, self._probe_draw))
        return probes

    def _linear(self, matrix: native.Matrix, x: Float32) -> Float32:
        y = np.empty((len(x), matrix.num_out), np.float32)
        self._kernels.call("vs_linear", self._arithmetic, ctypes.byref(matrix), np.ascontiguousarray(x), len(x), y)
        return y

    def _probe_norm(self, layer: native.Layer, arch: Architecture, x: Float32) -> Float32:
        y = np.empty_like(x)
        self._kernels.call(
            "vs_norm", np.ascontiguousarray(x), layer.attn_norm, len(x), arch.hidden_size, arch.norm_eps, y
        )
        return y

    def _probe_activation(self, layer: native.Layer, arch: Architecture, x: Float32) -> Float32:
        y = np.empty((len(x), arch.mlp_size), np.float32)
        x = np.ascontiguousarray(x)
        self._kernels.call("vs_activate", self._arithmetic, layer.activation, x, len(x), arch.mlp_size, y)
        return y

    def _probe_totals(self, x: Float32) -> Float32:
        y = np.empty((len(x), 2), np.float32)
        self._kernels.call("vs_totals", np.ascontiguousarray(x), len(x), x.shape[1], y)
        return y

    def _probe_draw(self, logits: Float32) -> NDArray[np.generic]:
        params = SamplingParams(temperature=0.8, top_p=0.95, top_k=40, seed=1)
        rows = np.arange(len(logits), dtype=np.int32)
        sampling = plain_rows(params, SampleKey(7, 0), [5] * len(logits))
        logits = np.ascontiguousarray(logits)
        drawn = self._draw(sampling, rows, logits, self._probe_totals(logits))
        return np.stack([drawn.token_ids.astype(np.float64), drawn.logprobs.astype(np.float64)], axis=1)

    def _probe_attention(self, model: NativeModel, x: Float32) -> Float32:
        """Attention of every kind of layer over scratch K/V; the outputs of all are joined."""
        arch = model.architecture
        num_slots = min(self.limits.num_slots, self.limits.context_len, max(_PROBED_LENGTHS))
        lengths = [min(length, num_slots) for length in _PROBED_LENGTHS]
        rng = np.random.default_rng(1)
        kinds = arch.distinct_layers()
        store = _KVStore(arch, num_slots, self._options.kv_dtype, num_layers=kinds[-1] + 1)
        for part in (store.k, store.v):
            real = part[:, NUM_RESERVED:, :, : arch.head_dim]
            real[:] = store.kept(rng.standard_normal(real.shape).astype(np.float32))
        table = rng.integers(NUM_RESERVED, num_slots + NUM_RESERVED, (3, num_slots)).astype(np.int32)
        rows = probe_rows(x, table, lengths)
        arrays = {name: np.ascontiguousarray(getattr(rows, name), np.int32) for name in _ROW_ARRAYS}
        struct = native.RowArrays(
            num_rows=len(x), tail_width=rows.tails.shape[1], table_width=num_slots, table=native.address(table),
            **{name: native.address(array) for name, array in arrays.items()},
        )  # fmt: skip
        outputs = np.empty((len(kinds), len(x), arch.num_heads * arch.head_dim), np.float32)
        for i, out in zip(kinds, outputs, strict=True):
            self._kernels.call(
                "vs_attend", ctypes.byref(model.struct), ctypes.byref(struct), ctypes.byref(store.struct), i,
                np.ascontiguousarray(x), out,
            )  # fmt: skip
        return np.concatenate(outputs, axis=1)

    def close(self) -> None:
        """End the threads; drop weights and stores."""
        self._kernels.close()
        self._models, self.stores = [], []


def _has_nothing_else(pass_: Pass, burst: Burst) -> bool:
    """Whether every row of the pass is one of the burst's, and known, and only draws."""
    wanted, num_rows = pass_.wanted, len(burst.rows) + int(burst.draft_lens.sum())
    return (
        wanted == Wanted(draw=wanted.draw)
        and wanted.draw is not None
        and wanted.draw.noise is None
        and pass_.rows.masks is None
        and len(wanted.draw.rows) == num_rows == int((pass_.rows.slots != DUMP_SLOT).sum())
        and bool((pass_.rows.token_ids[burst.rows] >= 0).all())
    )


def _report(progress: Progress, index: int, num_models: int, share: float) -> None:
    progress("loading", (index + share) / num_models)


class _KVStore:
    """K and V of one model, [layers, slots, kv_heads, head_dim padded to 16 with zeros]."""

    def __init__(self, arch: Architecture, num_slots: int, dtype: str, num_layers: int | None = None) -> None:
        num_layers = arch.num_layers if num_layers is None else num_layers
        shape = (num_layers, num_slots + NUM_RESERVED, arch.num_kv_heads, -(-arch.head_dim // LANES) * LANES)
        self._dtype = dtype
        self.k = np.zeros(shape, self.kept(np.zeros(0, np.float32)).dtype)
        self.v = np.zeros_like(self.k)
        self.struct = native.Store(native.address(self.k), native.address(self.v), num_slots + NUM_RESERVED)

    def kept(self, values: Float32) -> NDArray[Any]:
        """As they are stored."""
        return bf16_bits(values) if self._dtype == "bfloat16" else values.astype(self._dtype)


def fingerprint(architectures: Sequence[Architecture], options: BackendOptions) -> dict[str, str]:
    """The fingerprint of a backend with these models, which need not be loaded for it."""
    shapes = "\n".join(map(str, architectures))
    return {
        "arithmetic": options.arithmetic,
        "sampling": SAMPLING,
        "weights": options.weights,
        "kv_dtype": options.kv_dtype,
        "shapes": hashlib.sha256(shapes.encode()).hexdigest()[:16],
    }


def _sampling(rows: SamplingRows) -> tuple[native.Sampling, list[NDArray[np.generic]]]:
    """The structure, and the arrays it points to."""
    names = [field[0] for field in native.Sampling._fields_[4:]]
    arrays = {name: np.ascontiguousarray(part) for name in names if (part := getattr(rows, name)) is not None}
    struct = native.Sampling(
        num_rows=len(rows),
        num_penalties=len(rows.penalty_rows),
        num_bias=len(rows.bias_rows),
        mask_words=0 if rows.allowed is None else rows.allowed.shape[1],
        **{name: native.address(array) for name, array in arrays.items()},
    )
    return struct, list(arrays.values())

"""The native backend: C++ kernels for CPUs that compute on the file's own blocks, and give the same bits everywhere.

Every row is reduced in an order that the kernel fixes, so rows are pure at every shape and no padding is needed; and
every float operation is one IEEE operation, so neither the CPU, its vector unit nor the threads change a bit.
"""

from __future__ import annotations

import ctypes
import hashlib
import time
from collections.abc import Callable, Sequence
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
from verispec.backends.native_model import LANES, MATRICES, NativeModel
from verispec.backends.options import HOPPER, QUANTISED, BackendOptions, LoadedModel, NativeOptions
from verispec.backends.outputs import Int64, collect
from verispec.backends.probes import attention_probe, draw_probe
from verispec.backends.protocol import (
    Burst,
    BurstResult,
    Drafting,
    Float32,
    Int32,
    Pass,
    PassResult,
    ReadyTicket,
    Rows,
    View,
    Wanted,
)
from verispec.backends.resident import Fed, Resident
from verispec.backends.rounds import Following, before, no_rounds, run_rounds
from verispec.kv import DUMP_SLOT, NUM_RESERVED, TARGET_STORE
from verispec.model.architecture import Architecture
from verispec.sampling.draw import NO_TOKEN, DrawResult, NoisyTopK, TopKResult
from verispec.sampling.rows import SamplingRows
from verispec.sampling.weights import SAMPLING, Totals, logprobs

# By arithmetic: every shape up to 64, then steps; or those of a GPU. Rows are pure at all, and the audit shows it.
SHAPES = {"cpu-1": (*range(1, 65), *range(80, 129, 16), *range(160, 257, 32)), HOPPER: ROW_SIZES}
_PROBED_LENGTHS = (1, 15, 17, 200)
_MOST_VIEWS = 64  # whose skipped layers are kept as the kernels read them
EMBEDDING = -1  # as the first layer of a part of a pass: what comes before layer 0


class NativeBackend:
    """One slot table, and per model the packed weights and a K/V store under the same slot ids."""

    weights_version = 0

    def __init__(
        self, models: Sequence[LoadedModel], options: NativeOptions, *, progress: Progress = no_progress
    ) -> None:
        self.limits = replace(options.limits([m.architecture for m in models]), looks_up=True, fits_rows=True)
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
        self._views: dict[tuple[int, View], list[NDArray[np.uint8]]] = {}
        self.bind, self.set_masks = self.resident.bind, self.resident.set_masks

    @property
    def isa(self) -> str:
        """The instruction set of the kernels in use; it changes no bit."""
        return self._kernels.isa

    @property
    def weights_nbytes(self) -> int:
        return sum(model.nbytes for model in self._models)

    def submit(self, pass_: Pass) -> ReadyTicket:
        start, in_kernels = time.perf_counter(), self._kernels.seconds
        check_pass(pass_, self.limits)
        result = self._all_rounds(pass_)
        host_seconds = time.perf_counter() - start - (self._kernels.seconds - in_kernels)
        return ReadyTicket(replace(result, host_seconds=host_seconds))

    def _all_rounds(self, pass_: Pass) -> PassResult:
        burst = pass_.burst
        if burst is None or self._needs_python(pass_, burst):
            return run_rounds(self.resident, pass_, self.run)
        if _has_nothing_else(pass_, burst):
            return self._whole(pass_, burst)
        return run_rounds(self.resident, pass_, self.run, self._further)

    def _needs_python(self, pass_: Pass, burst: Burst) -> bool:
        """Penalties and bias are kept there; drafts by two ways, or beside masks, are rare."""
        has_edits = self.resident.has_edits[pass_.rows.seq_rows[burst.rows]].any()
        return bool(has_edits) or len(burst.drafts) > (1 if burst.follow is None else 0)

    def run(self, pass_: Pass) -> PassResult:
        """One round of a pass that was checked."""
        x, hidden = self.forward(pass_)
        head_rows = pass_.wanted.head_rows()
        if not len(head_rows):
            return PassResult(hidden=hidden)
        logits = self.logits(pass_.store, x[head_rows])
        result = collect(pass_, self.resident, head_rows, logits)
        return result if hidden is None else replace(result, hidden=hidden)

    def _whole(self, pass_: Pass, burst: Burst) -> PassResult:
        """A pass of a burst's rows alone: all of its rounds in one call."""
        pass_ = self.resident.take(pass_)
        fed = before(pass_, burst)
        found = self._rounds(pass_, burst, fed, burst.rounds + 1)
        self.resident.remember(fed)
        assert pass_.wanted.draw is not None
        if not burst.drafts:
            order = np.argsort(burst.rows)  # that of the rows that draw
            token_ids, logprobs = found.token_ids, found.logprobs
            further = found._replace(token_ids=token_ids[:, 1:], logprobs=logprobs[:, 1:])
            return PassResult(draw=DrawResult(token_ids[order, 0], logprobs[order, 0]), burst=further)
        drawn, width = pass_.wanted.draw.rows, 1 + int(burst.draft_lens.max())
        count = 1 + found.accepted[:, 0]  # of round 0, whose draws are the pass's
        draw = DrawResult(np.full(len(drawn), NO_TOKEN, np.int64), np.zeros(len(drawn), np.float32))
        sequence, i = np.nonzero(np.arange(width) < count[:, None])
        at = np.searchsorted(drawn, burst.rows[sequence] + i)
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

    def _rounds(self, pass_: Pass, burst: Burst, fed: Fed, rounds: Int32) -> BurstResult:
        """So many rounds of each sequence, in one call, or in one each where masks are followed; `fed` moves on."""
        resident, (seq_rows, tokens, t) = self.resident, fed
        num_rounds = int(rounds.max())
        found, stop_ids = no_rounds(burst, num_rounds), resident.stop_ids[seq_rows]
        struct = native.Burst(
            num_sequences=len(seq_rows), num_rounds=num_rounds, num_stop_ids=stop_ids.shape[1],
            max_draft=found.drafts.shape[2], first_round=0, end_round=num_rounds,
            seq_rows=np.ascontiguousarray(seq_rows, np.int32), rounds=np.ascontiguousarray(rounds, np.int32),
            draft_lens=burst.draft_lens, stop_ids=stop_ids,
            min_lens=resident.min_lens[seq_rows], limits=resident.limits[seq_rows],
            tokens=tokens, t=t, slot_tokens=resident.slot_tokens, drawn=found.token_ids, logprobs=found.logprobs,
            drafts=found.drafts, accepted=found.accepted,
        )  # fmt: skip
        drafting = self._drafting(burst.drafts[0]) if burst.drafts else None
        run = self._kernels.prepared(
            "vs_burst", *self._structs(pass_), *self._skipped(pass_.store, pass_.view),
            sampling_struct(resident.sampling(pass_.rows, burst.rows)), struct, drafting,
        )  # fmt: skip
        if burst.follow is None:
            run()
        else:
            following = Following(resident, pass_, burst, fed, rounds)
            for number in range(num_rounds):  # by few operations: a pass leaves the caches cold
                struct.first_round, struct.end_round = number, number + 1
                run()
                following.renew(number)
                if not following.goes_on(number + 1):
                    break
        return found

    def _drafting(self, part: Drafting) -> native.Drafting:
        """Passes of a model, or none: chains are looked up then."""
        if part.looks_up:
            return native.Drafting()
        skip_attention, skip_mlp = self._skipped(part.store, part.view)
        return native.Drafting(
            model=ctypes.pointer(self._models[part.store].struct),
            store=ctypes.pointer(self.stores[part.store].struct),
            skip_attention=skip_attention, skip_mlp=skip_mlp,
            first_rows=part.first_rows, least_logprob=part.least_logprob,
        )  # fmt: skip

    def _skipped(self, store: int, view: View) -> list[NDArray[np.uint8]]:
        found = self._views.get((store, view))
        if found is None:
            layers = range(self._models[store].architecture.num_layers)
            found = [np.array([(i, is_mlp) in view.skipped for i in layers], np.uint8) for is_mlp in (False, True)]
            if len(self._views) == _MOST_VIEWS:
                self._views.clear()
            self._views[store, view] = found
        return found

    def forward(self, pass_: Pass) -> tuple[Float32, Float32 | None]:
        """The residual stream behind the last layer, and what is wanted of it before: layers up to there, and so on."""
        model, wanted, start = self._models[pass_.store], pass_.wanted.hidden, pass_.start
        arch, x = model.architecture, np.zeros((len(pass_.rows), model.architecture.hidden_size), np.float32)
        live = np.flatnonzero(pass_.rows.slots != DUMP_SLOT)
        if len(live) < len(x) and wanted is None and start is None:  # nobody asks for what padding gives
            if len(live):
                columns = (getattr(pass_.rows, name)[live] for name in native.RowArrays.ROWS)
                x[live], _ = self.forward(replace(pass_, rows=Rows(*columns)))
            return x, None
        structs = self._structs(pass_)
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
        return x, None if wanted is None else np.stack([found[i] for i in layers], axis=1)

    def _structs(self, pass_: Pass) -> tuple[native.Structure, ...]:
        model, store = self._models[pass_.store].struct, self.stores[pass_.store].struct
        return model, _row_arrays(pass_.rows, self.resident.table), store

    def logits(self, store: int, hidden: Float32) -> _Logits:
        logits = np.empty((len(hidden), self.limits.vocab_size), np.float32)
        totals = np.empty((len(hidden), 2), np.float32)
        self._kernels.call("vs_logits", self._models[store].struct, hidden, len(hidden), logits, totals)
        return _Logits(self._kernels, logits, totals)

    def kv(self, store: int, slots: NDArray[np.int64]) -> tuple[NDArray[np.generic], NDArray[np.generic]]:
        """Copies of K and V at these slots, [layers, slots, kv_heads, head_dim]; for tests and debugging."""
        return self.stores[store].k[:, slots], self.stores[store].v[:, slots]

    def fingerprint(self, store: int = TARGET_STORE) -> dict[str, str]:
        """Kernels, dtypes and model shapes: no CPU, no library, because bits depend on none."""
        return fingerprint([self._models[store].architecture], self._options)

    def device(self) -> dict[str, str]:
        build, threads = self._kernels.build, str(self._num_threads)
        return {"cpu": cpu_name(), "isa": self.isa, "build": build, "threads": threads}

    def wrong_answers(self) -> tuple[str, ...]:
        """The known-answer tests of these models' kernels that fail on this library, instruction set and threads."""

        def like_this(model: LoadedModel, options: NativeOptions) -> NativeBackend:
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
        call, model, vocab_size = self._kernels.call, self._models[TARGET_STORE], self.limits.vocab_size
        arch, layer = model.architecture, model.layers[0]
        width, mlp_size = arch.hidden_size, arch.mlp_size
        arithmetic = native.ARITHMETICS.index(self._options.arithmetic)

        def probe(name: str, num_in: int, num_out: int, kernel: Callable[[Float32, int, Float32], Any]) -> KernelProbe:
            def run(x: Float32) -> Float32:
                y = np.empty((len(x), num_out), np.float32)
                kernel(np.ascontiguousarray(x), len(x), y)
                return y

            return KernelProbe(name, num_in, run)

        def product(name: str, matrix: native.Matrix) -> KernelProbe:
            return probe(
                name, matrix.num_in, matrix.num_out, lambda x, n, y: call("vs_linear", arithmetic, matrix, x, n, y)
            )

        def norm(x: Float32, num_rows: int, y: Float32) -> None:
            call("vs_norm", x, layer.attn_norm, num_rows, width, arch.norm_eps, y)

        def activate(x: Float32, num_rows: int, y: Float32) -> None:
            call("vs_activate", arithmetic, layer.activation, x, num_rows, mlp_size, y)

        def totals(x: Float32, num_rows: int, y: Float32) -> None:
            call("vs_totals", x, num_rows, vocab_size, y)

        def draw(x: Float32, sampling: SamplingRows) -> DrawResult:
            x, y = np.ascontiguousarray(x), np.empty((len(x), 2), np.float32)
            totals(x, len(x), y)
            return _Logits(self._kernels, x, y).draw(np.arange(len(x)), sampling)

        return [
            *(product(name, getattr(layer, name)) for name in MATRICES),
            product("head", model.struct.head),
            probe("norm", width, width, norm),
            KernelProbe("logits", width, lambda x: self.logits(TARGET_STORE, np.ascontiguousarray(x)).values),
            probe("activation", 2 * mlp_size, mlp_size, activate),
            attention_probe(arch, self.limits, _PROBED_LENGTHS, self._attend, num_turns=1),
            probe("logprob", vocab_size, 2, totals),
            draw_probe(vocab_size, draw),
        ]

    def _attend(self, layer: int, q: Float32, k: Float32, v: Float32, rows: Rows, table: Int32) -> Float32:
        """Attention of one layer over scratch K/V, for the audit."""
        model = self._models[TARGET_STORE]
        store = _KVStore(model.architecture, len(k) - NUM_RESERVED, self._options.kv_dtype, num_layers=layer + 1)
        for part, values in ((store.k, k), (store.v, v)):
            part[layer, ..., : model.architecture.head_dim] = store.kept(values)
        out = np.empty_like(q)
        structs = model.struct, _row_arrays(rows, table), store.struct
        self._kernels.call("vs_attend", *structs, layer, np.ascontiguousarray(q), out)
        return out

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
        self.struct = native.Store(k=self.k, v=self.v, slots_per_layer=num_slots + NUM_RESERVED)

    def kept(self, values: Float32) -> NDArray[Any]:
        """As they are stored."""
        return bf16_bits(values) if self._dtype == "bfloat16" else values.astype(self._dtype)


class _Logits:
    """By the kernels; they have the totals of each row already, [R, 2]."""

    def __init__(self, kernels: native.Kernels, values: Float32, totals: Float32) -> None:
        self._kernels, self.values, self._totals = kernels, values, totals
        self._vocab_size = values.shape[1]

    def draw(self, at: Int64, sampling: SamplingRows) -> DrawResult:
        found = DrawResult(np.empty(len(at), np.int64), np.empty(len(at), np.float32))
        struct = sampling_struct(sampling)
        self._kernels.call("vs_draw", self.values, at.astype(np.int32), self._totals, self._vocab_size, struct, *found)
        return found

    def logprobs(self, at: Int64, token_ids: Int32) -> Float32:
        return self._logprobs(at, self.values[at, token_ids])

    def _logprobs(self, at: Int64, values: Float32) -> Float32:
        found: Float32 = logprobs(values, Totals(*self._totals[at].T))
        return found

    def top_k(self, at: Int64, k: int) -> TopKResult:
        ids, values = np.empty((len(at), k), np.int64), np.empty((len(at), k), np.float32)
        rows = at.astype(np.int32)
        self._kernels.call("vs_top_k", self.values, rows, len(at), self._vocab_size, k, ids, values)
        return TopKResult(ids, self._logprobs(at, values))

    def noisy_top_k(self, at: Int64, sampling: SamplingRows, k: int) -> NoisyTopK:
        found = NoisyTopK(np.empty((len(at), k), np.int64), *np.empty((2, len(at), k), np.float32))
        struct = sampling_struct(sampling)
        self._kernels.call("vs_noisy_top_k", self.values, at.astype(np.int32), self._vocab_size, struct, k, *found)
        return found


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


def _row_arrays(rows: Rows, table: Int32) -> native.RowArrays:
    arrays = {name: np.ascontiguousarray(getattr(rows, name), np.int32) for name in native.RowArrays.ROWS}
    return native.RowArrays(
        num_rows=len(rows), tail_width=rows.tails.shape[1], table_width=table.shape[1], table=table, **arrays
    )


def sampling_struct(rows: SamplingRows) -> native.Sampling:
    arrays = {
        name: np.ascontiguousarray(part) for name in native.Sampling.ROWS if (part := getattr(rows, name)) is not None
    }
    return native.Sampling(
        num_rows=len(rows),
        num_penalties=len(rows.penalty_rows),
        num_bias=len(rows.bias_rows),
        mask_words=0 if rows.allowed is None else rows.allowed.shape[1],
        **arrays,
    )

"""The plain backend: numpy and its BLAS, float32. Obviously right, usable, and the oracle for the others.

Canonical and fast passes run the same code; what makes a pass canonical is its shapes, which the caller chooses: that
of the layers and that of the head.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from verispec.backends.audit import CANDIDATE_SHAPES, KernelProbe
from verispec.backends.blas import blas_name, cpu_name, single_threaded_blas
from verispec.backends.checks import check_pass
from verispec.backends.numpy_attention import attend, contexts
from verispec.backends.numpy_model import Float32, NumpyModel, Reader
from verispec.backends.options import BackendOptions, NumpyOptions
from verispec.backends.outputs import Outputs
from verispec.backends.probe_rows import probe_rows
from verispec.backends.protocol import Pass, PassResult, ReadyTicket, SubLayer
from verispec.backends.resident import Resident
from verispec.backends.rounds import run_rounds
from verispec.kv import NUM_RESERVED, TARGET_STORE
from verispec.model.architecture import Architecture
from verispec.sampling import draw
from verispec.sampling.rows import SampleKey, Sampler, plain_rows
from verispec.sampling.weights import SAMPLING, totals
from verispec.types import SamplingParams

_PROBED_LENGTHS = (1, 127, 129, 300, 520)  # context lengths at which the audit measures attention


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What the backend needs of a checkpoint: its architecture and a reader of float32 tensors."""

    architecture: Architecture
    read: Reader


class NumpyBackend:
    """One slot table, and per model the weights and a K/V store under the same slot ids."""

    shapes = CANDIDATE_SHAPES
    arithmetics = NumpyOptions.SERVES["arithmetic"]
    weights_version = 0

    def __init__(self, models: Sequence[LoadedModel], options: BackendOptions) -> None:
        self._options = options
        self.limits = options.limits([m.architecture for m in models])
        context_len = self.limits.context_len
        self._models = [NumpyModel(m.architecture, m.read, context_len=context_len) for m in models]
        self._stores = [_KVStore(m.architecture, options.num_slots) for m in models]
        self.resident = Resident(self.limits)
        self._outputs = Outputs(np)

    def bind(self, seq_row: int, sampler: Sampler) -> None:
        """A sequence takes this row of the table."""
        self.resident.bind(seq_row, sampler)

    def set_masks(self, first: int, allowed: NDArray[np.uint32]) -> None:
        """Write rows of the mask table."""
        self.resident.set_masks(first, allowed)

    def submit(self, pass_: Pass) -> ReadyTicket:
        """Run the pass now."""
        check_pass(pass_, self.limits)
        with single_threaded_blas(), np.errstate(all="ignore"):  # NaN is a value: the engine ends its request
            return ReadyTicket(run_rounds(self.resident, pass_, self.run))

    def run(self, pass_: Pass) -> PassResult:
        """One round of a pass that was checked."""
        streams = self._forward(pass_)
        head_rows, hidden = pass_.wanted.head_rows(), pass_.wanted.hidden
        logits = self._logits(pass_, streams[-1][head_rows])
        result = self._outputs.collect(pass_, self.resident, head_rows, logits)
        if hidden is None:
            return result
        return replace(result, hidden=np.stack([streams[i][hidden.rows] for i in hidden.layers], axis=1))

    def _forward(self, pass_: Pass) -> list[Float32]:
        """The residual stream before each layer, and behind the last."""
        model, store, skipped = self._models[pass_.store], self._stores[pass_.store], pass_.view.skipped
        rows = pass_.rows
        slots = contexts(rows, self.resident.table)
        x = model.embed(rows.token_ids)
        if pass_.start is not None:
            x[pass_.start.rows] = pass_.start.states
        streams = []
        for i, layer in enumerate(model.layers):
            streams.append(x)
            if SubLayer(i, is_mlp=False) not in skipped:
                q, k, v = model.qkv(layer, x, rows.positions)
                store.write(i, rows.slots, k, v)
                attended = attend(layer.spec, q, store.k[i], store.v[i], slots, rows.positions)
                x = x + model.attention_output(layer, attended)
            if SubLayer(i, is_mlp=True) not in skipped:
                x = x + model.mlp(layer, x)
        return [*streams, x]

    def _logits(self, pass_: Pass, x: Float32) -> Float32:
        padding = np.zeros((pass_.head_shape - len(x), x.shape[1]), np.float32)
        return self._models[pass_.store].logits(np.concatenate([x, padding]))[: len(x)]

    def kv(self, store: int, slots: NDArray[np.int64]) -> tuple[Float32, Float32]:
        """Copies of K and V at these slots, [layers, slots, kv_heads, head_dim]; for tests and debugging."""
        return self._stores[store].k[:, slots], self._stores[store].v[:, slots]

    def fingerprint(self, store: int = TARGET_STORE) -> dict[str, str]:
        """Device, libraries, arithmetic, dtypes, kernels and model shapes."""
        return fingerprint([self._models[store].architecture], self._options)

    def device(self) -> dict[str, str]:
        """Nothing: the fingerprint has it all."""
        return {}

    def wrong_answers(self) -> None:
        """None: numpy's bits are the machine's, so that its purity has to be measured."""

    def probes(self) -> list[KernelProbe]:
        """Every row kernel of the target's model, attention and sampling included."""
        model = self._models[TARGET_STORE]
        probes, arch = model.probes(), model.architecture
        vocab_size = arch.vocab_size
        probes += [
            KernelProbe("attention", arch.num_heads * arch.head_dim, self._probe_attention),
            KernelProbe("logprob", vocab_size, lambda x: np.stack(totals(np, x), axis=-1)),
            KernelProbe("draw", vocab_size, _probe_draw),
        ]
        return [_as_in_a_pass(probe) for probe in probes]

    def _probe_attention(self, x: Float32) -> Float32:
        """Attention of every kind of layer at several lengths over scratch K/V; the outputs of all are joined."""
        arch = self._models[0].architecture
        num_slots = min(self.limits.num_slots, self.limits.context_len, max(_PROBED_LENGTHS))
        lengths = [min(length, num_slots) for length in _PROBED_LENGTHS]
        rng = np.random.default_rng(1)
        store = rng.standard_normal((2, num_slots + NUM_RESERVED, arch.num_kv_heads, arch.head_dim)).astype(np.float32)
        store[:, :NUM_RESERVED] = 0
        table = rng.integers(NUM_RESERVED, num_slots + NUM_RESERVED, (3, num_slots)).astype(np.int32)
        q = x.reshape(len(x), arch.num_heads, arch.head_dim)
        outputs = []
        for spec in (arch.layers[i] for i in arch.distinct_layers()):
            for turn in range(len(lengths)):
                rows = probe_rows(x, table, lengths, turn=turn)
                outputs.append(attend(spec, q, store[0], store[1], contexts(rows, table), rows.positions))
        return np.concatenate(outputs, axis=1)

    def close(self) -> None:
        """Drop weights and stores."""
        self._models, self._stores = [], []


class _KVStore:
    """K and V of one model, [layers, slots, kv_heads, head_dim]. The zero slot stays zero: nothing writes it."""

    def __init__(self, arch: Architecture, num_slots: int) -> None:
        shape = (arch.num_layers, num_slots + NUM_RESERVED, arch.num_kv_heads, arch.head_dim)
        self.k = np.zeros(shape, np.float32)
        self.v = np.zeros(shape, np.float32)

    def write(self, layer: int, slots: NDArray[np.int32], k: Float32, v: Float32) -> None:
        """Store the rows' K and V.

        A row may share its tile with positions it must not see, whose weight is 0; but 0 * NaN is NaN. So V that is not
        finite is stored as 0 with K as NaN: whoever really attends to it still gets NaN, and nobody else does.
        """
        broken = ~np.isfinite(v).all(axis=(1, 2))
        if broken.any():
            k, v = k.copy(), v.copy()
            k[broken], v[broken] = np.nan, 0
        self.k[layer, slots] = k
        self.v[layer, slots] = v


def fingerprint(architectures: Sequence[Architecture], options: BackendOptions) -> dict[str, str]:
    """The fingerprint of a backend with these models, which need not be loaded for it."""
    shapes = "\n".join(map(str, architectures))
    return {
        "arithmetic": options.arithmetic,
        "numpy": np.__version__,
        "machine": platform.machine(),
        "cpu": cpu_name(),
        "blas": blas_name(),
        "elementary": _elementary(),
        "sampling": SAMPLING,
        "shapes": hashlib.sha256(shapes.encode()).hexdigest()[:16],
    }


def _elementary() -> str:
    """A hash of what exp, log, sums, sines and quotients give here: they differ by libm, compiler and vector unit."""
    x = np.linspace(-30, 30, 4099, dtype=np.float32)
    angles = np.linspace(0, 9000, 4099)
    results = [
        np.exp(x),
        np.log(np.abs(x) + 1),
        np.sum(x * x),
        np.sqrt(x * x),
        1 / (x + 31),
        np.sin(angles),
        np.cos(angles),
    ]
    return hashlib.sha256(b"".join(np.asarray(r).tobytes() for r in results)).hexdigest()[:16]


def _as_in_a_pass(probe: KernelProbe) -> KernelProbe:
    """The probe under the conditions of `submit`."""

    def run(x: Float32) -> NDArray[np.generic]:
        with single_threaded_blas():
            return probe.run(x)

    return KernelProbe(probe.name, probe.width, run)


def _probe_draw(logits: Float32) -> NDArray[np.generic]:
    params = SamplingParams(temperature=0.8, top_p=0.95, top_k=40, seed=1)
    draws = draw.draw(np, logits, plain_rows(params, SampleKey(7, 0), [5] * len(logits)))
    return np.stack([draws.token_ids.astype(np.float64), draws.logprobs.astype(np.float64)], axis=1)

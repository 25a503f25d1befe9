"""The plain backend: numpy and its BLAS, float32. Obviously right, usable, and the oracle for the others.

Canonical and fast passes run the same code; what makes a pass canonical is its shapes, which the caller chooses: that
of the layers and that of the head.
"""

import hashlib
import platform
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from verispec.backends.audit import CANDIDATE_SHAPES, KernelProbe
from verispec.backends.blas import blas_name, cpu_name, single_threaded_blas
from verispec.backends.checks import check_pass
from verispec.backends.numpy_attention import attend, contexts
from verispec.backends.numpy_model import NumpyModel
from verispec.backends.options import BackendOptions, LoadedModel, NumpyOptions
from verispec.backends.outputs import HostLogits, collect
from verispec.backends.probes import attention_probe, draw_probe
from verispec.backends.protocol import Float32, Int32, Pass, PassResult, ReadyTicket, Rows, SubLayer
from verispec.backends.resident import Resident
from verispec.backends.rounds import run_rounds
from verispec.kv import NUM_RESERVED, TARGET_STORE
from verispec.model.architecture import Architecture
from verispec.sampling import draw
from verispec.sampling.weights import SAMPLING, totals

_PROBED_LENGTHS = (1, 127, 129, 300, 520)  # context lengths at which the audit measures attention


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
        self.bind, self.set_masks = self.resident.bind, self.resident.set_masks

    def submit(self, pass_: Pass) -> ReadyTicket:
        check_pass(pass_, self.limits)
        with single_threaded_blas, np.errstate(all="ignore"):  # NaN is a value: the engine ends its request
            return ReadyTicket(run_rounds(self.resident, pass_, self.run))

    def run(self, pass_: Pass) -> PassResult:
        """One round of a pass that was checked."""
        streams = self._forward(pass_)
        head_rows, hidden = pass_.wanted.head_rows(), pass_.wanted.hidden
        logits = HostLogits(self._logits(pass_, streams[-1][head_rows]))
        result = collect(pass_, self.resident, head_rows, logits)
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
        model, vocab_size = self._models[TARGET_STORE], self.limits.vocab_size
        arch = model.architecture

        def attention(layer: int, q: Float32, k: Float32, v: Float32, rows: Rows, table: Int32) -> Float32:
            heads = q.reshape(len(q), arch.num_heads, arch.head_dim)
            return attend(arch.layers[layer], heads, k, v, contexts(rows, table), rows.positions)

        probes = [
            *model.probes(),
            attention_probe(arch, self.limits, _PROBED_LENGTHS, attention, num_turns=len(_PROBED_LENGTHS)),
            KernelProbe("logprob", vocab_size, lambda x: np.stack(totals(np, x), axis=-1)),
            draw_probe(vocab_size, partial(draw.draw, np)),
        ]
        return [replace(probe, run=single_threaded_blas(probe.run)) for probe in probes]  # as in a pass

    def close(self) -> None:
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
    results = [np.exp(x), np.log(np.abs(x) + 1), np.sum(x * x), np.sqrt(x * x), 1 / (x + 31)]
    results += [np.sin(angles), np.cos(angles)]
    return hashlib.sha256(b"".join(np.asarray(r).tobytes() for r in results)).hexdigest()[:16]

"""One model's weights as the native kernels read them, straight from the file, and the structures that point to them.

Sixteen output columns are interleaved, block by block. Quantised tensors keep their own integers and scales: Q4_0,
Q4_1, Q4_K as 4-bit, Q8_0 as 8-bit; the 5- and 6-bit types as 8-bit integers with the scales they have, which changes no
value. Nothing is requantised, except on request. The layouts are described in native/api.h, the work is done in
native/pack.cpp. The arrays live here; the structures hold their addresses, so neither may outlive this object.
"""

import ctypes
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from verispec.backends import native_library as native
from verispec.backends.cuda.bits import bf16_bits
from verispec.backends.cuda.shapes import Shapes
from verispec.backends.options import HOPPER, QUANTISED, LoadedModel, NativeOptions
from verispec.errors import InputError, UnsupportedModelError
from verispec.model.architecture import Rope, inverse_frequencies
from verispec.model.blocks import FORMATS, StoredTensor
from verispec.model.elementary import sin_cos

LANES = 16
BLOCK = 32
F32, F16, BF16, Q4, Q4_AFFINE, Q4_AFFINE_WIDE, Q8, Q8_WIDE, Q8_AFFINE_WIDE, Q8_HALVES = range(10)
FLOAT_TYPES = ("F32", "F16", "BF16")
_ALIGNMENT = 64
_MAX_HEAD_DIM = 512  # the kernels' buffer for one head
_ROPE_PIECE = 256  # positions whose sines are made at once: what they need stays in the cache
MATRICES = ("q", "k", "v", "o", "gate", "up", "down")

Float32 = NDArray[np.float32]


class Layout(NamedTuple):
    """How a stored type is packed: the kernels' format, and what so many values of sixteen rows take."""

    format: int
    num_values: int
    nbytes: int


LAYOUTS = {
    "F32": Layout(F32, 1, 64),
    "F16": Layout(F16, 1, 32),
    "BF16": Layout(BF16, 1, 32),
    "Q4_0": Layout(Q4, BLOCK, 256 + 32),
    "Q4_1": Layout(Q4_AFFINE, BLOCK, 256 + 64),
    "Q4_K": Layout(Q4_AFFINE_WIDE, BLOCK, 256 + 128),
    "Q5_0": Layout(Q8, BLOCK, 512 + 32),
    "Q8_0": Layout(Q8, BLOCK, 512 + 32),
    "Q5_1": Layout(Q8_AFFINE_WIDE, BLOCK, 512 + 128),
    "Q5_K": Layout(Q8_AFFINE_WIDE, BLOCK, 512 + 128),
    "Q6_K": Layout(Q8_HALVES, BLOCK, 512 + 128),
}


class PackedMatrix(NamedTuple):
    """A matrix ready for the kernels. `data` is aligned and must outlive every use."""

    format: int
    num_out: int
    num_in: int
    data: NDArray[np.uint8]
    is_finite: bool  # all scales, or float weights, are


def pack(stored: StoredTensor, kernels: native.Kernels, *, quantises: bool = False) -> PackedMatrix:
    """The tensor in the layout of its format, or of Q8_0: the one place where verispec quantises weights, on request.

    Raises UnsupportedModelError for a type without a layout.
    """
    if stored.type_name not in LAYOUTS:
        raise UnsupportedModelError(f"the native backend has no kernel for {stored.type_name}; --backend numpy has")
    fmt = FORMATS[stored.type_name]
    rows = np.ascontiguousarray(stored.data)
    num_out, num_in = len(rows), rows.shape[1] // fmt.block_nbytes * fmt.block_len
    quantises = quantises and stored.type_name in FLOAT_TYPES and num_in % BLOCK == 0
    layout = LAYOUTS["Q8_0" if quantises else stored.type_name]
    nbytes = -(-num_out // LANES) * (num_in // layout.num_values) * layout.nbytes
    buffer = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    data = buffer[start : start + nbytes]
    matrix = native.StoredMatrix(type=fmt.type_id, num_out=num_out, num_in=num_in, quantises=quantises, rows=rows)
    return PackedMatrix(layout.format, num_out, num_in, data, bool(kernels.call("vs_pack", matrix, data)))


class NativeModel:
    """Weights, and `struct`, the kernels' view of them."""

    def __init__(
        self,
        model: LoadedModel,
        kernels: native.Kernels,
        options: NativeOptions,
        *,
        context_len: int,
        progress: Callable[[float], None],
    ) -> None:
        self.architecture = arch = model.architecture
        if arch.head_dim > _MAX_HEAD_DIM:
            raise InputError(f"the native backend takes heads of at most {_MAX_HEAD_DIM} values, not {arch.head_dim}")
        if options.arithmetic == HOPPER:
            Shapes.of(arch)  # raises for what it is not defined for
        self.type_names: set[str] = set()  # of its matrices, as they were stored
        self._source, self._kernels, self._options = model, kernels, options
        self._arrays: list[NDArray[np.generic]] = []  # what the structures point to
        head = self._matrix("embed" if arch.tied_head else "head")  # first: the longest call without Python
        ropes = {spec.rope for spec in arch.layers}
        tables = {rope: self._floats(_rope_table(rope, arch.head_dim, context_len)) for rope in ropes}
        self.layers = (native.Layer * arch.num_layers)()
        for i, spec in enumerate(arch.layers):
            progress(i / (arch.num_layers + 1))
            self.layers[i] = self._layer(i, tables[spec.rope])
        self.struct = native.Model(
            arithmetic=native.ARITHMETICS.index(options.arithmetic),
            num_layers=arch.num_layers,
            hidden=arch.hidden_size,
            num_heads=arch.num_heads,
            num_kv_heads=arch.num_kv_heads,
            head_dim=arch.head_dim,
            mlp=arch.mlp_size,
            vocab=arch.vocab_size,
            kv_is_half=options.kv_dtype == "float16",
            norm_eps=arch.norm_eps,
            embed_scale=arch.embed_scale,
            layers=ctypes.cast(self.layers, ctypes.POINTER(native.Layer)),
            final_norm=self._floats(model.read("final_norm")),
            head=head,
            embed=head if arch.tied_head else self._matrix("embed"),
        )
        self.nbytes = sum(array.nbytes for array in self._arrays)

    def _layer(self, index: int, cos_sin: int) -> native.Layer:
        spec, prefix = self.architecture.layers[index], f"layers.{index}."
        norms = ["attn_norm", "mlp_norm"] + ["q_norm", "k_norm"] * spec.qk_norm
        norms += ["attn_post_norm", "mlp_post_norm"] * spec.post_norms
        weights = {name: self._floats(self._source.read(prefix + name)) for name in norms}
        if spec.qkv_bias:
            biases = [self._source.read(f"{prefix}{name}_bias") for name in "qkv"]
            weights["qkv_bias"] = self._floats(np.concatenate(biases))
        return native.Layer(
            **{name: self._matrix(prefix + name) for name in MATRICES},
            **weights,
            cos_sin=cos_sin,
            query_scalar=spec.query_scalar,
            window=spec.window or 0,
            activation=native.ACTIVATIONS.index(spec.activation),
        )

    def _matrix(self, name: str) -> native.Matrix:
        """A matrix in the layout of the kernels; the error for one that is not finite names the value."""
        source = self._source
        if self._options.arithmetic == HOPPER:
            stored = StoredTensor("BF16", bf16_bits(source.read(name)).view(np.uint8))
        elif source.stored is None:
            stored = StoredTensor("F32", np.ascontiguousarray(source.read(name)).view(np.uint8))
        else:
            stored = source.stored(name)
        packed = pack(stored, self._kernels, quantises=self._options.weights == QUANTISED)
        if not packed.is_finite:
            source.read(name)
            raise InputError(f"tensor {name} holds values that are not finite")
        self._arrays.append(packed.data)
        self.type_names.add(stored.type_name)
        return native.Matrix(format=packed.format, num_out=packed.num_out, num_in=packed.num_in, data=packed.data)

    def _floats(self, values: Float32) -> int:
        array = np.array(values, np.float32, order="C")  # a copy: a view would keep the whole file mapped
        self._arrays.append(array)
        return native.address(array)


def _rope_table(rope: Rope, head_dim: int, context_len: int) -> Float32:
    """[context, head_dim]: cosines of each position, then sines."""
    frequencies = inverse_frequencies(rope, head_dim).astype(np.float64)
    table = np.empty((context_len, 2 * len(frequencies)), np.float32)
    for first in range(0, context_len, _ROPE_PIECE):
        piece = table[first : first + _ROPE_PIECE]
        sine, cosine = sin_cos(np.arange(first, first + len(piece), dtype=np.float64)[:, None] * frequencies)
        piece[:, : len(frequencies)], piece[:, len(frequencies) :] = cosine, sine
    return table

"""One model's weights in the native layout, and the structures that point to them.

The arrays live here; the structures hold their addresses, so neither may outlive this object.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from verispec.backends import native_library as native
from verispec.backends.cuda.bits import bf16_bits
from verispec.backends.cuda.shapes import Shapes
from verispec.backends.native_pack import PackedMatrix, pack
from verispec.backends.numpy_model import Reader
from verispec.backends.options import HOPPER, QUANTISED, NativeOptions
from verispec.errors import InputError
from verispec.model.architecture import Architecture, Rope, inverse_frequencies
from verispec.model.blocks import StoredTensor
from verispec.model.elementary import sin_cos

Float32 = NDArray[np.float32]
_MAX_HEAD_DIM = 512  # the kernels' buffer for one head
_ROPE_PIECE = 256  # positions whose sines are made at once: what they need stays in the cache
_MATRICES = ("q", "k", "v", "o", "gate", "up", "down")


@dataclass(frozen=True, slots=True)
class StoredModel:
    """What the native backend needs of a checkpoint: float32 tensors, and matrices as the files have them.

    Without `stored` the matrices are float32 too.
    """

    architecture: Architecture
    read: Reader
    stored: Callable[[str], StoredTensor] | None = None

    def matrix(self, name: str, kernels: native.Kernels, options: NativeOptions) -> PackedMatrix:
        """A matrix in the layout of the kernels; the error for one that is not finite names the value."""
        if options.arithmetic == HOPPER:
            stored = StoredTensor("BF16", bf16_bits(self.read(name)).view(np.uint8))
        else:
            stored = self._stored(name)
        packed = pack(stored, kernels, quantises=options.weights == QUANTISED)
        if not packed.is_finite:
            self.read(name)
            raise InputError(f"tensor {name} holds values that are not finite")
        return packed

    def _stored(self, name: str) -> StoredTensor:
        if self.stored is None:
            return StoredTensor("F32", np.ascontiguousarray(self.read(name)).view(np.uint8))
        return self.stored(name)


class NativeModel:
    """Weights, and `struct`, the kernels' view of them."""

    def __init__(
        self,
        model: StoredModel,
        kernels: native.Kernels,
        options: NativeOptions,
        *,
        context_len: int,
        progress: Callable[[float], None],
    ) -> None:
        arch = model.architecture
        if arch.head_dim > _MAX_HEAD_DIM:
            raise InputError(f"the native backend takes heads of at most {_MAX_HEAD_DIM} values, not {arch.head_dim}")
        if options.arithmetic == HOPPER:
            Shapes.of(arch)  # raises for what it is not defined for
        self.architecture = arch
        self._kernels, self._options = kernels, options
        self._arrays: list[NDArray[np.generic]] = []  # what the structures point to
        self.type_names: set[str] = set()  # of its matrices, as they were stored
        self._layers = (native.Layer * arch.num_layers)()
        head = self._matrix(model, "embed" if arch.tied_head else "head")  # first: the longest call without Python
        ropes = {spec.rope for spec in arch.layers}
        tables = {rope: self._floats(_rope_table(rope, arch.head_dim, context_len)) for rope in ropes}
        for i, spec in enumerate(arch.layers):
            progress(i / (arch.num_layers + 1))
            self._fill_layer(self._layers[i], model, i)
            self._layers[i].cos_sin = tables[spec.rope]
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
            layers=ctypes.cast(self._layers, ctypes.POINTER(native.Layer)),
            final_norm=self._floats(model.read("final_norm")),
            head=head,
            embed=head if arch.tied_head else self._matrix(model, "embed"),
        )
        self.nbytes = sum(array.nbytes for array in self._arrays)

    def layer(self, index: int) -> native.Layer:
        """One layer's weights."""
        return self._layers[index]

    def _fill_layer(self, layer: native.Layer, model: StoredModel, index: int) -> None:
        spec = model.architecture.layers[index]

        def read(name: str) -> Float32:
            return model.read(f"layers.{index}.{name}")

        for name in _MATRICES:
            setattr(layer, name, self._matrix(model, f"layers.{index}.{name}"))
        layer.attn_norm, layer.mlp_norm = self._floats(read("attn_norm")), self._floats(read("mlp_norm"))
        if spec.qkv_bias:
            layer.qkv_bias = self._floats(np.concatenate([read(f"{n}_bias") for n in "qkv"]))
        norms = ("q_norm", "k_norm") * spec.qk_norm + ("attn_post_norm", "mlp_post_norm") * spec.post_norms
        for name in norms:
            setattr(layer, name, self._floats(read(name)))
        layer.query_scalar, layer.window = spec.query_scalar, spec.window or 0
        layer.activation = native.ACTIVATIONS.index(spec.activation)

    def _matrix(self, model: StoredModel, name: str) -> native.Matrix:
        packed = model.matrix(name, self._kernels, self._options)
        self._arrays.append(packed.data)
        self.type_names.add(packed.type_name)
        return native.Matrix(packed.format, packed.num_out, packed.num_in, native.address(packed.data))

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

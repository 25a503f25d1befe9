"""The plain torch backend: any device that torch has, with torch's own products. Slower than the others, everywhere.

It promises nothing by itself: whether the bits of a row depend on its neighbours is measured by the audit, shape by
shape, and only shapes found pure serve deterministic requests. Weights, K and V are bfloat16 or float32; the residual
stream, norms, attention and sampling are float32. Logits come to the host, where the shared code samples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from verispec.backends.audit import CANDIDATE_SHAPES, KernelProbe
from verispec.backends.checks import check_pass
from verispec.backends.gpu import Health
from verispec.backends.numpy_attention import TILE, contexts
from verispec.backends.options import LoadedModel, TorchOptions
from verispec.backends.outputs import HostLogits, collect
from verispec.backends.probes import attention_probe, draw_probe
from verispec.backends.protocol import Float32, Int32, Pass, PassResult, ReadyTicket, Rows, SubLayer
from verispec.backends.resident import Resident
from verispec.backends.rounds import run_rounds
from verispec.kv import NUM_RESERVED, TARGET_STORE
from verispec.model.architecture import Architecture, LayerSpec, inverse_frequencies
from verispec.sampling import draw
from verispec.sampling.weights import SAMPLING

_PROBED_LENGTHS = (1, 127, 129, 300, 520)  # context lengths at which the audit measures attention
_MAX_GATHERED = 1 << 24  # numbers of K gathered at a time
_NORMS = ("attn_norm", "mlp_norm", "q_norm", "k_norm", "attn_post_norm", "mlp_post_norm")


class TorchBackend:
    """One slot table, and per model the weights and a K/V store under the same slot ids."""

    shapes = CANDIDATE_SHAPES
    arithmetics = TorchOptions.SERVES["arithmetic"]
    weights_version = 0

    def __init__(self, models: Sequence[LoadedModel], options: TorchOptions) -> None:
        self._options = options
        self._device = torch.device(_device_name(options.device))
        self.limits = options.limits([m.architecture for m in models])
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        make = partial(_Model, options=options, device=self._device, context_len=self.limits.context_len)
        self._models = [make(m.architecture, m.read) for m in models]
        self.resident, self._health = Resident(self.limits), Health()
        self.bind, self.set_masks = self.resident.bind, self.resident.set_masks

    def submit(self, pass_: Pass) -> ReadyTicket:
        """Run the pass now."""
        check_pass(pass_, self.limits)
        with self._health.guarded(), torch.inference_mode(), np.errstate(all="ignore"):
            return ReadyTicket(run_rounds(self.resident, pass_, self.run))

    def run(self, pass_: Pass) -> PassResult:
        """One round of a pass that was checked."""
        model, head_rows, hidden = self._models[pass_.store], pass_.wanted.head_rows(), pass_.wanted.hidden
        streams = model.forward(pass_, self.resident.table)
        x = streams[-1][model.on_device(head_rows)]
        padding = x.new_zeros(pass_.head_shape - len(x), x.shape[1])
        logits = model.logits(torch.cat([x, padding]))[: len(x)]
        result = collect(pass_, self.resident, head_rows, HostLogits(logits.cpu().numpy()))
        if hidden is None:
            return result
        rows = model.on_device(hidden.rows)
        return replace(result, hidden=torch.stack([streams[i][rows] for i in hidden.layers], dim=1).cpu().numpy())

    def kv(self, store: int, slots: NDArray[np.int64]) -> tuple[Float32, Float32]:
        """Copies of K and V at these slots, [layers, slots, kv_heads, head_dim]; for tests and debugging."""
        model = self._models[store]
        at = model.on_device(slots)
        return model.k[:, at].float().cpu().numpy(), model.v[:, at].float().cpu().numpy()

    def fingerprint(self, store: int = TARGET_STORE) -> dict[str, str]:
        """Device, libraries, arithmetic, dtypes, kernels and model shapes."""
        return fingerprint([self._models[store].architecture], self._options)

    def device(self) -> dict[str, str]:
        """Nothing: the fingerprint has it all."""
        return {}

    def wrong_answers(self) -> None:
        """None: torch's bits are the device's, so that their purity has to be measured."""

    def probes(self) -> list[KernelProbe]:
        """Every row kernel of the target's model, attention and sampling included."""
        model, vocab_size = self._models[TARGET_STORE], self.limits.vocab_size
        arch = model.architecture

        def attention(layer: int, q: Float32, k: Float32, v: Float32, rows: Rows, table: Int32) -> Float32:
            heads = model.on_device(q).reshape(len(q), arch.num_heads, arch.head_dim)
            k_store, v_store = (model.on_device(part).to(model.dtype) for part in (k, v))
            with torch.inference_mode():
                found = attend(arch.layers[layer], heads, k_store, v_store, *model.placed(rows, table))
            return np.asarray(found.cpu().numpy())

        return self._health.guarding(
            [
                *model.probes(),
                attention_probe(arch, self.limits, _PROBED_LENGTHS, attention, num_turns=len(_PROBED_LENGTHS)),
                draw_probe(vocab_size, partial(draw.draw, np)),
            ]
        )

    def close(self) -> None:
        """Drop weights and stores."""
        self._models = []


class _Model:
    """One model's weights and K/V, and its forward."""

    def __init__(
        self, arch: Architecture, read: Callable[[str], Float32], *, options: TorchOptions, device: torch.device,
        context_len: int,
    ) -> None:  # fmt: skip
        self.architecture = arch
        self.dtype = getattr(torch, options.kv_dtype)
        self._device = device
        self._layers = [self._read_layer(spec, f"layers.{i}.", read) for i, spec in enumerate(arch.layers)]
        self._final_norm = self.on_device(read("final_norm"))
        self._embed = self.on_device(read("embed")).to(self.dtype)
        self._head = self._embed if arch.tied_head else self.on_device(read("head")).to(self.dtype)
        self._cos_sin = {}
        for rope in {spec.rope for spec in arch.layers}:
            frequencies = inverse_frequencies(rope, arch.head_dim).astype(np.float64)
            angles = np.arange(context_len, dtype=np.float64)[:, None] * frequencies
            self._cos_sin[rope] = [self.on_device(f(angles).astype(np.float32)) for f in (np.cos, np.sin)]
        shape = (arch.num_layers, options.num_slots + NUM_RESERVED, arch.num_kv_heads, arch.head_dim)
        self.k, self.v = (torch.zeros(shape, dtype=self.dtype, device=device) for _ in range(2))

    def on_device(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)

    def _read_layer(self, spec: LayerSpec, prefix: str, read: Callable[[str], Float32]) -> dict[str, Tensor]:
        """Products that share their input are one matrix; norms and biases stay float32."""

        def joined(*names: str) -> Tensor:
            return torch.cat([self.on_device(read(prefix + name)) for name in names])

        absent = {"q_norm", "k_norm"} if not spec.qk_norm else set()
        absent |= {"attn_post_norm", "mlp_post_norm"} if not spec.post_norms else set()
        layer = {name: joined(name) for name in _NORMS if name not in absent}
        products = {"qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}
        layer |= {name: joined(*parts).to(self.dtype) for name, parts in products.items()}
        if spec.qkv_bias:
            layer["qkv_bias"] = joined("q_bias", "k_bias", "v_bias")
        return layer

    def placed(self, rows: Rows, table: Int32) -> tuple[Tensor, Tensor]:
        """The slots of every row's context, and the rows' positions."""
        return self.on_device(contexts(rows, table)), self.on_device(rows.positions).long()

    def forward(self, pass_: Pass, table: Int32) -> list[Tensor]:
        """The residual stream before each layer, and behind the last."""
        rows, skipped = pass_.rows, pass_.view.skipped
        slots, positions = self.placed(rows, table)
        own = self.on_device(rows.slots).long()
        x = self._embed[self.on_device(rows.token_ids).long()].float() * self.architecture.embed_scale
        if pass_.start is not None:
            x[self.on_device(pass_.start.rows).long()] = self.on_device(pass_.start.states)
        streams = []
        for i, (spec, layer) in enumerate(zip(self.architecture.layers, self._layers, strict=True)):
            streams.append(x)
            if SubLayer(i, is_mlp=False) not in skipped:
                q, k, v = self._qkv(spec, layer, x, positions)
                self._write(i, own, k, v)
                attended = attend(spec, q, self.k[i], self.v[i], slots, positions)
                x = x + self._normed(self._product(layer["o"], attended), layer.get("attn_post_norm"))
            if SubLayer(i, is_mlp=True) not in skipped:
                hidden = activate(self._product(layer["gate_up"], self._normed(x, layer["mlp_norm"])), spec.activation)
                x = x + self._normed(self._product(layer["down"], hidden), layer.get("mlp_post_norm"))
        return [*streams, x]

    def _product(self, weight: Tensor, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x.to(self.dtype), weight).float()

    def _normed(self, x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None:
            return x
        return x * torch.rsqrt((x * x).mean(dim=-1, keepdim=True) + self.architecture.norm_eps) * weight

    def _qkv(self, spec: LayerSpec, layer: dict[str, Tensor], x: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """Norm, projections, q/k norm and RoPE: q [M, H, d], k and v [M, KV, d]."""
        arch = self.architecture
        fused = self._product(layer["qkv"], self._normed(x, layer["attn_norm"]))
        if "qkv_bias" in layer:
            fused = fused + layer["qkv_bias"]
        heads = fused.reshape(len(x), -1, arch.head_dim)
        q, k, v = heads.split((arch.num_heads, arch.num_kv_heads, arch.num_kv_heads), dim=1)
        q, k = self._normed(q, layer.get("q_norm")), self._normed(k, layer.get("k_norm"))
        cos, sin = (table[positions][:, None] for table in self._cos_sin[spec.rope])
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def _write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """V that is not finite is stored as 0 with K as NaN: whoever attends to it gets NaN, and nobody else does."""
        broken = ~v.isfinite().all(dim=2, keepdim=True).all(dim=1, keepdim=True)
        self.k[layer, slots] = k.masked_fill(broken, torch.nan).to(self.dtype)
        self.v[layer, slots] = v.masked_fill(broken, 0).to(self.dtype)

    def logits(self, x: Tensor) -> Tensor:
        """Final norm and head: [R, V]"""
        return self._product(self._head, self._normed(x, self._final_norm))

    def probes(self) -> list[KernelProbe]:
        """The products and norms of the first layer: all layers have its shapes."""
        arch, spec, layer = self.architecture, self.architecture.layers[0], self._layers[0]

        def probe(name: str, width: int, kernel: Callable[[Tensor], Tensor]) -> KernelProbe:
            def run(x: Float32) -> Float32:
                with torch.inference_mode():
                    return np.asarray(kernel(self.on_device(x)).cpu().numpy())

            return KernelProbe(name, width, run)

        def turned(x: Tensor) -> Tensor:
            positions = torch.full((len(x),), min(77, len(self._cos_sin[spec.rope][0]) - 1), device=x.device)
            return torch.cat([part.flatten(1) for part in self._qkv(spec, layer, x, positions)], dim=1)

        widths = {"qkv": arch.hidden_size, "o": arch.num_heads * arch.head_dim, "gate_up": arch.hidden_size}
        widths["down"] = arch.mlp_size
        return [
            probe("norm", arch.hidden_size, lambda x: self._normed(x, layer["attn_norm"])),
            probe("rope", arch.hidden_size, turned),
            probe("activation", 2 * arch.mlp_size, lambda x: activate(x, spec.activation)),
            *(probe(name, width, partial(self._product, layer[name])) for name, width in widths.items()),
            probe("head", arch.hidden_size, self.logits),
        ]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on [M, heads, d] in the half-split convention; cos and sin are [M, 1, d / 2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def activate(gate_up: Tensor, activation: str) -> Tensor:
    """The activated gate times up, of a fused [M, 2F]."""
    gate, up = gate_up.chunk(2, dim=-1)
    functional = torch.nn.functional
    return (functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")) * up


def attend(spec: LayerSpec, q: Tensor, k_store: Tensor, v_store: Tensor, slots: Tensor, own: Tensor) -> Tensor:
    """Attention of q [M, heads, d] over one layer's stores [slots, kv_heads, d]; returns [M, heads * d].

    As in the numpy backend: tiles of absolute positions, each a product of fixed shape, summed in order.
    """
    num_rows, num_heads, head_dim = q.shape
    kv_heads, num_tiles = k_store.shape[1], slots.shape[1] // TILE
    q = (q * spec.query_scalar**-0.5).reshape(num_rows, kv_heads, num_heads // kv_heads, head_dim)
    positions, last = torch.arange(slots.shape[1], device=q.device), own[:, None]
    hidden = positions > last
    if spec.window is not None:
        hidden = hidden | (positions <= last - spec.window)
    step = max(1, _MAX_GATHERED // (slots.shape[1] * kv_heads * head_dim))
    found = []
    for first in range(0, num_rows, step):
        part = slice(first, first + step)
        tiles = [s[slots[part]].float().unflatten(1, (num_tiles, TILE)) for s in (k_store, v_store)]
        k, v = tiles  # [R, T, TILE, kv_heads, d]
        scores = q[part][:, None] @ k.permute(0, 1, 3, 4, 2)  # [R, T, kv_heads, group, TILE]
        scores = scores.masked_fill(hidden[part].reshape(-1, num_tiles, 1, 1, TILE), -torch.inf)
        weights = torch.exp(scores - scores.amax(dim=(1, 4), keepdim=True))
        sums, values = weights.sum(dim=-1, keepdim=True), weights @ v.permute(0, 1, 3, 2, 4)
        total, value = sums[:, 0], values[:, 0]
        for tile in range(1, num_tiles):
            total, value = total + sums[:, tile], value + values[:, tile]
        found.append(value / total)
    return torch.cat(found).reshape(num_rows, -1)


def _device_name(index: int) -> str:
    return f"cuda:{index}" if torch.cuda.is_available() else "cpu"


def fingerprint(architectures: Sequence[Architecture], options: TorchOptions) -> dict[str, str]:
    """The fingerprint of a backend with these models, which need not be loaded for it."""
    name = _device_name(options.device)
    has_gpu = name != "cpu"
    shapes = "\n".join(map(str, architectures))
    return {
        "arithmetic": options.arithmetic,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(name) if has_gpu else f"cpu, {torch.get_num_threads()} threads",
        "kernels": str(torch.version.cuda) if has_gpu else torch.backends.cpu.get_cpu_capability(),
        "dtype": options.kv_dtype,
        "sampling": SAMPLING,
        "shapes": hashlib.sha256(shapes.encode()).hexdigest()[:16],
    }

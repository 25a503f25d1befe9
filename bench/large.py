"""Products of many rows by large.cu and by the library, us: python -m bench.large FOLDER [8b | 1.5b | 135m ...]

Random weights, several layers in turns so that no matrix is found in the cache, everything behind the product included.
Every result is compared with the library's, bit for bit.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from bench.gpu import microseconds
from verispec.backends.cuda.device import Gpu
from verispec.backends.cuda.kernels import Buffers, Kernels, Layer, RowInputs
from verispec.backends.cuda.product_forms import is_large
from verispec.backends.cuda.shapes import Shapes
from verispec.model.hub import cache_dir

SHAPES = {
    "8b": Shapes(width=4096, heads=32, kv_heads=8, head_dim=128, mlp=14336, vocab=128256, eps=1e-5),
    "1.5b": Shapes(width=1536, heads=12, kv_heads=2, head_dim=128, mlp=8960, vocab=151936, eps=1e-6),
    "135m": Shapes(width=576, heads=9, kv_heads=3, head_dim=64, mlp=1536, vocab=49152, eps=1e-5),
}
NUM_LAYERS = 4
ROWS = (512, 1024, 2048, 4096)


def layers(s: Shapes) -> list[Layer]:
    generator = torch.Generator(device="cuda").manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        scale = size[-1] ** -0.5 if len(size) > 1 else 1.0
        dtype = torch.bfloat16 if len(size) > 1 else torch.float32
        return (torch.randn(size, generator=generator, device="cuda") * scale).to(dtype)

    return [
        Layer(
            attn_gain=random(s.width), qkv=random(s.qkv, s.width), qkv_bias=None, q_gain=None, k_gain=None,
            cos=random(1024, s.head_dim // 2).float(),
            sin=random(1024, s.head_dim // 2).float(), window=1 << 30, o=random(s.width, s.attention),
            attn_post_gain=None, mlp_gain=random(s.width), gate_up=random(2 * s.mlp, s.width),
            down=random(s.width, s.mlp), mlp_post_gain=None,
        )
        for _ in range(NUM_LAYERS)
    ]  # fmt: skip


class Products:
    """The four products of a layer, and what they leave."""

    def __init__(self, kernels: Kernels) -> None:
        shapes, most = kernels.shapes, max(ROWS)
        self.kernels, self.layers = kernels, layers(shapes)
        self.b = Buffers.of(shapes, most, most, "cuda")
        self.k = torch.zeros(most + 2, shapes.kv_heads, shapes.head_dim, device="cuda", dtype=torch.bfloat16)
        self.v = torch.zeros_like(self.k)
        self.refill()
        at = torch.arange(most, device="cuda", dtype=torch.int32)
        self.inputs = RowInputs(at, at % 1000, at + 2, at, at, at, at[:, None], at[None])

    def refill(self) -> None:
        """Everything that products read, as at the beginning."""
        generator, b = torch.Generator(device="cuda").manual_seed(1), self.b
        for values in (b.scaled, b.attention, b.h, b.x, b.q):
            values.normal_(generator=generator)
        b.nodes.uniform_(generator=generator)
        for values in (self.k, self.v, b.not_finite):
            values.zero_()

    def work(self, name: str, rows: int) -> Callable[[Layer], None]:
        k, b = self.kernels, self.b
        return {
            "q/k/v": lambda layer: k.qkv(layer, self.k, self.v, self.inputs, b, rows, many=True),
            "output": lambda layer: k.residual(b.attention, layer.o, layer.mlp_gain, b, rows, many=True),
            "gate-up": lambda layer: k.gate_up(layer, b, rows, many=True),
            "down": lambda layer: k.residual(b.h, layer.down, layer.mlp_gain, b, rows, many=True),
        }[name]

    def left(self, name: str, rows: int) -> list[torch.Tensor]:
        """What one product leaves behind, from the same start."""
        b = self.b
        self.refill()
        self.work(name, rows)(self.layers[0])
        found = {"q/k/v": (b.q, self.k, self.v, b.not_finite), "gate-up": (b.h,)}.get(name, (b.x, b.scaled, b.nodes))
        return [part.clone().view(torch.int16 if part.element_size() == 2 else torch.int32) for part in found]


def timed(products: Products, name: str, rows: int, device: Gpu) -> float:
    products.refill()
    work = products.work(name, rows)
    graph = device.capture(lambda: [work(layer) for layer in products.layers] and None)
    return microseconds(graph, replays=3, rounds=7) / NUM_LAYERS


def compared(products: Products, name: str, rows: int, device: Gpu) -> tuple[float, float]:
    """Microseconds by the library and by large.cu, medians of three each, in turns. Ends the run if a bit differs."""
    left: list[list[torch.Tensor]] = []
    times: tuple[list[float], list[float]] = [], []
    for turn in range(6):
        products.kernels.own_large = bool(turn % 2)
        if turn < 2:
            left.append(products.left(name, rows))
        times[turn % 2].append(timed(products, name, rows, device))
    differ = sum(int((a != b).sum()) for a, b in zip(*left, strict=True))
    if differ:
        raise SystemExit(f"{name}, {rows} rows: {differ} values differ")
    return statistics.median(times[0]), statistics.median(times[1])


def main() -> None:
    device, results = Gpu(0, cache_dir() / "cuda"), []
    with device.exact_products():
        for shape in sys.argv[2:] or SHAPES:
            products = Products(device.kernels(SHAPES[shape]))
            layer = products.layers[0]
            matrices = {"q/k/v": layer.qkv, "output": layer.o, "gate-up": layer.gate_up, "down": layer.down}
            for name, w in matrices.items():
                for rows in ROWS:
                    if not is_large(w, rows, products.kernels.num_sms):
                        continue
                    library, large = compared(products, name, rows, device)
                    rates = [2 * rows * w.numel() / took / 1e6 for took in (library, large)]
                    results.append({"shape": shape, "product": name, "rows": rows, "library": library, "large": large})
                    print(
                        f"{shape} {name}, {rows} rows: library {library:.1f} us ({rates[0]:.0f} TFLOP/s), large.cu "
                        f"{large:.1f} ({rates[1]:.0f}), 0 values differ", flush=True,
                    )  # fmt: skip
    Path(sys.argv[1], "large.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Products of many rows by large.cu and by the library, microseconds: python -m bench.large FOLDER [rows ...]

The shapes of Llama 8B, random weights, several matrices in turns so that none is found in the cache, everything behind
the product included. Every result is compared with the library's, bit for bit. With `forms`, all tiles are tried.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch

from bench.gpu import microseconds
from verispec.backends.cuda import kernels as kernels_module
from verispec.backends.cuda.device import Gpu
from verispec.backends.cuda.kernels import Buffers, Kernels, Layer, RowInputs
from verispec.backends.cuda.product_forms import LargeForm, large_form
from verispec.backends.cuda.shapes import Shapes, num_parts
from verispec.model.hub import cache_dir

SHAPES = Shapes(width=4096, heads=32, kv_heads=8, head_dim=128, mlp=14336, vocab=128256, eps=1e-5)
NUM_LAYERS = 3
MOST_ROWS = 4096


def layers() -> list[Layer]:
    generator = torch.Generator(device="cuda").manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        scale = size[-1] ** -0.5 if len(size) > 1 else 1.0
        dtype = torch.bfloat16 if len(size) > 1 else torch.float32
        return (torch.randn(size, generator=generator, device="cuda") * scale).to(dtype)

    s = SHAPES
    return [
        Layer(
            attn_gain=random(s.width), qkv=random(s.qkv, s.width), qkv_bias=None, q_gain=None, k_gain=None,
            cos=random(1024, 64), sin=random(1024, 64), window=1 << 30, o=random(s.width, s.attention),
            attn_post_gain=None, mlp_gain=random(s.width), gate_up=random(2 * s.mlp, s.width),
            down=random(s.width, s.mlp), mlp_post_gain=None,
        )
        for _ in range(NUM_LAYERS)
    ]  # fmt: skip


class Products:
    """The four products of a layer, and what they leave."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels, self.layers = kernels, layers()
        self.b = Buffers.of(SHAPES, MOST_ROWS, MOST_ROWS, "cuda")
        generator = torch.Generator(device="cuda").manual_seed(1)
        for t in (self.b.scaled, self.b.attention, self.b.h):
            t.normal_(generator=generator)
        self.b.nodes.uniform_(generator=generator)
        self.k = torch.zeros(MOST_ROWS + 2, 8, 128, device="cuda", dtype=torch.bfloat16)
        self.v = torch.zeros_like(self.k)
        at = torch.arange(MOST_ROWS, device="cuda", dtype=torch.int32)
        self.inputs = RowInputs(at, at % 1000, at + 2, at, at, at, at[:, None], at[None])

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
        kept = {field: getattr(b, field).clone() for field in ("x", "scaled", "nodes", "h", "attention", "q")}
        b.x.normal_(generator=torch.Generator(device="cuda").manual_seed(2))
        self.k.zero_(), self.v.zero_(), b.not_finite.zero_()
        self.work(name, rows)(self.layers[0])
        found = {"q/k/v": (b.q, self.k, self.v, b.not_finite), "gate-up": (b.h,)}.get(name, (b.x, b.scaled, b.nodes))
        left = [part.clone() for part in found]
        for field, value in kept.items():
            getattr(b, field).copy_(value)
        return left


SIZES = {"q/k/v": (6144, 4096), "output": (4096, 4096), "gate-up": (28672, 4096), "down": (4096, 14336)}


def timed(products: Products, name: str, rows: int, device: Gpu) -> float:
    work = products.work(name, rows)
    graph = device.capture(lambda: [work(layer) for layer in products.layers] and None)
    return microseconds(graph, replays=5, rounds=5) / NUM_LAYERS


def uniform(size: tuple[int, int], rows: int, blocks: int, stages: int = 0) -> LargeForm:
    tiles, stage = -(-size[0] // 64 // blocks), (128 + 64 * blocks) * 128
    stages = stages or min(6, 208 * 1024 // stage)
    return LargeForm(blocks, tiles, 1, 0, stages, stages * stage, min(66, tiles * -(-rows // 256)))


def main() -> None:
    device = Gpu(0, cache_dir() / "cuda")
    products = Products(device.kernels(SHAPES))
    results = []
    with device.exact_products():
        for rows in [int(arg) for arg in sys.argv[2:] if arg.isdigit()] or [512, 1024, 2048, 4096]:
            for name, size in SIZES.items():
                parts = num_parts(*size)
                products.kernels.own_large = False
                wanted, library = products.left(name, rows), timed(products, name, rows, device)
                products.kernels.own_large = True
                forms = {"chosen": large_form(size, parts, rows, 132)}
                if "forms" in sys.argv:
                    forms |= {f"{64 * n}": uniform(size, rows, n) for n in (2, 3, *([4] if parts == 1 else []))}
                entry = {"product": name, "rows": rows, "library": library}
                for label, form in forms.items():
                    for group in (4, 8, 16) if "forms" in sys.argv and label == "chosen" else (8,):
                        with (
                            patch.object(kernels_module, "large_form", lambda *_, form=form: form),
                            patch.object(kernels_module, "LARGE_GROUP", group),
                        ):
                            found = products.left(name, rows)
                            differ = sum(int((a != b).sum()) for a, b in zip(found, wanted, strict=True))
                            if differ:
                                raise SystemExit(f"{name}, {rows} rows, {form}: {differ} values differ")
                            entry[f"{label}, group {group}"] = timed(products, name, rows, device)
                results.append(entry)
                flops = 2 * rows * size[0] * size[1]
                print(
                    f"{name}, {rows} rows, us (TFLOP/s):",
                    ", ".join(f"{k} {v:.1f} ({flops / v / 1e6:.0f})" for k, v in entry.items() if isinstance(v, float)),
                    forms["chosen"], flush=True,
                )  # fmt: skip
    Path(sys.argv[1], "large.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

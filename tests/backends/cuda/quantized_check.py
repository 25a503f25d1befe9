"""Products of draft weights on a GPU: against the rounded numbers in float64, whole passes, and what each takes.

python -m tests.backends.cuda.quantized_check [FOLDER] prints one line per check. Their bits are nobody's promise, so
what counts is how near they come. Times are taken for FOLDER/quantized.json. Needs torch, numpy and the package.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from tests.backends.cuda.backend_check import FAILED, report
from tests.backends.cuda.device_check import SHAPES, decode_rows, device_inputs, random_model
from verispec.backends.cuda.arguments import filled
from verispec.backends.cuda.compiler import Cubins
from verispec.backends.cuda.device import Gpu
from verispec.backends.cuda.forward import DeviceModel, Plan
from verispec.backends.cuda.kernels import ALL_FEW, Kernels, Layer, LinearArgs
from verispec.backends.cuda.product_forms import Kind
from verispec.backends.cuda.quantize import Quantized, eight_bits, quantized
from verispec.backends.cuda.shapes import Shapes
from verispec.model.hub import cache_dir

FAR = {"int4": 0.06, "int8": 0.06, "fp8": 0.12}  # of logits of three layers, by rows that were rounded to 8 bits
DRAFTS = {"qwen0.5b": (Shapes(896, 14, 2, 64, 4864, 151936, 1e-6), 24), **SHAPES}
LLAMAS = {
    "llama1b": (Shapes(2048, 32, 8, 64, 8192, 128256, 1e-5), 16),
    "llama3b": (Shapes(3072, 24, 8, 128, 8192, 128256, 1e-5), 28),
}
TIMED = (
    ("qwen0.5b", "int8"), ("llama1b", "int4"), ("qwen1.5b", "int4"), ("llama3b", "int4"), ("8b", "int4"),
    ("8b", "int8"), ("8b", "fp8"),
)  # fmt: skip


def plain(kernels: Kernels, x: torch.Tensor, w: Quantized) -> torch.Tensor:
    out = torch.full((len(x), w.shape[0]), float("nan"), dtype=torch.bfloat16, device="cuda")
    kernels._linear(Kind.PLAIN, w, len(x), filled(LinearArgs(), x=x, w=w, out=out, rows=len(x)))
    return out


def far(got: torch.Tensor, wanted: torch.Tensor, most: float) -> int:
    """How many rows are further off than they may."""
    error = (got.double() - wanted.double()).norm(dim=1) / wanted.double().norm(dim=1)
    return int((~(error < most)).sum())


def check_products(name: str) -> None:
    shapes, _ = DRAFTS[name]
    kernels = Kernels(shapes, Cubins(cache_dir() / "cuda"))
    sizes = ((shapes.qkv, shapes.width), (shapes.width, shapes.attention), (2 * shapes.mlp, shapes.width))
    generator = torch.Generator(device="cuda").manual_seed(1)
    compared = wrong = unlike = 0
    for outputs, columns in {*sizes, (shapes.width, shapes.mlp)}:
        w = torch.randn(outputs, columns, generator=generator, device="cuda", dtype=torch.bfloat16)
        for kind in FAR:
            matrix = quantized(w, kind)
            dense = matrix.dense().double()
            for rows in (1, 2, 3, 8, 11):
                x = torch.randn(rows, columns, generator=generator, device="cuda", dtype=torch.bfloat16)
                x[:, 70] *= 20
                got = plain(kernels, x, matrix)
                compared += rows
                wrong += far(got, eight_bits(x, kind).double() @ dense.T, 3e-3)
                unlike += far(got, x.double() @ dense.T, 3e-3)
    report(f"{name}: products of rounded rows and weights", compared, wrong)
    report(f"{name}: control: of rows that were not rounded", compared, unlike, control=True)


def check_pass(name: str) -> None:
    """Logits of passes on draft weights, and on the same weights in bf16."""
    table = np.random.default_rng(0).permutation(8 * 2048).reshape(8, 2048) + 2
    device_table = torch.tensor(table, dtype=torch.int32, device="cuda")
    for kind in FAR:
        model = random_model(name, layers=3, max_rows=8, sequences=8)
        use_draft_weights(model, kind)
        dense = {i: in_bf16(layer) for i, layer in enumerate(model.draft_layers)}
        assert isinstance(model.draft_head, Quantized)
        head = model.draft_head.dense().bfloat16()
        for rows in (1, 2, 8):
            lens = np.random.default_rng(rows).integers(3, 500, rows)
            inputs = device_inputs(decode_rows(lens, np.arange(rows) + 100, np.arange(rows), table), device_table)
            plan = Plan(rows=rows, forms=ALL_FEW, single_rows=rows, spans=2)
            found = model.forward(inputs, plan._replace(drafts=True)).clone()
            own = model.layers[:], model.head
            model.layers[:], model.head = [dense[i] for i in range(len(own[0]))], head
            expected = model.forward(inputs, plan).clone()
            model.layers[:], model.head = own
            report(f"{name}, {kind}: passes of {rows} rows", rows, far(found, expected, FAR[kind]))
            report(f"{name}: control: other rows", rows, far(found, expected.roll(7, 1), FAR[kind]), control=True)
        torch.cuda.empty_cache()


def use_draft_weights(model: DeviceModel, kind: str) -> None:
    """As the model has them where it was loaded with such ones."""
    model.draft_layers = [
        replace(layer, **{name: quantized(getattr(layer, name), kind) for name in ("qkv", "o", "gate_up", "down")})
        for layer in model.layers
    ]
    model.draft_head = quantized(model.head, kind)


def in_bf16(layer: Layer) -> Layer:
    names = ("qkv", "o", "gate_up", "down")
    return replace(layer, **{name: getattr(layer, name).dense().bfloat16() for name in names})


def time_passes(name: str, kind: str, row_counts: tuple[int, ...], results: list[dict[str, object]]) -> None:
    """Microseconds of each kernel and of whole passes, on draft weights and on bf16."""
    from bench.gpu import microseconds, parts

    SHAPES.setdefault(name, (DRAFTS | LLAMAS)[name])
    _, num_layers = SHAPES[name]
    model = random_model(name, layers=num_layers, max_rows=8, sequences=8)
    use_draft_weights(model, kind)
    table = np.random.default_rng(0).permutation(8 * 2048).reshape(8, 2048) + 2
    device_table = torch.tensor(table, dtype=torch.int32, device="cuda")
    for rows in row_counts:
        every = np.arange(rows)
        inputs = device_inputs(decode_rows(np.full(rows, 256), every + 100, every, table), device_table)
        plan = Plan(rows=rows, forms=ALL_FEW, single_rows=rows, spans=1, drafts=True)
        entry: dict[str, object] = {"shape": name, "weights": kind, "rows": rows}
        for part, work in parts(model, inputs, plan).items():
            entry[part] = round(microseconds(model.capture(work)) / num_layers, 2)
        for what, drafts in (("draft pass", True), ("bf16 pass", False)):
            work = partial(model.forward, inputs, plan._replace(drafts=drafts))
            entry[what] = round(microseconds(model.capture(work)), 1)
        results.append(entry)
        print(" ".join(f"{k} {v}" for k, v in entry.items()), flush=True)


def main() -> None:
    begin, results = time.perf_counter(), list[dict[str, object]]()
    with Gpu(0, cache_dir() / "cuda").current():
        for name in DRAFTS:
            check_products(name)
        for name in ("smol", "qwen1.5b"):
            check_pass(name)
        print(f"checks: {time.perf_counter() - begin:.0f} s", flush=True)
        for name, kind in TIMED if len(sys.argv) > 1 else ():
            time_passes(name, kind, (1, 2, 4, 8), results)
            torch.cuda.empty_cache()
    if len(sys.argv) > 1:
        Path(sys.argv[1], "quantized.json").write_text(json.dumps(results, indent=1) + "\n")
    print(f"{time.perf_counter() - begin:.0f} s;", "FAILED: " + "; ".join(FAILED) if FAILED else "all near")
    sys.exit(bool(FAILED))


if __name__ == "__main__":
    main()

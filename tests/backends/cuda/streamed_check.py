"""All layers of a pass of drafts as one kernel on a GPU: against a kernel for each step, and against itself.

python -m tests.backends.cuda.streamed_check [FOLDER [SHAPE:KIND ...]] prints one line per check. Their bits are
nobody's promise, but the same pass gives the same bits again, or blocks do not wait for each other as they must; also
inside of a conditional node. Passes are timed, by other forms of the kernel too, for FOLDER/streamed.json, which keeps
what it has of other shapes. Needs torch, numpy and the package.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from tests.backends.cuda.backend_check import FAILED, report
from tests.backends.cuda.device_check import SHAPES, decode_rows, device_inputs, random_model
from tests.backends.cuda.quantized_check import DRAFTS, LLAMAS, far
from verispec.backends.cuda.device import Gpu
from verispec.backends.cuda.forward import DeviceModel, Plan
from verispec.backends.cuda.kernels import ALL_FEW, RowInputs
from verispec.backends.cuda.shapes import SPAN
from verispec.backends.cuda.streamed import streamed_form
from verispec.model.hub import cache_dir

SEQUENCES, CONTEXT = 8, 4096
FAR = {"int4": 0.06, "int8": 0.06, "fp8": 0.12}  # of logits of few layers: rounding to 8 bits goes other ways
CHECKED = ("smol:int4", "qwen0.5b:int8", "qwen1.5b:int4", "qwen1.5b:fp8", "8b:int4")
TIMED = ("qwen0.5b:int8", "qwen0.5b:int4", "llama1b:int4", "qwen1.5b:int4", "llama3b:int4", "8b:int4")
PASSES = ((1, 256), (1, 1024), (2, 256), (4, 256), (8, 256), (8, 1024))  # rows and context
FORMS: Mapping[str, Mapping[str, int]] = {
    "14 warps, 1 ender": {"warps": 14, "enders": 1}, "12 warps": {"warps": 12}, "8 attend": {"attending": 8},
}  # fmt: skip


def of_shape(name: str, kind: str, layers: int | None = None) -> DeviceModel:
    """With kernels that stay compiled."""
    if name not in SHAPES:
        SHAPES[name] = (DRAFTS | LLAMAS)[name]
    sizes = {"layers": layers or SHAPES[name][1], "max_rows": 8, "sequences": SEQUENCES, "context_len": CONTEXT}
    model = random_model(name, **sizes, device=Gpu(0, cache_dir() / "cuda"))
    model.add_drafts(kind)
    return model


def rows_of(lens: np.ndarray) -> RowInputs:
    table = np.random.default_rng(0).permutation(SEQUENCES * CONTEXT).reshape(SEQUENCES, CONTEXT) + 2
    every = np.arange(len(lens))
    return device_inputs(
        decode_rows(lens, every + 100, every, table), torch.tensor(table, dtype=torch.int32, device="cuda")
    )


def plan_of(lens: np.ndarray) -> Plan:
    rows = len(lens)
    return Plan(rows=rows, forms=ALL_FEW, single_rows=rows, spans=-(-int(lens.max()) // SPAN), drafts=True)


def check(name: str, kind: str, *, row_counts: Sequence[int] = (1, 2, 3, 8), repeated: int = 200) -> None:
    model = of_shape(name, kind, layers=3)
    busy = torch.ones(1, dtype=torch.int32, device="cuda")
    for rows in row_counts:
        lens = np.random.default_rng(rows).integers(1, 1500 if rows < 8 else CONTEXT, rows)
        inputs, plan = rows_of(lens), plan_of(lens)
        assert model.streamed(plan), f"{name}: {rows} rows are not served"
        found = model.forward(inputs, plan).clone()
        model.kernels.own_streamed = False
        wanted = model.forward(inputs, plan).clone()
        model.kernels.own_streamed = True
        error = float(((found - wanted).norm(dim=1) / wanted.norm(dim=1)).max())
        report(f"{name}, {kind}: {rows} rows, {error:.4f} apart", rows, far(found, wanted, FAR[kind]))
        report(f"{name}: control: other logits", rows, far(found.roll(7, 1), wanted, FAR[kind]), control=True)

        def moved(graph, times: int, rows: int = rows, found: torch.Tensor = found) -> int:
            count = 0
            for _ in range(times):
                model.logits.fill_(torch.nan)
                graph.replay()
                count += not torch.equal(model.logits[:rows].view(torch.int32), found.view(torch.int32))
            return count

        work = partial(model.forward, inputs, plan)
        report(f"{name}, {kind}: {rows} rows again and again", repeated, moved(model.capture(work), repeated))
        conditional = model.capture(partial(model.device.only_if, busy, work))
        report(f"{name}, {kind}: {rows} rows, if anybody is there", 3, moved(conditional, 3))
        busy.zero_()
        report(f"{name}: control: nobody is there", 1, moved(conditional, 1), control=True)
        busy.fill_(1)


def time_passes(name: str, kind: str) -> list[dict[str, object]]:
    """Microseconds of whole passes: as one kernel for all layers, a kernel for each step, and in bf16; and by other
    forms of the one kernel."""
    from bench.gpu import microseconds

    model, results = of_shape(name, kind), []
    kernels = model.kernels
    for rows, context in PASSES:
        lens = np.full(rows, context)
        inputs, plan = rows_of(lens), plan_of(lens)
        work = partial(model.forward, inputs, plan)
        entry: dict[str, object] = {"shape": name, "weights": kind, "rows": rows, "context": context}
        entry["streamed"] = round(microseconds(model.capture(work)), 1)
        for what, how in FORMS.items() if rows in (1, 8) else ():
            kernels.streamed_form = partial(streamed_form, **how)
            if model.streamed(plan):
                entry[what] = round(microseconds(model.capture(work)), 1)
            kernels.streamed_form = streamed_form
        kernels.own_streamed = False
        entry["steps"] = round(microseconds(model.capture(work)), 1)
        entry["bf16"] = round(
            microseconds(model.capture(partial(model.forward, inputs, plan._replace(drafts=False)))), 1
        )
        kernels.own_streamed = True
        results.append(entry)
        print(" ".join(f"{k} {v}" for k, v in entry.items()), flush=True)
    return results


def main() -> None:
    begin = time.perf_counter()
    folder, names = sys.argv[1:2], sys.argv[2:]
    for each in names or CHECKED:
        check(*each.split(":"))
        torch.cuda.empty_cache()
    print(f"checks: {time.perf_counter() - begin:.0f} s", flush=True)
    for each in (names or TIMED) if folder else ():
        file = Path(folder[0], "streamed.json")
        known = json.loads(file.read_text()) if file.exists() else []
        name, kind = each.split(":")
        others = [entry for entry in known if (entry["shape"], entry["weights"]) != (name, kind)]
        file.write_text(json.dumps([*others, *time_passes(name, kind)], indent=1) + "\n")
        torch.cuda.empty_cache()
    print(f"{time.perf_counter() - begin:.0f} s;", "FAILED: " + "; ".join(FAILED) if FAILED else "all near")
    sys.exit(bool(FAILED))


if __name__ == "__main__":
    main()

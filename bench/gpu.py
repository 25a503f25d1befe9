"""Times of passes and of single kernels on a GPU: python -m bench.gpu FOLDER [shape ...] writes times.json and a table.

Random weights, decode rows that each have a sequence of their own, passes from embedding to logits as CUDA graphs.
"""

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from tests.backends.cuda.device_check import SHAPES, decode_rows, device_inputs, random_model
from tests.backends.cuda.draw_check import device_parameters
from verispec.backends.cuda.drawing import DrawKernels
from verispec.backends.cuda.forward import DeviceModel, Plan
from verispec.backends.cuda.kernels import ALL_FEW, ALL_MANY, RowInputs
from verispec.backends.cuda.shapes import SPAN

FEW = (1, 2, 4, 8, 16, 32, 64)
MANY = (8, 16, 32, 64, 128, 256, 512)
CONTEXTS = (256, 1024)
PARAMETERS = {
    "temperature": 1.0, "top_k": 0, "top_p": 1.0, "log_min_p": float("-inf"), "t": 0, "sample": 0, "stream": 0,
}  # fmt: skip


def microseconds(graph: torch.cuda.CUDAGraph, replays: int = 10, rounds: int = 7) -> float:
    """Median over rounds of the time of one replay, replays back to back."""
    graph.replay()
    times = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / replays)
    return statistics.median(times)


def parts(model: DeviceModel, inputs: RowInputs, plan: Plan) -> dict[str, Callable[[], None]]:
    """Each kind of kernel by itself, once per layer, so that no weights are found in the cache."""
    kernels, b, rows, many = model.kernels, model.buffers, plan.rows, plan.forms.qkv
    layers, head = (model.draft_layers, model.draft_head) if plan.drafts else (model.layers, model.head)

    def per_layer(work: Callable[[int], None]) -> Callable[[], None]:
        return lambda: [work(i) for i in range(len(layers))] and None

    return {
        "qkv": per_layer(lambda i: kernels.qkv(layers[i], model.k[i], model.v[i], inputs, b, rows, many=many)),
        "attention": per_layer(lambda i: model.attend(i, inputs, plan)),
        "o": per_layer(lambda i: kernels.residual(b.attention, layers[i].o, layers[i].mlp_gain, b, rows, many=many)),
        "gate_up": per_layer(lambda i: kernels.gate_up(layers[i], b, rows, many=many)),
        "down": per_layer(lambda i: kernels.residual(b.h, layers[i].down, layers[i].mlp_gain, b, rows, many=many)),
        "head": per_layer(lambda _: kernels.head(head, b, model.logits, None, rows, many=many)),
    }


def chained(model: DeviceModel, name: str, table: np.ndarray, results: list[dict[str, object]]) -> None:
    """Tokens per second with everything on the device: pass, draw at temperature 1, the token fed back; one graph."""
    device_table = torch.tensor(table, dtype=torch.int32, device="cuda")
    for rows, start, forms in ((1, 200, ALL_FEW), (8, 200, ALL_FEW), (32, 200, ALL_FEW), (256, 200, ALL_MANY)):
        decode = decode_rows(np.full(rows, start), np.arange(rows) + 100, np.arange(rows), table)
        inputs = device_inputs(decode, device_table)
        draws = device_parameters([PARAMETERS | {"seed": i} for i in range(rows)])
        kernels = DrawKernels(model.shapes.vocab, rows)
        plan = Plan(rows=rows, forms=forms, single_rows=rows, spans=2)

        def step(inputs=inputs, draws=draws, kernels=kernels, plan=plan) -> None:
            kernels.draw(model.forward(inputs, plan), draws, plan.rows, filters=False)
            kernels.advance(inputs, draws, plan.rows)

        time_us = microseconds(model.capture(step), replays=20)
        only_draw = microseconds(
            model.capture(lambda k=kernels, d=draws, r=rows: k.draw(model.logits, d, r, filters=False))
        )
        filtered = microseconds(
            model.capture(lambda k=kernels, d=draws, r=rows: k.draw(model.logits, d, r, filters=True))
        )
        entry = {"shape": name, "chained": rows, "step": time_us, "tokens_per_second": rows * 1e6 / time_us}
        report(entry | {"draw": only_draw, "draw_filtered": filtered}, results)


def prompts(model: DeviceModel, name: str, table: np.ndarray, results: list[dict[str, object]]) -> None:
    """512 prompt rows of one sequence, in groups."""
    device_table = torch.tensor(table, dtype=torch.int32, device="cuda")
    shapes, count, most = model.shapes, 512, model.kernels.rows_per_group
    for start in (0, table.shape[1] - count):
        lens = np.arange(start + 1, start + count + 1)
        rows = decode_rows(lens, lens % 1000 + 100, np.zeros(count, np.int64), table)
        inputs = device_inputs(rows | {"ready_lens": np.full(count, start)}, device_table)
        pairs = [(i, min(most, count - i)) for i in range(0, count, most)]
        groups = torch.tensor(pairs, dtype=torch.int32, device="cuda")
        spans = -(-(start + count) // SPAN)
        plan = Plan(rows=count, forms=ALL_MANY, single_rows=0, spans=spans, groups=groups, head_rows=1)
        last = torch.tensor([count - 1], dtype=torch.int32, device="cuda")
        whole = microseconds(model.capture(lambda i=inputs, p=plan, w=last: model.forward(i, p, w)), replays=3)
        alone = model.capture(lambda i=inputs, p=plan: [model.attend(n, i, p) for n in range(len(model.layers))])
        attention = microseconds(alone, replays=3) / len(model.layers)
        operations = 4 * int(lens.sum()) * shapes.heads * shapes.head_dim
        entry = {"shape": name, "prompt_rows": count, "start": start, "pass": whole, "attention": attention}
        report(entry | {"attention_tflops": operations / attention / 1e6}, results)


def report(entry: dict[str, object], results: list[dict[str, object]]) -> None:
    results.append(entry)
    print(" ".join(f"{k} {v:.1f}" if isinstance(v, float) else f"{k} {v}" for k, v in entry.items()), flush=True)


def measure(name: str, results: list[dict[str, object]]) -> None:
    _, num_layers = SHAPES[name]
    most, rng = max(MANY), np.random.default_rng(0)
    model = random_model(name, layers=num_layers, max_rows=most, sequences=most, context_len=max(CONTEXTS))
    table = rng.permutation(most * max(CONTEXTS)).reshape(most, max(CONTEXTS)) + 2
    device_table = torch.tensor(table, dtype=torch.int32, device="cuda")
    for context in CONTEXTS:
        for many, row_counts in ((False, FEW), (True, MANY)):
            for rows in row_counts:
                lens, seqs = np.full(rows, context), np.arange(rows)
                inputs = device_inputs(decode_rows(lens, rng.integers(100, 4000, rows), seqs, table), device_table)
                plan = Plan(rows=rows, forms=ALL_MANY if many else ALL_FEW, single_rows=rows, spans=-(-context // SPAN))
                graph = model.capture(lambda i=inputs, p=plan: model.forward(i, p))
                entry: dict[str, object] = {
                    "shape": name, "context": context, "rows": rows, "form": "many" if many else "few",
                    "pass": microseconds(graph),
                }  # fmt: skip
                if context == min(CONTEXTS):
                    for part, work in parts(model, inputs, plan).items():
                        entry[part] = microseconds(model.capture(work)) / num_layers
                report(entry, results)
    chained(model, name, table, results)
    prompts(model, name, table, results)


def main() -> None:
    results: list[dict[str, object]] = []
    for name in sys.argv[2:] or SHAPES:
        measure(name, results)
        torch.cuda.empty_cache()
        Path(sys.argv[1], "times.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""The kernels on a GPU: against the bit model, against each other, and row purity. Needs torch, numpy and the package.

python -m tests.backends.cuda.device_check FOLDER [NAME ...] writes goldens.json and checks.json there and prints how
many values differ, which must be 0 everywhere except in the controls. Digests must be those that the package has.
"""

import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from tests.backends.cuda import case_digests
from tests.backends.cuda.draw_check import device_parameters
from tests.support import product_cases
from verispec.backends.cuda import arrange, bits, kernels, tiny
from verispec.backends.cuda.bit_model import Context, attention
from verispec.backends.cuda.drawing import DrawKernels
from verispec.backends.cuda.forward import DeviceModel, Plan
from verispec.backends.cuda.kernels import ALL_FEW, ALL_MANY, RowInputs, tree_of_parts, undivided_products
from verispec.backends.cuda.shapes import SPAN, Positions, Shapes, num_parts, rope_tables

RESULTS: list[dict[str, object]] = []
LENS = (1, 63, 64, 65, 255, 256, 257, 511, 512, 513, 1000, 1999)
WHOLE_LENS = (*range(1, 2000, 37), *LENS, 2000, 2048)


def record(name: str, compared: int, different: int, *, control: bool = False) -> None:
    RESULTS.append({"check": name, "compared": compared, "different": different, "control": control})
    bad = (different == 0) if control else (different != 0)
    if bad or control:
        print(f"{'BAD ' if bad else ''}{name}: {different} of {compared}", flush=True)


def compare(name: str, got: torch.Tensor, wanted: torch.Tensor, *, control: bool = False) -> None:
    """Bits of rows: a row differs if any of its values does. NaN equals NaN."""
    a, b = got.float().flatten(1), wanted.float().flatten(1)
    same = (a.view(torch.int32) == b.view(torch.int32)) | (a.isnan() & b.isnan())
    record(name, len(a), int((~same).any(dim=1).sum()), control=control)


def device_inputs(rows: dict[str, np.ndarray], table: torch.Tensor) -> RowInputs:
    def upload(name: str) -> torch.Tensor:
        return torch.as_tensor(np.ascontiguousarray(rows[name]), dtype=torch.int32, device="cuda")

    names = ("token_ids", "positions", "slots", "seq_rows", "prefix_lens", "ready_lens", "tails")
    return RowInputs(**{name: upload(name) for name in names}, table=table)


def stepwise(model: DeviceModel, inputs: RowInputs, plan: Plan) -> dict[str, torch.Tensor]:
    """One eager pass, with a copy of what every kernel gave."""
    launch, b, rows, steps = model.kernels, model.buffers, plan.rows, {}
    for buffer in (b.x, b.scaled, b.nodes, b.q, b.attention, b.h, model.logits):
        buffer.fill_(float("nan"))
    launch.embed(model.embed, model.layers[0].attn_gain, inputs, b, rows)
    slots = inputs.slots[:rows].long()
    for i, layer in enumerate(model.layers):
        at = f"layers.{i}."
        following = model.layers[i + 1].attn_gain if i + 1 < len(model.layers) else model.final_gain
        launch.qkv(layer, model.k[i], model.v[i], inputs, b, rows, many=plan.forms.qkv)
        steps[at + "q"] = b.q[:rows].clone()
        steps[at + "k"], steps[at + "v"] = model.k[i, slots], model.v[i, slots]
        model.attend(i, inputs, plan)
        steps[at + "attention"] = b.attention[:rows].clone()
        many, post_gain = plan.forms.qkv, layer.attn_post_gain
        launch.residual(b.attention, layer.o, layer.mlp_gain, b, rows, many=many, post_gain=post_gain)
        steps[at + "attended"] = b.x[:rows].clone()
        launch.gate_up(layer, b, rows, many=plan.forms.qkv)
        steps[at + "h"] = b.h[:rows].clone()
        launch.residual(b.h, layer.down, following, b, rows, many=many, post_gain=layer.mlp_post_gain)
        steps[at + "x"] = b.x[:rows].clone()
    launch.head(model.head, b, model.logits, None, rows, many=plan.forms.qkv)
    steps["logits"] = model.logits[:rows].clone()
    return steps


# Tiny models against the bit model


def tiny_rows(rows: tiny.TinyRows, first: int, count: int, *, tail: int) -> dict[str, np.ndarray]:
    """Rows [first, first + count) of a pass as one call; `tail` context positions stand in tails instead."""
    table, cut = tiny.slot_table(), slice(first, first + count)
    positions, seqs = rows.positions[cut], rows.seq_rows[cut]
    prefix = np.maximum(0, positions + 1 - tail)
    tails = np.zeros((count, max(1, tail)), np.int64)
    for i, (position, seq) in enumerate(zip(positions, seqs, strict=True)):
        behind = table[seq, prefix[i] : position + 1]
        tails[i, : len(behind)] = behind
    start = {int(s): int(positions[seqs == s].min()) for s in set(seqs.tolist())}
    return {
        "token_ids": rows.token_ids[cut], "positions": positions, "slots": rows.slots[cut], "seq_rows": seqs,
        "prefix_lens": prefix, "ready_lens": np.array([start[int(s)] for s in seqs]), "tails": tails,
    }  # fmt: skip


def tiny_groups(rows: dict[str, np.ndarray], most: int) -> torch.Tensor:
    return torch.tensor(tiny.groups_of(rows["seq_rows"], most), dtype=torch.int32, device="cuda")


CALLS = (  # how passes are cut: rows of a call, whether they are many, positions in tails, whether rows are in groups
    (64, False, 0, False), (64, True, 0, True), (1, False, 0, False), (7, False, 5, False), (9, True, 3, False),
    (18, False, 0, True), (1, True, 40, False),
)  # fmt: skip


def check_tiny(name: str, goldens: dict[str, dict[str, str]], calls: Sequence[tuple[int, bool, int, bool]]) -> None:
    source = tiny.tiny_model(name)
    model = DeviceModel(
        source.shapes, source.positions, source.tensors.__getitem__, num_slots=tiny.NUM_SLOTS, max_rows=64,
        context_len=tiny.CONTEXT_LEN, tied=source.arch.tied_head,
    )  # fmt: skip
    table = torch.tensor(tiny.slot_table(), dtype=torch.int32, device="cuda")
    given = torch.tensor(tiny.slot_table()[1, : tiny.GIVEN_A], device="cuda")
    k, v = (torch.from_numpy(x).cuda().to(torch.bfloat16) for x in tiny.given_kv(source))
    wanted = tiny.bit_model_steps(source)
    goldens[name] = {}
    for chunk, many, tail, grouped in calls:
        model.k.zero_(), model.v.zero_()
        model.k[:, given], model.v[:, given] = k, v
        for number, rows in enumerate(tiny.passes()):
            for first in range(0, len(rows.positions), chunk):
                part = tiny_rows(rows, first, min(chunk, len(rows.positions) - first), tail=tail)
                count = len(part["positions"])
                groups = tiny_groups(part, model.kernels.rows_per_group) if grouped else None
                plan = Plan(
                    rows=count,
                    forms=ALL_MANY if many else ALL_FEW,
                    single_rows=0 if grouped else count,
                    spans=2,
                    groups=groups,
                )
                inputs = device_inputs(part, table)
                steps = stepwise(model, inputs, plan)
                torch.cuda.synchronize()
                label = f"tiny {name} pass {number} chunk {chunk} {'many' if many else 'few'} tail {tail} {grouped=}"
                for step, values in steps.items():
                    reference = torch.from_numpy(wanted[number][step][first : first + count]).cuda()
                    compare(f"{label}: {step}", values, reference)
                    if chunk == 64 and not many:
                        goldens[name][f"{number}/{step}"] = tiny.digest(values.float().cpu().numpy())


def check_windows(name: str) -> None:
    """Sliding windows, single rows and groups, against the bit model; and logits of chosen rows."""
    source = tiny.tiny_model(name)
    model = DeviceModel(
        source.shapes, source.positions[:1], source.tensors.__getitem__, num_slots=tiny.NUM_SLOTS, max_rows=64,
        context_len=tiny.CONTEXT_LEN, tied=source.arch.tied_head,
    )  # fmt: skip
    shapes, count, start = source.shapes, 40, 250
    table = tiny.slot_table()
    stores = [bits.bf16(tiny.numbers(part, tuple(model.k[0].shape)) * np.float32(6)) for part in "kv"]
    q = bits.bf16(tiny.numbers("q", (count, shapes.heads, shapes.head_dim)) * np.float32(6))
    for store, values in zip((model.k[0], model.v[0]), stores, strict=True):
        store.copy_(torch.from_numpy(values))
    lens = np.arange(start + 1, start + count + 1)
    rows = decode_rows(lens, np.arange(count), np.ones(count, np.int64), table)
    inputs = device_inputs(rows, torch.tensor(table, dtype=torch.int32, device="cuda"))
    usual = kernels.WHOLE_GROUPS_PER_SM
    for window in (1, 30, 64, 100, 257, 1 << 30):
        context, scalar = Context(table[rows["seq_rows"]], lens), shapes.query_scalar
        reference = attention(q, *stores, context, window=window, query_scalar=scalar)
        model.layers[0] = replace(model.layers[0], window=window)
        some = tiny_groups(rows, model.kernels.rows_per_group)
        three = tiny_groups(rows, 3)
        for groups, per_sm in ((None, 1), (None, 0), (some, 1), (some, 0), (three, 1), (three, 0)):
            kernels.WHOLE_GROUPS_PER_SM = per_sm  # 0: a block has all spans of its rows
            model.kernels.whole_rows = per_sm == 0
            model.buffers.q[:count] = torch.from_numpy(q).cuda()
            model.buffers.attention.fill_(float("nan"))
            single = count if groups is None else 0
            model.attend(0, inputs, Plan(count, ALL_FEW, single_rows=single, spans=2, groups=groups))
            got = model.buffers.attention[:count]
            compare(f"{name} window {window} {groups is None} {per_sm}", got, torch.from_numpy(reference).cuda())
    kernels.WHOLE_GROUPS_PER_SM, model.kernels.whole_rows = usual, None
    inputs.ready_lens.fill_(start)  # the rows are of one sequence: what stands behind is written in this pass
    for forms in (ALL_FEW, ALL_MANY):
        plan = Plan(rows=count, forms=forms, single_rows=count, spans=2)
        with undivided_products():
            everything = model.forward(inputs, plan).clone()
            some = torch.tensor([3, 39, 0, 17, 17], dtype=torch.int32, device="cuda")
            got = model.forward(inputs, plan._replace(head_rows=5), some)
        compare(f"{name} logits of chosen rows", got, everything[some.long()])


def check_whole_rows(
    heads: int, kv_heads: int, head_dim: int, *, row_lens: tuple[int, ...] = WHOLE_LENS,
    tail_lens: tuple[int, ...] = (0, 5, 100), context_len: int = 2048,
) -> None:  # fmt: skip
    """One block for all spans of a row against a block for each of them: contexts, tails and windows."""
    rng, width, lens = np.random.default_rng(heads), heads * head_dim, np.array(row_lens)
    rows, size = len(lens), (len(lens) * context_len + 2, kv_heads, head_dim)
    shapes = Shapes(width, heads, kv_heads, head_dim, width, 256, 1e-5)
    launch, b = kernels.Kernels(shapes), kernels.Buffers.of(shapes, rows, rows * context_len // SPAN, "cuda")
    k, v = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    table = rng.permutation(rows * context_len).reshape(rows, context_len) + 2
    device_table = torch.tensor(table, dtype=torch.int32, device="cuda")
    q, spans = torch.randn(3, *b.q.shape, device="cuda", dtype=torch.bfloat16) * 2, context_len // SPAN
    for tail in tail_lens:
        call = decode_rows(lens, np.zeros(rows, np.int64), np.arange(rows), table)
        prefix = np.maximum(0, lens - tail)
        tails = np.zeros((rows, max(1, tail)), np.int64)
        for i, length in enumerate(lens):
            tails[i, : length - prefix[i]] = table[i, prefix[i] : length]
        inputs = device_inputs({**call, "prefix_lens": prefix, "ready_lens": prefix, "tails": tails}, device_table)
        by_window = {}
        for window in (1 << 30, 1000, 257, 64, 30, 1):
            found = {}
            for whole in (False, True):
                launch.whole_rows, outs = whole, []
                for values in q:
                    b.q.copy_(values), b.attention.fill_(float("nan"))
                    launch.attend_rows(k, v, inputs, b, first_row=0, rows=rows, spans=spans, window=window)
                    outs.append(b.attention.clone())
                found[whole] = torch.cat(outs)
            label = f"whole rows {heads}/{kv_heads} of {head_dim} tail {tail} window {window}"
            compare(label, found[True], found[False])
            by_window[window] = found[True]
        compare(f"whole rows {heads}/{kv_heads} control: other windows", by_window[30], by_window[64], control=True)


# Single products of real shapes against the bit model

SHAPES = {
    "smol": (Shapes(576, 9, 3, 64, 1536, 49152, 1e-5), 30),
    "qwen1.5b": (Shapes(1536, 12, 2, 128, 8960, 151936, 1e-6), 28),
    "8b": (Shapes(4096, 32, 8, 128, 14336, 128256, 1e-5), 32),
}


def check_products(name: str) -> None:
    model = random_model(name, layers=1, max_rows=64, sequences=1)
    rng = np.random.default_rng(1)
    layer = model.layers[0]
    for kind, w in (("qkv", layer.qkv), ("o", layer.o), ("gate_up", layer.gate_up), ("down", layer.down)):
        outputs, columns = w.shape
        for spread in ("normal", "heavy", "wide"):
            x = torch.randn(40, columns, device="cuda")
            if spread == "heavy":
                x = x**5
            if spread == "wide":  # exponents all over, zeros among them, and signs that cancel
                x = x * torch.exp2(torch.randint(-60, 60, x.shape, device="cuda").float())
                x[:, ::3] = 0
            x = x.to(torch.bfloat16)
            with undivided_products():
                library, parts = model.kernels._product(x, w, model.buffers)
            if parts > 1:
                library = tree_of_parts(list(library))
            for rows in (4, 11, 32, 40):  # by both of our kernels
                ours, label = model.kernels.plain(x[:rows], w, many=False), f"{name} {kind} {spread}: {rows} rows"
                compare(f"{label}, ours, library", ours, library[:rows].to(torch.bfloat16))
            x, y, library = x[:4], model.kernels.plain(x[:4], w, many=False), library[:4]
            some = rng.choice(outputs, 24, replace=False)
            exact = bits.product(x.float().cpu().numpy(), w[some].float().cpu().numpy(), parts)
            reference = torch.from_numpy(bits.bf16(exact)).cuda()
            compare(f"{name} {kind} {spread}: ours, bit model", y[:, some], reference)
            compare(f"{name} {kind} {spread}: library, bit model", library[:, some].to(torch.bfloat16), reference)
            if (name, kind, spread) == ("8b", "down", "normal"):
                usual = torch.mm(x, w.t())  # the library by its own lights splits K here
                compare("8b control: the library's default product", usual, y, control=True)
            if parts > 1:
                fp32 = library[:, some].contiguous()
                compare(f"{name} {kind} {spread}: float32 library, bit model", fp32, torch.from_numpy(exact).cuda())


def check_odd_products() -> None:
    """Zeros, edges, sums that overflow, NaN and infinities on either side: few rows, many rows, and float32 results."""
    rng, launch = np.random.default_rng(2), random_model("smol", layers=1, max_rows=8, sequences=1).kernels
    for outputs, columns in ((64, 64), (96, 576), (1152, 192)):
        parts = num_parts(outputs, columns)
        for kind in product_cases.KINDS:
            for weight_kind in product_cases.KINDS:
                x = product_cases.values(rng, kind, (8, columns))
                w = product_cases.values(rng, weight_kind, (outputs, columns))
                with np.errstate(all="ignore"):
                    exact = bits.product(x, w, parts)
                    reference = torch.from_numpy(bits.bf16(exact)).cuda()
                left, right = (torch.from_numpy(part).cuda().to(torch.bfloat16) for part in (x, w))
                label = f"odd product {outputs} x {columns}, {kind} by {weight_kind}"
                compare(f"{label}: ours", launch.plain(left, right, many=False), reference)
                with undivided_products():
                    compare(f"{label}: library", launch.plain(left, right, many=True), reference)
                    whole = torch.mm(left, right.t(), out_dtype=torch.float32) if parts == 1 else None
                if whole is not None:
                    compare(f"{label}: float32 library", whole, torch.from_numpy(exact).cuda())
    with np.errstate(all="ignore"):
        finite = torch.from_numpy(bits.product(np.nan_to_num(x, nan=1, posinf=1, neginf=1), w, parts)).cuda()
    compare(
        "odd product control: without what is no number", launch.plain(left, right, many=False), finite, control=True
    )


def check_odd_wide_products() -> None:
    """The same for the product of 9 to 64 rows: among them rows that are no numbers, and weights that are none."""
    rng, launch = np.random.default_rng(5), random_model("smol", layers=1, max_rows=8, sequences=1).kernels
    outputs, columns, rows = 4224, 1024, 12
    some = rng.choice(outputs, 16, replace=False)
    for kind in product_cases.KINDS:
        for weight_kind in product_cases.KINDS:
            x = product_cases.values(rng, kind, (rows, columns))
            w = product_cases.values(rng, weight_kind, (outputs, columns))
            with np.errstate(all="ignore"):
                exact = bits.bf16(bits.product(x, w[some], num_parts(outputs, columns)))
            left, right = (torch.from_numpy(part).cuda().to(torch.bfloat16) for part in (x, w))
            label = f"odd wide product, {kind} by {weight_kind}"
            ours = launch.plain(left, right, many=False)
            found, reference = ours[:, some].contiguous(), torch.from_numpy(exact).cuda()
            compare(f"{label}: ours", found, reference)
            if kind == weight_kind == "plain":
                compare(f"{label}: control, another row", found.roll(1, 0), reference, control=True)


# Row purity in captured graphs

# Heads, K/V heads and head size: groups of 1, 3, 4, 6, 7 and 9 heads.
WHOLE_ROWS = ((4, 4, 128), (9, 3, 64), (32, 8, 128), (12, 2, 128), (14, 2, 64), (18, 2, 128), (8, 4, 256), (9, 1, 256))
NAN_TOKEN, INF_TOKEN, HUGE_TOKEN = 10, 11, 12


def random_model(name: str, *, layers: int, max_rows: int, sequences: int, context_len: int = 2048) -> DeviceModel:
    shapes, _ = SHAPES[name]
    generator = torch.Generator(device="cuda").manual_seed(len(name))
    sizes = {
        "q": (shapes.attention, shapes.width), "k": (shapes.kv_heads * shapes.head_dim, shapes.width),
        "v": (shapes.kv_heads * shapes.head_dim, shapes.width), "o": (shapes.width, shapes.attention),
        "gate": (shapes.mlp, shapes.width), "up": (shapes.mlp, shapes.width), "down": (shapes.width, shapes.mlp),
        "embed": (shapes.vocab, shapes.width), "head": (shapes.vocab, shapes.width),
    }  # fmt: skip

    def read(tensor: str) -> torch.Tensor:
        kind = tensor.rsplit(".", 1)[-1]
        if kind.endswith("_bias"):
            if name != "qwen1.5b":
                raise KeyError(tensor)
            size = shapes.attention if kind == "q_bias" else shapes.kv_heads * shapes.head_dim
            return torch.randn(size, generator=generator, device="cuda")
        if kind in ("q_norm", "k_norm", "attn_post_norm", "mlp_post_norm"):
            raise KeyError(tensor)
        if kind.endswith("norm"):
            return torch.rand(shapes.width, generator=generator, device="cuda") + 0.5
        values = torch.randn(sizes[kind], generator=generator, device="cuda", dtype=torch.bfloat16)
        if kind == "embed":
            values[NAN_TOKEN], values[INF_TOKEN], values[HUGE_TOKEN] = float("nan"), float("inf"), 3e38
            return values
        return values * sizes[kind][1] ** -0.5

    frequencies = (10000.0 ** (-np.arange(0, shapes.head_dim, 2) / shapes.head_dim)).astype(np.float32)
    positions = Positions(*rope_tables(frequencies, context_len))
    model = DeviceModel(
        shapes, [positions] * layers, read, num_slots=sequences * context_len + 2, max_rows=max_rows,
        context_len=context_len, tied=False,
    )  # fmt: skip
    for store in (model.k, model.v):
        store.normal_(generator=generator)
    return model


def decode_rows(lens: np.ndarray, token_ids: np.ndarray, seqs: np.ndarray, table: np.ndarray) -> dict[str, np.ndarray]:
    positions = lens - 1
    return {
        "token_ids": token_ids, "positions": positions, "slots": table[seqs, positions], "seq_rows": seqs,
        "prefix_lens": lens, "ready_lens": positions, "tails": np.zeros((len(lens), 8), np.int64),
    }  # fmt: skip


def fill(inputs: RowInputs, rows: dict[str, np.ndarray]) -> None:
    for name, values in rows.items():
        tensor = getattr(inputs, name)
        tensor[: len(values)] = torch.as_tensor(values, dtype=torch.int32)


def check_purity(
    name: str,
    few: tuple[int, ...],
    many: tuple[int, ...],
    rounds: int,
    lens: tuple[int, ...] = LENS,
    context_len: int = 2048,
) -> None:
    rng = np.random.default_rng(3)
    sequences = 24
    model = random_model(name, layers=2, max_rows=max(many), sequences=sequences, context_len=context_len)
    table = rng.permutation(sequences * context_len).reshape(sequences, context_len) + 2
    device_table = torch.tensor(table, dtype=torch.int32, device="cuda")
    probe_lens = np.array(lens)
    tokens = rng.integers(100, 4000, len(lens))
    seqs = np.arange(len(lens))  # probe rows have sequences 0.., neighbours the others
    probe = decode_rows(probe_lens, tokens, seqs, table)
    spans = context_len // SPAN

    def run(rows: dict[str, np.ndarray], *, use_many: bool) -> torch.Tensor:
        count = len(rows["positions"])
        key = (count, use_many)
        if key not in graphs:
            inputs = device_inputs(rows, device_table)
            plan = Plan(rows=count, forms=ALL_MANY if use_many else ALL_FEW, single_rows=count, spans=spans)
            graphs[key] = (inputs, model.capture(lambda: model.forward(inputs, plan)))
        inputs, graph = graphs[key]
        fill(inputs, rows)
        for _ in range(3):  # back to back: a fence that is missing shows here
            graph.replay()
        return model.logits[:count].clone()

    graphs: dict[tuple[int, bool], tuple[RowInputs, torch.cuda.CUDAGraph]] = {}
    alone = [run({k: v[i : i + 1] for k, v in probe.items()}, use_many=False)[0] for i in range(len(lens))]
    reference = torch.stack(alone)
    compare(f"{name} purity: all probe rows finite", reference.isfinite().all(1, keepdim=True).float(),
            torch.ones(len(lens), 1, device="cuda"))  # fmt: skip
    for use_many, shapes in ((False, few), (True, many)):
        for count in shapes:
            for _ in range(rounds):
                near = rng.integers(0, sequences - len(lens), count) + len(lens)
                near_lens = rng.integers(1, context_len, count)
                odd = rng.choice([NAN_TOKEN, INF_TOKEN, HUGE_TOKEN, 0, 200, 300], count)
                crowd = decode_rows(near_lens, odd, near, table)
                crowd["slots"] = np.ones(count, np.int64)  # neighbours write to the dump slot
                places = rng.permutation(count)[: len(lens)]
                chosen = rng.permutation(len(lens))[: len(places)]
                for key, values in crowd.items():
                    values[places] = probe[key][chosen]
                got = run(crowd, use_many=use_many)[places]
                compare(f"{name} purity M {count} {'many' if use_many else 'few'}", got, reference[chosen])
    moved = {k: v.copy() for k, v in probe.items()}
    moved["token_ids"][:] += 1
    compare(f"{name} control: other tokens", run(moved, use_many=False), reference, control=True)
    check_chains(name, model, table, device_table)


def check_chains(name: str, model: DeviceModel, table: np.ndarray, device_table: torch.Tensor) -> None:
    """Rows of one sequence: decode row = prompt row (alone, in groups) = chain row = tree row."""
    rng = np.random.default_rng(4)
    for start in (0, 40, 250, 500):
        count = 60
        lens = np.arange(start + 1, start + count + 1)
        seqs = np.zeros(count, np.int64)
        rows = decode_rows(lens, rng.integers(100, 4000, count), seqs, table)
        one_by_one = []
        for i in range(count):  # decode
            part = {k: v[i : i + 1] for k, v in rows.items()}
            plan = Plan(rows=1, forms=ALL_FEW, single_rows=1, spans=8)
            one_by_one.append(model.forward(device_inputs(part, device_table), plan)[0].clone())
        reference = torch.stack(one_by_one)
        prompt = {**rows, "ready_lens": np.full(count, start)}
        tree = {k: v.copy() for k, v in prompt.items()}
        tree["prefix_lens"][:] = start
        tree["tails"] = np.zeros((count, count), np.int64)
        for i in range(count):
            tree["tails"][i, : i + 1] = table[0, start : start + i + 1]
        wrong = {k: v.copy() for k, v in tree.items()}
        wrong["tails"][:, 0] = table[1, 5]
        most = model.kernels.rows_per_group
        pairs = [(i, min(most, count - i)) for i in range(0, count, most)]
        groups = torch.tensor(pairs, dtype=torch.int32, device="cuda")
        for label, form, many, group in (
            ("prompt", prompt, False, None), ("prompt", prompt, True, None), ("prompt groups", prompt, False, groups),
            ("prompt groups", prompt, True, groups), ("tree", tree, False, None), ("tree", tree, True, None),
            ("tree groups", tree, True, groups), ("control: wrong tail", wrong, False, None),
        ):  # fmt: skip
            plan = Plan(
                rows=count,
                forms=ALL_MANY if many else ALL_FEW,
                single_rows=0 if group is not None else count,
                spans=8,
                groups=group,
            )
            with undivided_products():
                got = model.forward(device_inputs(form, device_table), plan)
            control = label.startswith("control")
            compare(f"{name} {label} from {start} {'many' if many else 'few'}", got, reference, control=control)


def check_goldens(found: dict[str, dict[str, str]]) -> None:
    """Digests made here, against those that the package has."""
    _write("goldens.json", found)
    kept = json.loads(tiny.GOLDENS.read_text())
    for name, digests in found.items():
        record(f"goldens of {name}", len(kept[name]), _unlike(digests, kept[name]))
    if "llama" in found:
        record("goldens: control, of another model", 30, _unlike(found["llama"], kept["qwen2"]), control=True)


def check_case_digests() -> None:
    """What a CPU derives of a wide product and of draws with filters."""
    launch, x, w = kernels.Kernels(SHAPES["smol"][0]), *case_digests.wide_inputs()
    left, right = (torch.from_numpy(part).cuda().to(torch.bfloat16) for part in (x, w))
    product = launch.plain(left, right, many=False)[:, case_digests.SOME_OUTPUTS].float()
    draws = DrawKernels(case_digests.VOCAB, case_digests.ROWS)
    parameters = device_parameters(case_digests.draw_parameters())
    draws.draw(torch.from_numpy(case_digests.draw_logits()).cuda(), parameters, case_digests.ROWS, filters=True)
    drawn = torch.stack([draws.token_ids.float(), draws.logprobs], dim=1)
    values = (product, drawn)
    for (name, kept), found in zip(case_digests.DIGESTS.items(), values, strict=True):
        record(f"digest of {name}", 1, int(tiny.digest(found.cpu().numpy()) != kept))
        other = tiny.digest(found.roll(1, 0).cpu().numpy())
        record(f"digest of {name}: control, other rows", 1, int(other != kept), control=True)


def _unlike(found: dict[str, str], kept: dict[str, str]) -> int:
    return sum(found.get(name) != kept.get(name) for name in {*found, *kept})


def sections(full: bool) -> Iterator[tuple[str, Callable[[], None]]]:
    goldens: dict[str, dict[str, str]] = {}
    for name in tiny.ARCHITECTURES:
        yield f"tiny {name}", lambda name=name: check_tiny(name, goldens, CALLS)
        yield f"windows {name}", lambda name=name: check_windows(name)
    for heads, kv_heads, head_dim in WHOLE_ROWS:
        name = f"whole rows {heads}/{kv_heads} of {head_dim}"
        yield name, lambda sizes=(heads, kv_heads, head_dim): check_whole_rows(*sizes)
    yield "goldens", lambda: check_goldens(goldens)
    yield "digests of cases", check_case_digests
    for name in SHAPES:
        yield f"products {name}", lambda name=name: check_products(name)
    yield "odd products", check_odd_products
    yield "odd wide products", check_odd_wide_products
    few = (1, 2, 3, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64)
    many = tuple(sorted({3, 17, 33, 255, *arrange.ROW_SIZES, *arrange._MIXED_SIZES}))  # all that are served
    for name in SHAPES:
        yield f"purity {name}", lambda name=name: check_purity(name, few, many, 4 if full else 1)
    lens = (2048, 4095, 4096, 4097, 8000)
    yield "long contexts", lambda: check_purity("smol", (1, 5, 8, 33), (8, 64), 3, lens=lens, context_len=8192)


def _write(name: str, values: object) -> None:
    Path(sys.argv[1], name).write_text(json.dumps(values, indent=1) + "\n")


def main() -> None:
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "CUDA", torch.version.cuda, flush=True)
    failed = False
    for name, section in sections(full=True):
        if len(sys.argv) > 2 and not any(name.startswith(wanted) for wanted in sys.argv[2:]):
            continue
        begin, before = time.perf_counter(), len(RESULTS)
        try:
            section()
            torch.cuda.synchronize()
        except Exception:
            traceback.print_exc()
            failed = True
        torch.cuda.empty_cache()
        new = RESULTS[before:]
        bad = sum(1 for r in new if (r["different"] == 0) == r["control"])
        failed |= bad > 0
        rows = sum(int(r["compared"]) for r in new)
        seconds = time.perf_counter() - begin
        print(f"{name}: {len(new)} comparisons of {rows} rows, {bad} wrong, {seconds:.1f} s", flush=True)
    _write("checks.json", RESULTS)
    print("FAILED" if failed else "all equal")
    sys.exit(failed)


if __name__ == "__main__":
    main()

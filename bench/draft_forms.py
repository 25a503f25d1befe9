"""Forms of what drafts on few-bit weights, tried in whole passes on a GPU.

python -m bench.draft_forms FOLDER [NAME ...]

NAME is one of `quantized_check`'s shapes (default: those of 1B to 8B parameters), with random weights on 4 bits, or on
--weights int8; --rows and --context say what a pass has. Of the five products and attention, one after the other, each
part of the form is varied while the others stay, twice over; what makes the pass shortest stays for those behind it.
The same form, timed again at the end, says what a difference is worth. Logits that are far from those of the rule's
forms end the run. FOLDER/draft_forms.json has everything that was tried.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

from verispec.backends.cuda.product_forms import (
    MAX_BLOCK_NBYTES,
    DraftForm,
    Kind,
    draft_form,
    draft_nbytes,
    draft_rows,
    sums_nbytes,
)
from verispec.backends.cuda.shapes import SPAN, TILE, Shapes

MOST_WARPS, MOST_STAGES = 20, 12
RINGS = tuple(1024 * n for n in (32, 48, 64, 77, 100, 115, 148, 190))  # bytes that a block asks for
REGISTERS, LEAST_REGISTERS = 65536, 40  # of an SM, and those that a thread cannot do without
KEPT = 1024  # bytes of an SM's shared memory for each block that is not the block's
SPANS = (64, 128, SPAN)
FAR = 0.5  # of logits: many layers carry what rounding does far, and what is wrong farther
NAMES = ("llama1b", "qwen1.5b", "llama3b", "8b")


class Product(NamedTuple):
    """What a form is chosen for."""

    kind: Kind
    w: tuple[int, int]
    bits: int = 4

    def row_tile(self, rows: int) -> int:
        return draft_rows(self.w[1], rows)

    def by_the_rule(self, rows: int, num_sms: int) -> DraftForm:
        return draft_form(self.kind, self.w, self.bits, self.row_tile(rows), num_sms)


Forms = Mapping[Product, DraftForm]


class Trial(NamedTuple):
    """A pass with these forms and spans, and what it takes."""

    forms: Forms
    span: int
    time_us: float = 0.0


def products(s: Shapes, bits: int = 4) -> dict[str, Product]:
    """By name, those of a pass."""
    found = {
        "output": (Kind.RESIDUAL, (s.width, s.attention)), "down": (Kind.RESIDUAL, (s.width, s.mlp)),
        "gate-up": (Kind.GATE_UP, (2 * s.mlp, s.width)), "q/k/v": (Kind.QKV, (s.qkv, s.width)),
        "head": (Kind.HEAD, (s.vocab, s.width)),
    }  # fmt: skip
    return {name: Product(kind, w, bits) for name, (kind, w) in found.items()}


def with_ring(form: DraftForm, product: Product, rows: int, nbytes: int) -> DraftForm | None:
    """The form with as many stages as so much shared memory has room for, if it has any."""
    chunk, row_nbytes = draft_nbytes(product.w, product.bits, product.row_tile(rows), form.warps)
    fixed = sums_nbytes(product.row_tile(rows), form.warps, form.enders)
    each = -(-(product.w[1] // TILE) // form.warps)
    room = min(nbytes, MAX_BLOCK_NBYTES) - fixed - row_nbytes
    stages = min(MOST_STAGES // form.step, room // (form.step * chunk))
    if stages < 2 or each % form.step:
        return None
    return form._replace(stages=stages, shared=max(stages * form.step * chunk + row_nbytes, nbytes - fixed))


def variants(form: DraftForm, product: Product, rows: int) -> list[list[DraftForm]]:
    """Lists of forms that differ from this one in some parts: who ends tiles, when the next kernel starts and for how
    many blocks registers are; by how many warps and steps they read, and what they ask for; how many share an SM."""
    chunks = product.w[1] // TILE
    warps = [n for n in range(4, MOST_WARPS + 1) if chunks % n == 0 or n in (form.warps, 12, MOST_WARPS)]
    ends = [form._replace(enders=n, late=late, among=m) for n in (1, 2, 3, 5) for late in (0, 1) for m in (2, 3)]
    read = [form._replace(warps=n, step=step) for n in warps for step in (1, 2)]
    found = [
        ends,
        [with_ring(each, product, rows, size) for each in read for size in RINGS],
        [with_ring(form._replace(per_sm=n), product, rows, size) for n in (1, 2, 3) for size in RINGS],
    ]
    return [[each for each in part if each is not None and fits(each, product, rows)] for part in found]


def fits(form: DraftForm, product: Product, rows: int) -> bool:
    """Whether so many blocks have room on an SM."""
    nbytes = form.shared + sums_nbytes(product.row_tile(rows), form.warps, form.enders) + KEPT
    has_registers = form.among * 32 * (form.warps + form.enders) * LEAST_REGISTERS <= REGISTERS
    return form.per_sm * nbytes <= MAX_BLOCK_NBYTES + KEPT and has_registers and form.per_sm <= form.among


def searched(
    start: Trial, names: Mapping[str, Product], rows: int, timed: Callable[[Sequence[Trial]], list[float]],
    tell: Callable[[Trial], object] = lambda now: None,
) -> tuple[Trial, list[Trial]]:  # fmt: skip
    """The quickest pass that varying one part after the other finds, and all that were tried."""
    best = start._replace(time_us=timed([start])[0])
    tried = [best]

    def quickest(candidates: Iterable[Trial]) -> None:
        nonlocal best
        found = [each for each in candidates if (each.forms, each.span) != (best.forms, best.span)]
        found = [each._replace(time_us=time_us) for each, time_us in zip(found, timed(found), strict=True)]
        tried.extend(found)
        best = min([best, *found], key=lambda trial: trial.time_us)
        tell(best)

    crowded = {product: form._replace(among=3) for product, form in best.forms.items()}
    if all(fits(form, product, rows) for product, form in crowded.items()):
        quickest([best._replace(forms=crowded)])
    for _ in range(2):
        quickest(best._replace(span=span) for span in SPANS)
        for product in names.values():
            for part in range(len(variants(best.forms[product], product, rows))):
                forms = variants(best.forms[product], product, rows)[part]
                quickest(best._replace(forms={**best.forms, product: form}) for form in forms)
    return best, tried


def compile_form(defines: dict[str, int]) -> None:
    """In a process of its own: what it leaves is in the cache."""
    from verispec.backends.cuda.compiler import Cubins
    from verispec.model.hub import cache_dir

    Cubins(cache_dir() / "cuda").get("quantized.cu", defines)


def measure(name: str, weights: str, rows: int, context: int, pool: ProcessPoolExecutor) -> dict[str, object]:
    import numpy as np
    import torch

    from bench.gpu import microseconds
    from tests.backends.cuda import quantized_check as check
    from tests.backends.cuda.device_check import SHAPES, decode_rows, device_inputs, random_model
    from verispec.backends.cuda.forward import Plan
    from verispec.backends.cuda.kernels import ALL_FEW
    from verispec.backends.options import DRAFT_BITS

    SHAPES.setdefault(name, (check.DRAFTS | check.LLAMAS)[name])
    shapes, num_layers = SHAPES[name]
    model = random_model(name, layers=num_layers, max_rows=8, sequences=8)
    check.use_draft_weights(model, weights)
    table = np.random.default_rng(0).permutation(8 * 2048).reshape(8, 2048) + 2
    every = np.arange(rows)
    inputs = device_inputs(
        decode_rows(np.full(rows, context), every + 100, every, table),
        torch.tensor(table, dtype=torch.int32, device="cuda"),
    )
    plan = Plan(rows=rows, forms=ALL_FEW, single_rows=rows, spans=-(-context // SPAN), drafts=True)
    bits = DRAFT_BITS[weights]
    kernels, names = model.kernels, products(shapes, bits)
    kernels.draft_form = lambda kind, w, *_: trial.forms[Product(kind, (w[0], w[1]), bits)]
    span = kernels.draft_span(rows, plan.spans)
    trial = Trial({p: p.by_the_rule(rows, kernels.num_sms) for p in names.values()}, span)
    model.forward(inputs, plan)
    expected = model.forward(inputs, plan).clone()
    bf16_us = microseconds(model.capture(lambda: model.forward(inputs, plan._replace(drafts=False))))
    compiled: set[str] = set()

    def use(each: Trial) -> None:
        nonlocal trial
        trial, kernels.draft_spans = each, (each.span,)

    def timed(trials: Sequence[Trial]) -> list[float]:
        forms = {(p, form) for each in trials for p, form in each.forms.items()}
        defines = [kernels.draft_defines(p.kind, p.w, bits, p.row_tile(rows), form) for p, form in forms]
        new = {str(each): each for each in defines if str(each) not in compiled}
        compiled.update(new)
        list(pool.map(compile_form, new.values()))
        times = []
        for each in trials:
            use(each)
            if check.far(model.forward(inputs, plan), expected, FAR):
                raise SystemExit(f"{name}: logits are far from those of the rule's forms by {each}")
            times.append(microseconds(model.capture(lambda: model.forward(inputs, plan))))
        return times

    start = trial
    best, tried = searched(start, names, rows, timed, lambda now: print(f"{now.time_us:.1f} us: {now}", flush=True))
    again = timed([start, best, start, best])
    rule, found = again[::2], again[1::2]
    print(f"\n{name}, {rows} rows, context {context}: bf16 {bf16_us:.0f} us; by the rule {rule[0]:.1f}, {rule[1]:.1f};")
    print(f"best of {len(tried)} {found[0]:.1f}, {found[1]:.1f}; spans of {best.span}")
    for what, product in names.items():
        print(f"  {what}: {start.forms[product]}\n    best: {best.forms[product]}", flush=True)
    listed = [
        {"time_us": each.time_us, "span": each.span, **{w: list(each.forms[p]) for w, p in names.items()}}
        for each in tried
    ]
    return {
        "shape": name,
        "weights": weights,
        "rows": rows,
        "context": context,
        "bf16_us": bf16_us,
        "again": again,
        "tried": listed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where results are written")
    parser.add_argument("names", nargs="*", default=NAMES, help="shapes; default: %(default)s")
    parser.add_argument("--weights", choices=("int4", "int8"), default="int4")
    parser.add_argument("--rows", type=int, default=1, help="of a pass; default: 1")
    parser.add_argument("--context", type=int, default=256, help="tokens in front of each row; default: 256")
    options = parser.parse_args()
    from verispec.backends.cuda.device import Gpu
    from verispec.model.hub import cache_dir

    results = []
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool, Gpu(0, cache_dir() / "cuda").current():
        for name in options.names:
            results.append(measure(name, options.weights, options.rows, options.context, pool))
            (options.folder / "draft_forms.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

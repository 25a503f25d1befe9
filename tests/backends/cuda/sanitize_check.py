"""Every kernel on a GPU in small cases, for compute-sanitizer to watch. Needs torch, numpy and the package.

python -m tests.backends.cuda.sanitize_check [alone] [SECTION ...] takes seconds by itself, and prints what differs,
which must be 0 except in the controls. It fails if a kernel of the sources that a section is for was not launched. With
`alone` no block of attention reads another one's shared memory, which tells whether a race is about that.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tests.backends.cuda import backend_check, chains_check, draw_check, lookup_check, trees_check, weighing_check
from tests.backends.cuda.backend_check import FAILED, PROMPT, make, report
from tests.backends.cuda.draw_reference import parameters_of
from tests.support.passes import RowsBuilder, Tape
from verispec.backends.cuda import compiler
from verispec.backends.protocol import Noise, NoisyTopKWanted, Pass, PassKind, Wanted
from verispec.sampling.noise import gumbel_f32
from verispec.sampling.rows import SampleKey, Sampler
from verispec.spec.speculation import Speculation
from verispec.types import SamplingParams

ALONE = "alone"
LAUNCHED: set[str] = set()  # kernels, as SOURCE:NAME
SOURCES = Path(compiler.__file__).parent
LENS = tuple(range(1, 769, 9))  # so many rows that no two spans of one are in a cluster
GROUPS = ((3, 1, 64), (4, 2, 128))  # heads, K/V heads and their size, of which groups multiply by wgmma
SMALL = (1536, 12, 2, 128, 3072, 2048, 1e-6)  # every matrix has more than the 4 MB below which no product is a wide one


def kernels_of(sources: Iterable[str]) -> set[str]:
    """What can be launched of these sources."""
    found = {s: re.findall(r'extern "C" __global__ void .*?(\w+)\(const', (SOURCES / s).read_text()) for s in sources}
    return {f"{source}:{name}" for source, names in found.items() for name in names}


def watch_launches() -> None:
    """A kernel that is loaded is launched at once."""
    load = compiler.Modules.kernel

    def kernel(self, source, name, defines):
        LAUNCHED.add(f"{source}:{name}")
        return load(self, source, name, defines)

    compiler.Modules.kernel = kernel


# Kernels, called one by one


def check_attention(device) -> None:
    """Rows alone, in clusters, whole and in groups that are merged; heads of 32 to 256, windows and tails."""
    from tests.backends.cuda.device_check import check_whole_rows, check_windows

    for name in ("llama", "qwen2", "gemma3"):
        check_windows(name)
    for heads, kv_heads, head_dim in GROUPS:
        check_groups(heads, kv_heads, head_dim)
    for heads, kv_heads, head_dim in ((4, 4, 128), (9, 3, 64)):
        check_whole_rows(heads, kv_heads, head_dim, row_lens=LENS, tail_lens=(0, 5), context_len=768)


def check_groups(heads: int, kv_heads: int, head_dim: int) -> None:
    """Rows of a prompt in groups, which are whole or merged, against the same rows one by one."""
    import torch

    from tests.backends.cuda.device_check import compare, decode_rows, device_inputs, tiny_groups
    from verispec.backends.cuda import kernels
    from verispec.backends.cuda.shapes import SPAN, Shapes

    count, start, context_len, width = 75, 450, 768, heads * head_dim
    shapes = Shapes(width, heads, kv_heads, head_dim, width, 256, 1e-5)
    launch, spans = kernels.Kernels(shapes), context_len // SPAN
    b = kernels.Buffers.of(shapes, count, count * spans, "cuda")
    table = np.random.default_rng(1).permutation(context_len)[None] + 2
    size = (context_len + 2, kv_heads, head_dim)
    k, v = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    b.q.copy_(torch.randn(b.q.shape, device="cuda") * 2)
    every = np.zeros(count, np.int64)
    rows = decode_rows(np.arange(start + 1, start + count + 1), every, every, table)
    inputs = device_inputs(rows, torch.tensor(table, dtype=torch.int32, device="cuda"))
    usual, how = kernels.WHOLE_GROUPS_PER_SM, {"first_row": 0, "rows": count, "spans": spans}
    for window in (1 << 30, 100):
        launch.attend_rows(k, v, inputs, b, window=window, **how)
        expected = b.attention.clone()
        for most in (launch.rows_per_group, 7):
            groups = tiny_groups(rows, most)
            for per_sm in (1, 0):
                kernels.WHOLE_GROUPS_PER_SM = per_sm
                b.attention.fill_(float("nan"))
                launch.attend_groups(k, v, inputs, b, groups, window=window, **how)
                compare(f"groups of {most} by {per_sm}, heads of {head_dim}, window {window}", b.attention, expected)
        compare(f"groups, heads of {head_dim}: control", b.attention.roll(1, 0), expected, control=True)
    kernels.WHOLE_GROUPS_PER_SM = usual


def check_passes(device) -> None:
    """Products of few rows and of many, and what stands around them: biases, norms of q and k, norms behind layers."""
    from tests.backends.cuda.device_check import CALLS, check_tiny

    for name in ("llama", "qwen2", "qwen3", "gemma3"):
        check_tiny(name, {}, CALLS[:2])


def check_wide(device) -> None:
    """Passes of 5, 12 and 40 rows by our products, which are wide from 9 rows on, and by the library's."""
    import torch

    from tests.backends.cuda.device_check import compare, decode_rows, device_inputs, random_model
    from verispec.backends.cuda.forward import Plan
    from verispec.backends.cuda.kernels import ALL_FEW, ALL_MANY, undivided_products

    sequences, context_len = 40, 512
    model = random_model("small", layers=2, max_rows=sequences, sequences=sequences, context_len=context_len)
    table = np.random.default_rng(0).permutation(sequences * context_len).reshape(sequences, context_len) + 2
    device_table = torch.tensor(table, dtype=torch.int32, device="cuda")
    for rows in (5, 12, 40):
        lens, every = np.random.default_rng(rows).integers(3, 500, rows), np.arange(rows)
        inputs = device_inputs(decode_rows(lens, every + 100, every, table), device_table)
        plan = Plan(rows=rows, forms=ALL_FEW, single_rows=rows, spans=2)
        with undivided_products():
            few = model.forward(inputs, plan).clone()
            many = model.forward(inputs, plan._replace(forms=ALL_MANY)).clone()
        compare(f"passes of {rows} rows by both forms", few, many)
        compare(f"control: other rows of {rows}", few.roll(1, 0), many, control=True)


def check_large(device) -> None:
    """Passes of so many rows that our products of many rows serve q/k/v, or output and down, and the library's."""
    import torch

    from tests.backends.cuda.device_check import compare, decode_rows, device_inputs, random_model
    from verispec.backends.cuda.forward import Plan
    from verispec.backends.cuda.kernels import ALL_MANY, undivided_products

    sequences, context_len = 1280, 32
    model = random_model("small", layers=1, max_rows=sequences, sequences=sequences, context_len=context_len)
    table = np.random.default_rng(0).permutation(sequences * context_len).reshape(sequences, context_len) + 2
    device_table = torch.tensor(table, dtype=torch.int32, device="cuda")
    for rows in (1024, sequences):
        lens, every = np.random.default_rng(rows).integers(3, context_len, rows), np.arange(rows)
        inputs = device_inputs(decode_rows(lens, every + 100, every, table), device_table)
        plan, found = Plan(rows=rows, forms=ALL_MANY, single_rows=rows, spans=1), []
        with undivided_products():
            for model.kernels.own_large in (True, False):
                found.append(model.forward(inputs, plan).clone())
        compare(f"passes of {rows} rows by large.cu and by the library", *found)
        compare(f"control: other rows of {rows}", found[0].roll(1, 0), found[1], control=True)


def check_quantized(device) -> None:
    from tests.backends.cuda import quantized_check

    quantized_check.check_pass("small")


def check_draws(device) -> None:
    """Draws with and without filters, children, shares; noise; and rows that the host does not see."""
    import torch

    with np.errstate(all="ignore"):
        report("draws and children", 288, draw_check.check_draws(device.draws, device.name, (320, 5000)))
    kernels, words = device.draws(320, 8), 1000
    expected = torch.from_numpy(gumbel_f32(np, np.arange(words)))
    report("noise", words, int((kernels.noise(0, words).cpu() != expected).sum()))
    check_advance(kernels, device.name)


def check_advance(kernels, where: str) -> None:
    """Drawn tokens become the next rows, at the slots of the positions behind."""
    import torch

    from verispec.backends.cuda.kernels import RowInputs

    rows, table = 8, torch.arange(8 * 16, dtype=torch.int32, device=where).view(8, 16) + 2
    every = torch.arange(rows, dtype=torch.int32, device=where)
    names = ("token_ids", "positions", "slots", "prefix_lens", "ready_lens")
    inputs = RowInputs(
        **{name: every.clone() for name in names}, seq_rows=every, tails=torch.zeros_like(table), table=table
    )  # fmt: skip
    draws = draw_check.device_parameters(parameters_of(np.random.default_rng(1), rows), where)
    kernels.token_ids[:rows] = every + 40
    kernels.advance(inputs, draws, rows)
    different = (inputs.token_ids != every + 40) | (inputs.slots != table[every.long(), every.long() + 1])
    report("rows that go on by themselves", rows, int(different.sum()))


def check_weighing(device) -> None:
    with np.errstate(all="ignore"):
        report("distributions that are kept", 6, weighing_check.check_shares(device.draws, device.name, (320, 5000)))
        weighing_check.check_kernel(device.steps(), device.name, vocabs=(320,), num_cases=3)


# Passes and rounds of the backend


class Replay(NamedTuple):
    replay: Callable[[], None]


class Eager:
    """A device that captures nothing: what would be a graph runs as it is, whenever it is replayed. Each tensor can
    then have an allocation of its own."""

    def __init__(self, device) -> None:
        self._device = device

    def __getattr__(self, name: str) -> object:
        return getattr(self._device, name)

    def capture(self, work: Callable[[], object]) -> Replay:
        def run() -> None:
            with self._device.exact_products():
                work()

        run()
        return Replay(run)


def check_rounds(device) -> None:
    """Draws, masks, poison; children; chains of a view and of a second model, look-ups, trees; by both rules."""
    backend_check.check_draws("llama", device)
    backend_check.check_masks("llama", device)
    backend_check.check_not_finite("qwen2", device)
    check_children(device)
    every = list(range(len(chains_check.LENGTHS)))
    for drafter, (label, which) in product(("skip", "model", "lookup"), chains_check.WAYS.items()):

        def started(drafter: str = drafter, which: list[int] = which) -> chains_check.Drafted:
            backend = make("llama", device)
            if drafter == "lookup":
                return lookup_check.LookedUp(backend, which)
            return chains_check.Drafted(backend, which, drafter)

        at_once, one_by_one = started().rounds(every, 3), started().round_by_round(3)
        different, total = chains_check.differing(at_once, one_by_one), sum(map(len, at_once))
        report(f"{drafter}, 3 rounds {label}, at once and one by one", total, different)
    trees_check.check_trees(
        device, trees=("branch:2,2", "beam:2,1"), drafters=("model",), max_tokens=10, num_requests=3
    )
    check_beside_prompts(device)


def check_beside_prompts(device) -> None:
    """Drafts that are verified in passes that read the prompts of others; they change nothing."""
    found = []
    for method, tree in (("none", None), ("skip", None), ("model", "branch:2,2")):
        asked = trees_check.requests(Speculation.of(method, tree=tree), seed=1, max_tokens=10)
        engine = trees_check.engine_of(make("llama", device), max_burst=4, row_budget=16)
        found.append([told.digest for told in trees_check.told(engine, asked)])
    for digests in found[1:]:
        different = sum(a != b for a, b in zip(digests, found[0], strict=True))
        report("drafts verified beside prompts", len(digests), different)


def check_children(device) -> None:
    """A level of a tree, which the host asks for; of the device and of the host."""
    backend = make("llama", device, models=1)
    tape, rows = Tape(backend, seq_row=1, first_slot=0), RowsBuilder()
    backend.bind(1, Sampler(SamplingParams(temperature=1.0, top_k=9), SampleKey(7, 0)))
    added, update = tape.add_prompt_rows(rows, PROMPT[:10])
    at = np.array(added, np.int32)
    for noise in (None, Noise(np.arange(len(at)) + 9, np.full(len(at), 2 + 256))):
        pass_ = Pass(PassKind.CANONICAL, rows.build(16), Wanted(noisy_top_k=NoisyTopKWanted(at, 4, noise)), update, 16)
        here = backend.submit(pass_).result().noisy_top_k
        there = trees_check.hosted(make("llama", device, models=1))
        there.bind(1, Sampler(SamplingParams(temperature=1.0, top_k=9), SampleKey(7, 0)))
        expected = there.submit(pass_).result().noisy_top_k
        report("children of device and host", len(at), int((here.token_ids != expected.token_ids).any(1).sum()))


class Section(NamedTuple):
    run: Callable[[object], None]
    sources: tuple[str, ...]  # all of whose kernels are launched, by it or by another one that runs too


SECTIONS = {
    "attention": Section(check_attention, ("attention.cu",)),
    "passes": Section(check_passes, ("rows.cu", "linear.cu")),
    "wide": Section(check_wide, ("wide.cu",)),
    "large": Section(check_large, ("large.cu",)),
    "quantized": Section(check_quantized, ("quantized.cu",)),
    "draws": Section(check_draws, ("draw.cu", "filter.cu")),
    "weighing": Section(check_weighing, ("weighing.cu",)),
    "rounds": Section(lambda device: check_rounds(Eager(device)), ("steps.cu", "chains.cu", "trees.cu", "edits.cu")),
    "graphs": Section(check_rounds, ()),  # the same, captured
}


def check(names: Iterable[str], device, launched: set[str]) -> None:
    """Run these sections; `launched` is what somebody fills with the kernels that are, by whichever section."""
    names = list(names)
    for name in names:
        begin = time.perf_counter()
        SECTIONS[name].run(device)
        print(f"{name}: {time.perf_counter() - begin:.1f} s", flush=True)
    for name in names:
        wanted = kernels_of(SECTIONS[name].sources)
        missing = sorted(wanted - launched)
        report(" ".join((f"{name}: kernels that were not launched", *missing)), len(wanted), len(missing))


def main() -> None:
    import torch

    from tests.backends.cuda import device_check
    from verispec.backends.cuda import kernels
    from verispec.backends.cuda.device import Gpu
    from verispec.backends.cuda.shapes import Shapes
    from verispec.model.hub import cache_dir

    device_check.SHAPES["small"] = (Shapes(*SMALL), 2)
    watch_launches()
    names = [name for name in sys.argv[1:] if name != ALONE]
    if ALONE in sys.argv[1:]:
        kernels._MAX_CLUSTER = 1
    device = Gpu(0, cache_dir() / "cuda")
    with device.current():
        check(names or SECTIONS, device, LAUNCHED)
        torch.cuda.synchronize()
    if "graphs" in (names or SECTIONS):
        made = device.num_branches
        report("control: conditional nodes of captured chains", made, made, control=True)
    wrong = [r["check"] for r in device_check.RESULTS if (r["different"] == 0) == r["control"]]
    bad = [*FAILED, *map(str, wrong)]
    print(f"{len(LAUNCHED)} kernels,", "FAILED: " + "; ".join(bad) if bad else "all equal")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()

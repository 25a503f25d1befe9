"""Attention of single rows, its source run on a CPU: one block for all spans of a row against one for each of them."""

from dataclasses import dataclass

import pytest

torch = pytest.importorskip("torch")

from tests.support import cuda_emulated  # noqa: E402
from verispec.backends.cuda.arguments import filled  # noqa: E402
from verispec.backends.cuda.kernels import AttentionArgs  # noqa: E402
from verispec.backends.cuda.shapes import SPAN  # noqa: E402

pytestmark = pytest.mark.cuda

FAR = 1 << 30  # a window that hides nothing
WRITTEN_LATE = 0x0D81  # kWrittenLate of cuda_on_cpu.h
VALUES = "void load_values(unsigned* v, unsigned values, int first, int column, int lane)"
TRANSPOSED = "emulated::load_transposed(v, emulated::dynamic_memory, values + v_offset(first + lane, column));"
CHANGES = (
    *(cuda_emulated.dynamic_memory(align) for align in (128, 1024)),
    *cuda_emulated.bodies(cuda_emulated.GPU_ONLY | cuda_emulated.OF_CLUSTERS | {VALUES: TRANSPOSED}),
)


@dataclass
class Rows:
    """Decode rows of contexts in scattered slots of random K and V, with the last `tail` positions in tails."""

    heads: int
    kv_heads: int
    head_dim: int
    lens: list[int]
    tail: int = 0
    behind: int = 1  # how many positions of a context are written by the kernel in front

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(sum(self.lens) + self.heads)
        count, longest, most_tail = len(self.lens), max(self.lens), max(1, self.tail)
        size = (count * longest + 1, self.kv_heads, self.head_dim)
        self.q = torch.randn(count, self.heads, self.head_dim, generator=generator).bfloat16() * 2
        self.k, self.v = (torch.randn(size, generator=generator).bfloat16() for _ in range(2))
        slots = torch.randperm(count * longest, generator=generator).view(count, longest).int() + 1
        lens = torch.tensor(self.lens, dtype=torch.int32)
        prefix = (lens - self.tail).clamp(min=0)
        ready = (lens - self.behind).clamp(min=0)
        table, tails = slots.clone(), torch.zeros(count, most_tail, dtype=torch.int32)
        for i, length in enumerate(self.lens):
            tails[i, : length - prefix[i]] = slots[i, prefix[i] : length]
            table[i, prefix[i] :] = 1 << 20  # nobody may look there
            late = slots[i, ready[i] : length].long()
            for store in (self.k, self.v):
                store.view(torch.int16)[late, :, ::8] = WRITTEN_LATE
        self.slots, self.partial = slots, torch.zeros(count * 32 * self.heads * (self.head_dim + 2))
        self.inputs = {
            "table": table, "positions": lens - 1, "prefix_lens": prefix, "ready_lens": ready, "tails": tails,
            "seq_rows": torch.arange(count, dtype=torch.int32), "partial": self.partial,
            "arrived": torch.zeros(count, self.kv_heads, dtype=torch.int32),
        }  # fmt: skip

    def attended(
        self, name: str, *, window: int = FAR, late: bool = False, backwards: bool = False, stages: int = 3,
        warps: int = 8, apart: bool = False, two_buffers: bool = False, span: int = SPAN,
        cluster: bool = False, changes: tuple[tuple[str, str], ...] = (),
    ) -> torch.Tensor:  # fmt: skip
        """What one of the kernels gives. [rows, heads, head_dim] bf16"""
        out = torch.zeros_like(self.q)
        spans, rows = -(-max(self.lens) // span), len(self.lens)
        args = filled(
            AttentionArgs(), q=self.q, k_store=self.k, v_store=self.v, out=out, **self.inputs, first_row=0, spans=spans,
            table_width=self.inputs["table"].shape[1], tail_width=self.inputs["tails"].shape[1], window=window,
            scale=1.4427 * self.head_dim**-0.5,
        )  # fmt: skip
        defines = {"HEADS": self.heads, "KV_HEADS": self.kv_heads, "HEAD_DIM": self.head_dim, "WHOLE": 0}
        defines |= {"CLUSTER": int(cluster), "TWO_BUFFERS": int(two_buffers), "STAGES": stages, "SPAN": span}
        defines |= {"LATE_COPIES": "true" if late else "false"}
        grid = (spans, self.kv_heads, rows) if name == "attention_rows" else (self.kv_heads, rows, 1)
        cuda_emulated.launch(
            "attention.cu", name, args, grid=grid, threads=256 if name == "attention_rows" else 32 * warps,
            defines=tuple(f"{k}={v}" for k, v in defines.items()), backwards=backwards, apart=apart,
            changes=(*CHANGES, ("kWholeWarps = HEAD_DIM > 64 ? 8 : 4", f"kWholeWarps = {warps}"), *changes),
            together=cluster,
        )  # fmt: skip
        return out

    def nearly(self, window: int) -> torch.Tensor:
        """The same by float64."""
        found = []
        for i, length in enumerate(self.lens):
            seen = self.slots[i, max(0, length - window) : length].long()
            k, v = (x[seen].double().repeat_interleave(self.heads // self.kv_heads, 1) for x in (self.k, self.v))
            weights = torch.softmax(torch.einsum("hd,jhd->hj", self.q[i].double(), k) * self.head_dim**-0.5, 1)
            found.append(torch.einsum("hj,jhd->hd", weights, v))
        return torch.stack(found)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int16)


ROWS = {
    "8b": Rows(8, 2, 128, [1, 63, 64, 65, 200, 257, 500, 640]),
    "smol": Rows(9, 3, 64, [2, 128, 255, 256, 300, 1029]),
    "alone": Rows(2, 2, 128, [40, 321, 513], tail=5, behind=3),
    "seven": Rows(7, 1, 64, [90, 449, 700], tail=70, behind=70),
    "nine": Rows(18, 2, 64, [1, 65, 321, 640], tail=3),
    "wide": Rows(4, 1, 256, [31, 260, 400]),
    "long": Rows(4, 1, 128, [1999], behind=2000),
    "odd": Rows(6, 2, 80, [77, 300], tail=2),
}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("backwards", "apart"), [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize("name", ROWS)
def test_one_block_for_a_row_gives_the_bits_of_one_for_each_span(
    name: str, backwards: bool, apart: bool, late: bool
) -> None:
    rows = ROWS[name]
    fits_twice = rows.head_dim < 256
    wanted = rows.attended("attention_rows", late=late, backwards=not backwards, two_buffers=backwards and fits_twice)
    got = rows.attended("attention_whole", late=late, backwards=backwards, apart=apart)
    assert torch.equal(bits(got), bits(wanted))
    assert (wanted.double() - rows.nearly(FAR)).abs().max() < 0.03


CLUSTERED = [
    ("8b", 64, FAR), ("8b", 128, 90), ("smol", 256, FAR), ("smol", 256, 300), ("alone", 128, FAR), ("seven", 128, 400),
    ("nine", 64, 130), ("odd", 64, FAR),
]  # fmt: skip


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize(("name", "span", "window"), CLUSTERED)
def test_blocks_that_merge_their_spans_together_have_the_bits_of_those_that_do_not(
    name: str, span: int, window: int, backwards: bool
) -> None:
    rows = ROWS[name]
    some = Rows(
        rows.heads, rows.kv_heads, rows.head_dim, [n for n in rows.lens if n <= 8 * span], rows.tail, rows.behind
    )
    wanted = some.attended("attention_rows", window=window, span=span, two_buffers=True)
    how = {"late": backwards, "backwards": backwards, "apart": backwards}
    got = some.attended("attention_rows", window=window, span=span, two_buffers=True, cluster=True, **how)
    assert torch.equal(bits(got), bits(wanted))


OF_CLUSTERS = {
    "who is not there yet": ("if (CLUSTER) meet_cluster();", ""),
    "what is not there yet": ("  meet_cluster();\n  for (int turn", "  for (int turn"),
    "outputs of others": ("block -= num_blocks) ++turn;", "block -= num_blocks) turn += 2;"),
    "states of others": ("block = first_span + t; block < spans;", "block = first_span + t; block < spans - 1;"),
    "outputs of few blocks": ("turns((kTurns + num_blocks - 1) / num_blocks)", "turns(1)"),
}


@pytest.mark.parametrize("fault", OF_CLUSTERS)
def test_faults_in_clusters_are_noticed(fault: str) -> None:
    rows = Rows(18, 2, 64, [400])  # two blocks, one of which merges twice
    wanted = rows.attended("attention_rows", two_buffers=True)
    found = [
        rows.attended("attention_rows", two_buffers=True, cluster=True, backwards=b, changes=(OF_CLUSTERS[fault],))
        for b in (False, True)
    ]
    assert not all(torch.equal(bits(each), bits(wanted)) for each in found)


@pytest.mark.parametrize("window", [1, 30, 64, 100, 256, 257, 330])
def test_windows(window: int) -> None:
    for name in ("8b", "nine"):
        wanted = ROWS[name].attended("attention_rows", window=window)
        assert torch.equal(bits(ROWS[name].attended("attention_whole", window=window)), bits(wanted))
        assert (wanted.double() - ROWS[name].nearly(window)).abs().max() < 0.03


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("stages", "warps"), [(2, 8), (6, 8), (2, 4), (3, 4), (4, 2)])
def test_any_ring_and_number_of_warps_will_do(stages: int, warps: int, late: bool) -> None:
    for name in ("8b", "smol", "nine"):
        wanted = ROWS[name].attended("attention_rows")
        got = ROWS[name].attended("attention_whole", stages=stages, warps=warps, late=late, apart=True)
        assert torch.equal(bits(got), bits(wanted))


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("span", [64, 128])
@pytest.mark.parametrize("name", ["8b", "smol", "alone", "seven", "nine"])
def test_drafts_may_have_shorter_spans(name: str, span: int, late: bool) -> None:
    """Which are other bits, and as near."""
    rows = ROWS[name]
    for window in (FAR, 100):
        found = rows.attended("attention_rows", window=window, span=span, late=late, two_buffers=True, backwards=late)
        assert (found.double() - rows.nearly(window)).abs().max() < 0.03
    assert not torch.equal(bits(found), bits(rows.attended("attention_rows")))


def test_rows_that_are_no_numbers_leave_the_others_alone() -> None:
    plain = Rows(8, 2, 128, [64, 300, 700])
    wanted = plain.attended("attention_rows")
    plain.q[1, 3] = float("nan")
    plain.q[2, 0] = float("inf")
    rows, whole = (plain.attended(name) for name in ("attention_rows", "attention_whole"))
    assert torch.equal(bits(rows), bits(whole))
    assert whole[[1, 2], [3, 0]].isnan().all()
    assert torch.equal(bits(whole[:, 4:]), bits(wanted[:, 4:]))
    assert torch.equal(bits(whole[0]), bits(wanted[0]))

"""All layers of a pass of drafts as one kernel, its source run on a CPU: against the same layers by torch."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from itertools import product

import pytest

torch = pytest.importorskip("torch")

from tests.support import cuda_emulated, cuda_stand_in  # noqa: E402
from verispec.backends.cuda.bit_model import softmax_scale  # noqa: E402
from verispec.backends.cuda.kernels import Buffers, Layer, RowInputs  # noqa: E402
from verispec.backends.cuda.product_forms import MAX_BLOCK_NBYTES  # noqa: E402
from verispec.backends.cuda.quantize import Quantized, eight_bits, quantized  # noqa: E402
from verispec.backends.cuda.shapes import NO_WINDOW, Shapes  # noqa: E402
from verispec.backends.cuda.streamed import (  # noqa: E402
    MAX_STREAMED_ROWS,
    Streamed,
    is_served,
    pass_args,
    streamed_defines,
    streamed_form,
)

pytestmark = pytest.mark.cuda

# Products of numbers of 8 bits, barriers, the copy engine, and words that other blocks wait for.
OF_BLOCKS = cuda_emulated.OF_BYTES | {
    "void meet(int barrier, int threads)": "emulated::meet(barrier, threads);",
    "void put_word(uint64* to, unsigned value, unsigned epoch)": (
        "emulated::put_word(reinterpret_cast<uint64_t*>(to), static_cast<uint64>(epoch) << 32 | value);"
    ),
    "Pair load_pair(const uint64* from)": "return *reinterpret_cast<const Pair*>(from);",
    "void give_way()": "emulated::give_way();",
    "void start_barrier(uint64* barrier, int count)": "emulated::start_barrier(barrier, count);",
    "void arrive(uint64* barrier)": "emulated::count_at(barrier, 1, 0);",
    "void expect(uint64* barrier, int nbytes)": "emulated::count_at(barrier, 1, nbytes);",
    "void wait_for(uint64* barrier, int phase)": "emulated::wait_for(barrier, phase); return;",
    "void copy_bytes_once(unsigned to, const void* from, int nbytes, uint64* barrier, uint64 policy)": (
        "emulated::copy_bytes<LATE_COPIES>(emulated::dynamic_memory + to, from, nbytes, barrier);"
    ),
}
CHANGES = (
    cuda_emulated.dynamic_memory(128),
    *cuda_emulated.bodies({k: v for k, v in (cuda_emulated.GPU_ONLY | OF_BLOCKS).items() if "copy16(" not in k}),
)
# Rounding to 8 bits goes another way where a sum was rounded another way: of one layer, and of all.
NEAR, FAR = {"int4": 0.03, "int8": 0.03, "fp8": 0.06}, {"int4": 0.06, "int8": 0.06, "fp8": 0.12}
SMALL = Shapes(128, 4, 2, 64, 192, 256, 1e-5)
LARGE_HEADS = Shapes(192, 3, 1, 128, 320, 256, 1e-5)
MANY_HEADS = Shapes(576, 9, 1, 64, 128, 256, 1e-5)
SERVED = (
    (Shapes(576, 9, 3, 64, 1536, 49152, 1e-5), 30),
    (Shapes(896, 14, 2, 64, 4864, 151936, 1e-6), 24),
    (Shapes(1536, 12, 2, 128, 8960, 151936, 1e-6), 28),
    (Shapes(2048, 32, 8, 64, 8192, 128256, 1e-5), 16),
    (Shapes(4096, 32, 8, 128, 14336, 128256, 1e-5), 32),
)


@dataclass
class Case:
    """A model of random weights and rows of several sequences, whose contexts lie in scattered slots."""

    shapes: Shapes
    kind: str
    lens: tuple[int, ...]
    tail: int = 0
    num_layers: int = 3
    warps: int = 3
    enders: int = 2
    blocks: int = 3
    biases: bool = False

    def __post_init__(self) -> None:
        s, generator = self.shapes, torch.Generator().manual_seed(sum(self.lens))
        rows, longest = len(self.lens), max(self.lens)

        def random(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator)

        def matrix(outputs: int, columns: int) -> Quantized:
            return quantized((random(outputs, columns) * columns**-0.5).bfloat16(), self.kind)

        angles = random(longest, s.head_dim // 2)
        size = (rows * longest + 2, s.kv_heads, s.head_dim)
        self.k, self.v = (random(self.num_layers, *size).bfloat16() for _ in range(2))
        self.layers = [
            Layer(
                attn_gain=random(s.width), qkv=matrix(s.qkv, s.width),
                qkv_bias=random(s.qkv) if self.biases else None, q_gain=None, k_gain=None, cos=angles.cos(),
                sin=angles.sin(), window=40 if i == 1 else NO_WINDOW, o=matrix(s.width, s.attention),
                attn_post_gain=None, mlp_gain=random(s.width) + 1, gate_up=matrix(2 * s.mlp, s.width),
                down=matrix(s.width, s.mlp), mlp_post_gain=None,
            )
            for i in range(self.num_layers)
        ]  # fmt: skip
        self.final_gain = random(s.width) + 1
        lens = torch.tensor(self.lens, dtype=torch.int32)
        slots = torch.randperm(rows * longest, generator=generator).view(rows, longest).int() + 2
        prefix = (lens - self.tail).clamp(min=0)
        table, tails = slots.clone(), torch.zeros(rows, max(1, self.tail), dtype=torch.int32)
        for i, length in enumerate(self.lens):
            tails[i, : length - prefix[i]] = slots[i, prefix[i] : length]
            table[i, prefix[i] :] = 1 << 20  # nobody may look there
            new = slots[i, length - 1].long()
            self.k[:, new], self.v[:, new] = 500, 500  # the pass writes it
        self.inputs = RowInputs(
            token_ids=lens, positions=lens - 1, slots=slots[torch.arange(rows), (lens - 1).long()],
            seq_rows=torch.arange(rows, dtype=torch.int32), prefix_lens=prefix, ready_lens=lens - 1, tails=tails,
            table=table,
        )  # fmt: skip
        self.x = (random(rows, s.width) * 0.5).bfloat16()

    def buffers(self) -> Buffers:
        b = Buffers.of(self.shapes, len(self.lens), len(self.lens) * 4, "cpu")
        cuda_stand_in.StandInKernels(self.shapes)._keep(self.x, self.layers[0].attn_gain, b, len(self.lens))
        return b

    def streamed(
        self, *, behind: Case | None = None, busy: int | None = None, backwards: bool = False, late: bool = False,
        apart: bool = False, changes: tuple[tuple[str, str], ...] = (),
    ) -> tuple[Buffers, torch.Tensor, torch.Tensor]:  # fmt: skip
        """What the kernel leaves: buffers, K and V. `behind` is a pass in front of it, of the same rows by their x."""
        k, v, rows = self.k.clone(), self.v.clone(), len(self.lens)
        model = Streamed.of(self.layers, self.final_gain, k, v, self.shapes)
        form = streamed_form(
            self.shapes,
            model.matrix.bits,
            rows,
            self.num_layers,
            self.blocks,
            warps=self.warps,
            enders=self.enders,
            attending=2,
        )
        assert form is not None
        defines = streamed_defines(self.shapes, model, form._replace(stages=min(form.stages, 5)))
        named = (*(f"{name}={value}" for name, value in defines.items()), f"LATE_COPIES={str(late).lower()}")
        word = None if busy is None else torch.tensor([busy], dtype=torch.int32)
        passes = [self] if behind is None else [behind, self]
        for each in passes:
            b = each.buffers()
            args: ctypes.Structure = pass_args(
                model, self.shapes, self.inputs, b, rows, busy=word, scale=float(softmax_scale(self.shapes.head_dim))
            )
            cuda_emulated.launch(
                "streamed.cu", "streamed", args, grid=(self.blocks, 1, 1), threads=form.threads, defines=named,
                changes=(*CHANGES, *changes), backwards=backwards, together=True, apart=apart,
            )  # fmt: skip
        assert changes or int(model.num_done) == (0 if busy == 0 else len(passes) * self.num_layers)
        return b, k, v

    def by_torch(self, monkeypatch: pytest.MonkeyPatch) -> tuple[Buffers, torch.Tensor, torch.Tensor]:
        """The same, layer by layer, of rows that are rounded to 8 bits before each product."""

        def of_eight_bits(x: torch.Tensor, w: Quantized) -> torch.Tensor:
            return (eight_bits(x, w.kind).double() @ w.dense().double().T).float()

        monkeypatch.setattr(cuda_stand_in, "product", of_eight_bits)
        kernels, b, rows = cuda_stand_in.StandInKernels(self.shapes), self.buffers(), len(self.lens)
        k, v = self.k.clone(), self.v.clone()
        gains = [*(layer.attn_gain for layer in self.layers[1:]), self.final_gain]
        for i, (layer, following) in enumerate(zip(self.layers, gains, strict=True)):
            kernels.qkv(layer, k[i], v[i], self.inputs, b, rows, many=False)
            kernels.attend_rows(k[i], v[i], self.inputs, b, first_row=0, rows=rows, spans=99, window=layer.window)
            kernels.residual(b.attention, layer.o, layer.mlp_gain, b, rows, many=False)
            kernels.gate_up(layer, b, rows, many=False)
            kernels.residual(b.h, layer.down, following, b, rows, many=False)
        return b, k, v


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Of the worst row; infinite where one is no number."""
    got, wanted = got.double().flatten(1), wanted.double().flatten(1)
    each = (got - wanted).norm(dim=1) / wanted.norm(dim=1)
    return float(each.nan_to_num(torch.inf).max())


def worst(found, wanted) -> float:
    names = ("x", "scaled", "nodes")
    (b, *stores), (by_torch, *wanted_stores) = found, wanted
    return max(
        *(error(getattr(b, name), getattr(by_torch, name)) for name in names),
        *(error(a.flatten(0, 1), w.flatten(0, 1)) for a, w in zip(stores, wanted_stores, strict=True)),
    )


CASES = {
    "one row": Case(SMALL, "int4", (130,), blocks=20),  # and three spans
    "one row alone": Case(SMALL, "int4", (1,), blocks=30),
    "biases": Case(SMALL, "int8", (70, 3, 200), biases=True, enders=1),
    "tails": Case(LARGE_HEADS, "int4", (300, 45), tail=20, warps=2, blocks=5),
    "eight rows": Case(LARGE_HEADS, "int8", (1, 2, 16, 17, 128, 129, 260, 33), warps=4, blocks=5),
    "floats": Case(SMALL, "fp8", (90, 31), warps=2),
    "many heads": Case(MANY_HEADS, "int4", (77, 150), warps=5, num_layers=2),
    "gelu": Case(replace(SMALL, gelu=True), "int4", (40,)),
}


@pytest.mark.parametrize("name", CASES)
def test_it_gives_what_the_layers_give_one_by_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    assert is_served(case.shapes)
    assert worst(case.streamed(), case.by_torch(monkeypatch)) < FAR[case.kind]
    case = replace(case, num_layers=1)
    assert worst(case.streamed(), case.by_torch(monkeypatch)) < NEAR[case.kind]


def upside_down(case: Case) -> Case:
    """The same of other rows."""
    other = replace(case)
    other.x = case.x.flip(1)
    return other


def same(found, wanted) -> bool:
    (b, *stores), (other, *others) = found, wanted
    tensors = zip((b.x, b.scaled, b.nodes, *stores), (other.x, other.scaled, other.nodes, *others), strict=True)
    return all(torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)) for mine, theirs in tensors)


SEVERAL = Case(SMALL, "int4", (90, 3, 131), blocks=4, enders=2)
# Mistakes: what stands in the source, what is run instead, and how. They are noticed by what is found, or because some
# wait for ever.
MISTAKES = {
    "nobody waits": ("    if (all) break;", "    break;", {"backwards": True}),
    "rows of this pass are not seen": ("if (visible != 0) add_new", "if (false) add_new", {}),
    "spans are not merged": ("from[3 * s] != nullptr ? weight", "s == 0 && begin == 0 ? weight", {"blocks": 25}),
    "sums of one warp": ("for (int p = 1; p < WARPS; ++p) {", "for (int p = 1; p < 1; ++p) {", {}),
    "sums are overwritten": (
        "if (filled >> place & 1) wait_for(s.read + place, ~odd >> place & 1);",
        "",
        {"apart": True},
    ),
    "stages are overwritten": ("if (count >= STAGES) wait_for(s.empty + turn.stage, turn.phase ^ 1);", "", {}),
    "nobody reads sums": ("if (lane == 0) arrive(s.read + ender);", "", {}),
    "nobody empties stages": ("if (lane == 0) arrive(s.empty + turn.stage);", "", {}),
}


@pytest.mark.parametrize("how", ["backwards", "late", "apart", "backwards late", "apart late"])
def test_whoever_comes_first_changes_no_bit(how: str) -> None:
    """Threads, warps, blocks and copies in other orders; blocks wait for each other's words."""
    assert same(SEVERAL.streamed(), SEVERAL.streamed(**dict.fromkeys(how.split(), True)))


@pytest.mark.parametrize("blocks", [1, 2, 7, 11])
def test_the_number_of_blocks_changes_no_bit(blocks: int) -> None:
    """Also where some have no tile of a matrix; unless they are so many that contexts are cut into spans."""
    assert same(SEVERAL.streamed(), replace(SEVERAL, blocks=blocks).streamed())


def test_words_of_earlier_passes_are_not_read() -> None:
    other = upside_down(SEVERAL)
    alone = other.streamed()
    assert not same(alone, SEVERAL.streamed())
    assert same(alone, other.streamed(behind=SEVERAL))
    one, other = replace(SEVERAL, num_layers=1), replace(other, num_layers=1)  # whose epochs would be the same again
    assert same(other.streamed(), other.streamed(behind=one))
    mistake = ("*a.num_done = before + a.num_layers;", "*a.num_done = before;")
    assert not same(other.streamed(), other.streamed(behind=one, backwards=True, changes=(mistake,)))


def test_a_pass_of_nobody_changes_nothing() -> None:
    b, k, v = SEVERAL.streamed(busy=0)
    assert same((b, k, v), (SEVERAL.buffers(), SEVERAL.k, SEVERAL.v))
    assert same(SEVERAL.streamed(busy=1), SEVERAL.streamed())


def test_what_is_no_number_is_told_and_stays_in_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """K and V of it are 0, since others read them."""
    case = replace(SEVERAL, num_layers=1)
    plain, (wanted, *_) = case.x.clone(), case.streamed()
    case.x[1, 5] = torch.nan
    b, k, v = case.streamed()
    case.x = plain
    assert b.not_finite[:3].tolist() == [0, 1, 0]
    assert k.isfinite().all()
    assert v.isfinite().all()
    assert b.x[1].isnan().any()
    for row in (0, 2):
        assert torch.equal(b.x[row], wanted.x[row])


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    old, new, how = MISTAKES[name]
    case = replace(SEVERAL, blocks=how.get("blocks", SEVERAL.blocks))
    how = {key: value for key, value in how.items() if key != "blocks"}
    wanted = case.by_torch(monkeypatch)
    assert worst(case.streamed(**how), wanted) < FAR["int4"]
    try:
        found = worst(case.streamed(**how, changes=((old, new),)), wanted)
    except cuda_emulated.StuckError:
        found = torch.inf
    assert found > FAR["int4"]


def test_forms_fit_into_a_block() -> None:
    """Of the models that it is for, and of as many rows as it serves; others are left to a kernel for each step."""
    for shapes, num_layers in SERVED:
        assert is_served(shapes)
        for rows, bits in product(range(1, MAX_STREAMED_ROWS + 1), (4, 8)):
            form = streamed_form(shapes, bits, rows, num_layers, 132)
            assert form is not None
            assert form.threads <= 512
            assert form.block_rows >= rows
            assert form.shared + form.warps * form.enders * 32 * 16 <= MAX_BLOCK_NBYTES
    assert not is_served(replace(SMALL, head_dim=256))
    assert not is_served(replace(SMALL, qk_norm=True))
    assert not is_served(replace(SMALL, post_norms=True))
    assert streamed_form(replace(SMALL, mlp=1 << 20), 4, 8, 2, 132) is None

"""The CUDA kernels compile without a GPU, and their PTX holds the operations that were written and no others."""

import re

import pytest

from verispec.backends.cuda.compiler import CompileError, compile_cubin, compile_ptx, compile_verbose, runtime_library

pytestmark = pytest.mark.cuda

MODEL = {"WIDTH": 576, "HEADS": 9, "KV_HEADS": 3, "HEAD_DIM": 64}
LINEAR = {"N": 960, "K": 576, "PARTS": 3, "TILES": 1, "STAGES": 4, **MODEL}
WIDE = {"K": 576, "STEP": 1, "STAGES": 4, **MODEL}
LARGE = {"K": 1152, "BLOCKS": 2, "GROUP": 4, "STAGES": 6, **MODEL}
DRAFTS = {"E4M3": 0, "WARPS": 9, "STAGES": 4, "STEP": 1, "LATE": 0, "ENDERS": 1, "AMONG": 2, **MODEL}
WHOLE = {"KIND": 1, "N": 576, "K": 1536, "BITS": 8, "BLOCK_ROWS": 8, **DRAFTS}
FLOATS = WHOLE | {"E4M3": 1}
MORE_ENDERS = {"KIND": 2, "N": 17920, "K": 1536, "BITS": 4, "BLOCK_ROWS": 1, **DRAFTS, "WARPS": 12, "ENDERS": 3}
ATTENTION = {**MODEL, "TWO_BUFFERS": 0, "CLUSTER": 0, "WHOLE": 0, "STAGES": 3, "SPAN": 256}
KINDS = [{"KIND": 0, "ROW_TILES": 1}, {"KIND": 1, "ROW_TILES": 2}, {"KIND": 2, "ROW_TILES": 4}]
KINDS += [{"KIND": 3, "ROW_TILES": 8}, {"KIND": 4, "ROW_TILES": 1}]
SOURCES = [
    *(("linear.cu", LINEAR | kind) for kind in KINDS),
    ("linear.cu", LINEAR | KINDS[2] | {"GELU": 1}),
    ("wide.cu", WIDE | {"KIND": 0, "N": 960, "PARTS": 3, "HALVES": 1, "TILES": 5}),
    ("wide.cu", WIDE | {"KIND": 1, "N": 576, "PARTS": 3, "HALVES": 2, "TILES": 1}),
    ("wide.cu", WIDE | {"KIND": 2, "N": 3072, "PARTS": 1, "HALVES": 2, "TILES": 9}),
    ("wide.cu", WIDE | {"KIND": 3, "N": 49152, "PARTS": 1, "HALVES": 1, "TILES": 8}),
    *(
        ("large.cu", LARGE | {"KIND": kind, "N": n, "PARTS": parts})
        for kind, n, parts in ((0, 960, 3), (1, 576, 2), (2, 3072, 1))
    ),
    ("large.cu", LARGE | {"KIND": 1, "N": 576, "K": 1536, "PARTS": 4}),
    *(("rows.cu", {**MODEL, "MLP": 1536, "PARTS": parts}) for parts in (1, 2, 3, 4)),
    *(("attention.cu", ATTENTION | {"HEAD_DIM": size, "TWO_BUFFERS": 1, "CLUSTER": 1}) for size in (64, 128)),
    *(("attention.cu", ATTENTION | {"TWO_BUFFERS": 1, "CLUSTER": 1, "SPAN": span}) for span in (64, 128)),
    *(("attention.cu", ATTENTION | {"HEAD_DIM": size, "WHOLE": 1}) for size in (64, 256)),
    *(("attention.cu", ATTENTION | {"HEADS": heads, "STAGES": stages}) for heads, stages in ((3, 2), (27, 6))),
    ("quantized.cu", {"KIND": 0, "N": 960, "K": 576, "BITS": 4, "BLOCK_ROWS": 1, **DRAFTS}),
    ("quantized.cu", MORE_ENDERS),
    ("quantized.cu", WHOLE),
    ("quantized.cu", FLOATS),
    ("draw.cu", {}),
    ("draw.cu", {"MASKED": 1}),
    ("filter.cu", {}),
    ("filter.cu", {"MASKED": 1}),
    ("steps.cu", {}),
    ("chains.cu", {}),
    ("trees.cu", {}),
    ("weighing.cu", {}),
    ("edits.cu", {}),
]


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_100"])
@pytest.mark.parametrize(("source", "defines"), SOURCES)
def test_ptx_has_no_approximations_and_only_k16_products(
    source: str, defines: dict[str, int], architecture: str
) -> None:
    ptx = compile_ptx(source, defines, architecture)
    assert f".target {architecture}" in ptx
    # The logarithms of a beam's times are the device's own; what it keeps is a hint.
    known = {"rcp.approx.ftz.f64"} if source == "trees.cu" else set()
    assert set(re.findall(r"\b\w+\.(?:approx|full|ftz)[.\w]*", ptx)) <= known
    size = "m16n8k32" if source == "quantized.cu" else "m16n8k16"  # drafts are products of 8 bits
    assert {m for m in re.findall(r"mma\.sync\.[.\w]*", ptx) if size not in m} == set()
    is_wide = architecture == "sm_90a" and source == "attention.cu" and defines["HEAD_DIM"] <= 128
    is_wide |= source in ("wide.cu", "large.cu")  # which only Hopper runs
    assert set(re.findall(r"m\d+n\d+(k\d+)\.f32", ptx)) <= {"k16"}
    assert ("wgmma" in ptx) is is_wide
    # Every float sum and product says how it rounds, so that nothing may be contracted.
    assert not re.findall(r"\b(?:add|sub|mul|fma)\.f32", ptx)


# One of each source, and what takes most registers: heads of 256, and products of floats, which Hopper makes in halves.
ASSEMBLED = [*{source: (source, defines) for source, defines in reversed(SOURCES)}.values()]
ASSEMBLED += [("attention.cu", ATTENTION | {"HEAD_DIM": 256, "WHOLE": 1})]
ASSEMBLED += [
    ("quantized.cu", MORE_ENDERS),
    ("quantized.cu", FLOATS),
    ("quantized.cu", FLOATS | {"KIND": 0, "STEP": 2}),
]
# Bytes that a kernel may spill; all others spill nothing. Those between passes run in one block.
SPILLED = {"begin_level": 64, "end_level": 512, "large": 512}
SPILLED_AT_256 = {"attention_groups": 2560}


def spilled(log: str) -> dict[str, int]:
    """Bytes that are stored for want of registers, by kernel."""
    found = re.findall(r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores", log, re.DOTALL)
    return {name: int(nbytes) for name, nbytes in found}


@pytest.mark.parametrize(("source", "defines"), ASSEMBLED)
def test_code_for_the_device_keeps_to_its_registers(source: str, defines: dict[str, int]) -> None:
    """Made without a device. Whoever spills waits for memory."""
    code, log = compile_verbose(source, defines)
    assert code[:4] == b"\x7fELF"
    limits, found = SPILLED | (SPILLED_AT_256 if defines.get("HEAD_DIM") == 256 else {}), spilled(log)
    assert found
    assert {name: nbytes for name, nbytes in found.items() if nbytes > limits.get(name, 0)} == {}


@pytest.mark.parametrize(("defines", "kind"), [(WHOLE, "s32.s8.s8.s32"), (FLOATS, "f32.e4m3.e4m3.f32")])
def test_weights_of_eight_bits_are_multiplied_as_what_they_are(defines: dict[str, int], kind: str) -> None:
    """And rows are rounded to the same."""
    ptx = compile_ptx("quantized.cu", defines, "sm_90a")
    assert set(re.findall(r"mma\.sync\.aligned\.m16n8k32\.row\.col\.([.\w]*)", ptx)) == {kind}
    assert ("cvt.rn.satfinite.e4m3x2.f32" in ptx) is (defines is FLOATS)


def test_registers_that_do_not_suffice_are_noticed() -> None:
    """The control: blocks of so many warps that two of them leave a thread too few."""
    assert spilled(compile_verbose("quantized.cu", WHOLE)[1]) == {"quantized": 0}
    assert spilled(compile_verbose("quantized.cu", WHOLE | {"WARPS": 24})[1])["quantized"] > 0


def test_code_for_a_later_device_is_made() -> None:
    assert compile_cubin(*SOURCES[0], "sm_100")[:4] == b"\x7fELF"


def test_what_does_not_compile_says_why() -> None:
    """In one sentence with the first reason; a traceback has them all."""
    with pytest.raises(CompileError, match=r"do not compile with NVRTC \d+\.\d+ \(.*KIND.*\): pip install") as found:
        compile_cubin("linear.cu", {})
    assert "\n" not in str(found.value)
    assert str(found.value.__notes__).count("error") > 1


def test_what_decides_in_a_graph_is_left_to_the_linker() -> None:
    """Its function is the device runtime's, whose library lies where it is looked for."""
    code = compile_cubin("branch.cu", {}, relocatable=True)
    assert b"decide" in code
    assert b"cudaGraphSetConditional" in code
    assert runtime_library() is not None

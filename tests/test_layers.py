"""Imports point one way only: types, config | kv, sampling, model | backends | spec | engine | llm, tuning, cli."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import verispec

ROOT = Path(verispec.__file__).parent
LAYERS = [
    {"arguments", "errors", "types", "config", "strict_json"},
    {"kv", "sampling", "model"},
    {"constraints"},
    {"backends"},
    {"spec"},
    {"engine"},
    {
        "async_llm",
        "batch",
        "llm",
        "ray",
        "server",
        "speculation",
        "receipt",
        "runtime",
        "text",
        "tuning",
        "cli",
        "__main__",
        "__init__",
    },
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
# Each heavy or optional package is imported only where it is needed.
HOMES = {
    "gguf": {"model"},
    "pyarrow": {"batch"},
    "huggingface_hub": {"model"},
    "tokenizers": {"model"},
    "jinja2": {"text"},
    "llguidance": {"constraints"},
    "starlette": {"server"},
    "uvicorn": {"server"},
    "msgspec": {"server", "ray"},
    "prometheus_client": {"server", "ray"},
    "ray": {"ray"},
    "cryptography": {"receipt"},
    "safetensors": {"model"},
    "optuna": {"tuning"},
    "matplotlib": {"tuning", "cli"},
    "torch": {"backends/cuda", "backends/gpu.py", "backends/torch_backend.py"},
    "cuda": {"backends/cuda"},
    "nvidia": {"backends/cuda"},
}
FORBIDDEN = {"transformers", "pickle", "marshal", "shelve"}


def layer_of(path: Path) -> str:
    part = path.relative_to(ROOT).parts[0]
    return part.removesuffix(".py")


def home_of(path: Path) -> str:
    """The file itself, the folder backends/cuda, or else the layer: whichever is some package's home."""
    name = path.relative_to(ROOT).as_posix()
    homes = (name, "backends/cuda" if name.startswith("backends/cuda/") else layer_of(path))
    return next((home for home in homes if any(home in names for names in HOMES.values())), homes[1])


def imports_of(source: str) -> set[str]:
    """Every module a file imports, at any depth of nesting; TYPE_CHECKING imports count too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the layer"
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def violations(layer: str, source: str, home: str = "") -> list[str]:
    found = []
    for name in imports_of(source):
        parts = name.split(".")
        if parts[0] == "verispec" and len(parts) > 1 and parts[1] in RANK and RANK[parts[1]] > RANK[layer]:
            found.append(name)
        if parts[0] in FORBIDDEN or (parts[0] in HOMES and (home or layer) not in HOMES[parts[0]]):
            found.append(name)
    return found


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    assert violations(layer_of(path), path.read_text(encoding="utf-8"), home_of(path)) == []


@pytest.mark.parametrize(
    ("layer", "line"),
    [
        ("kv", "from verispec.engine import Engine"),
        ("sampling", "import verispec.backends.protocol"),
        ("engine", "from verispec import llm"),
        ("engine", "import torch"),
        ("backends", "import torch"),
        ("spec", "def f():\n    import jinja2"),
    ],
)
def test_the_check_finds_a_wrong_import(layer: str, line: str) -> None:
    assert violations(layer, line)


# What a receipt is, and how one is read, can be understood without knowing how answers are made.
RECEIPT_VALUES = [ROOT / "receipt" / "values.py", ROOT / "receipt" / "reading.py"]


@pytest.mark.parametrize("path", RECEIPT_VALUES, ids=lambda p: p.name)
def test_receipts_are_values_that_know_no_engine(path: Path) -> None:
    assert violations("backends", path.read_text(encoding="utf-8").replace("verispec.receipt", "receipt")) == []


def test_every_module_has_a_layer() -> None:
    assert {layer_of(path) for path in ROOT.rglob("*.py")} <= set(RANK)


def test_no_code_is_evaluated_at_run_time() -> None:
    """R1: no eval, exec or pickle in the library. `compile` of templates happens inside jinja2's sandbox module."""
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in {"eval", "exec"}, f"{path.name}:{node.lineno}"

"""Broken model files as a person meets them: exit code 2, one sentence, no traceback, nothing left behind."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support import broken_folders, broken_gguf, broken_templates
from tests.support.broken_files import Case
from tests.support.broken_gguf import BYTE_LEVEL, FILE

pytestmark = pytest.mark.slow


def gguf(data: bytes) -> dict[str, bytes]:
    return {FILE: data}


def cases() -> Iterator[tuple[Case, str]]:
    sound = broken_gguf.model(BYTE_LEVEL)
    pairs = list(broken_gguf.metadata(BYTE_LEVEL).items())
    arrays = broken_gguf.weights(len(BYTE_LEVEL["tokens"]))
    spoilt = {**arrays, "output_norm.weight": np.full_like(arrays["output_norm.weight"], np.nan)}
    table = broken_gguf.layout(arrays)
    huge = sound.data[:8] + (2**64 - 1).to_bytes(8, "little") + sound.data[16:]
    endless = broken_gguf.model(BYTE_LEVEL, **{"tokenizer.chat_template": broken_templates.REFUSED["nested loops"]})
    long = broken_gguf.model(BYTE_LEVEL, **{"tokenizer.chat_template": broken_templates.REFUSED["10 MB of text"]})
    yield Case("empty", FILE, gguf(b"")), "not a model file"
    yield Case("half a header", FILE, gguf(sound.data[: sound.header_nbytes // 2])), "bytes"
    yield Case("half the weights", FILE, gguf(sound.data[:-300])), "truncated"
    yield Case("huge count", FILE, gguf(huge)), str(2**64 - 1)
    yield (
        Case("overlap", FILE, gguf(broken_gguf.build(pairs, arrays, [*table[:-1], table[-1]._replace(offset=0)]).data)),
        "overlap",
    )
    yield (
        Case(
            "unknown type",
            FILE,
            gguf(broken_gguf.build(pairs, arrays, [table[0]._replace(type_id=99), *table[1:]]).data),
        ),
        "unknown type 99",
    )
    yield Case("NaN", FILE, gguf(broken_gguf.build(pairs, spoilt).data)), "holds nan at index [0]"
    yield (
        Case("no tokenizer", FILE, gguf(broken_gguf.model(BYTE_LEVEL, **{"tokenizer.ggml.tokens": None}).data)),
        "tokenizer.ggml.tokens",
    )
    yield Case("endless template", FILE, gguf(endless.data)), "too much work"
    yield Case("long template", FILE, gguf(long.data)), "10000000 characters"
    files = broken_folders.sound_folder().files()
    yield Case("no config", ".", {"model.safetensors": files["model.safetensors"]}), "config.json"
    yield Case("broken config", ".", {**files, "config.json": b'{"architectures": ['}), "config.json is not JSON"
    yield Case("broken tokenizer", ".", {**files, "tokenizer.json": b"{}"}), "tokenizer.json"
    index = b'{"weight_map": {"model.norm.weight": "../x.safetensors"}}'
    yield Case("index", ".", {**files, broken_folders.INDEX: index}), "'../x.safetensors'"
    yield Case("header", ".", {**files, "model.safetensors": b"\xff" * 100}), "header claims"


CASES = list(cases())


@pytest.mark.parametrize(("case", "named"), CASES, ids=[case.name for case, _ in CASES])
def test_a_broken_model_gets_one_sentence_and_exit_code_2(case: Case, named: str, tmp_path: Path) -> None:
    folder, cache = tmp_path / "model", tmp_path / "cache"
    folder.mkdir()
    for name, content in case.files.items():
        (folder / name).write_bytes(content)
    done = subprocess.run(
        [sys.executable, "-m", "verispec", "generate", "-q", "x", "-m", str(folder / case.target), "--max-tokens", "1"],
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert done.stdout.strip() == ""
    (sentence,) = done.stderr.strip().splitlines()
    assert sentence.startswith("verispec: ")
    assert named in sentence
    assert str(folder) in sentence or "the chat template" in sentence
    assert "Traceback" not in sentence
    assert {path.name for path in folder.iterdir()} == set(case.files)
    left = [path.name for path in cache.rglob("*") if path.is_file()]
    assert all(name.startswith("audit-") and name.endswith(".json") for name in left), left

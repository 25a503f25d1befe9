"""What may be given as prompts, parameters and options, and what is refused: by name, in one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.tiny_llm import loaded, write_model
from verispec.errors import InputError
from verispec.llm import LLM
from verispec.receipt import parse
from verispec.text.prompts import PromptSpec, pair, spec
from verispec.types import SamplingParams

SHORT = SamplingParams(max_tokens=2, seed=0)


class Text(str):
    """Text of another library."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("prompts") / "tiny.gguf")


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with loaded(model, model.parent / "cache", backend="numpy") as made:
        yield made


@pytest.mark.parametrize(
    ("prompts", "contents"),
    [
        ("ab", ["ab"]),
        (Text("ab"), ["ab"]),
        ([1, 2], [[1, 2]]),
        ((1, 2), [[1, 2]]),
        (range(1, 3), [[1, 2]]),
        (np.array([1, 2]), [[1, 2]]),
        ([np.int64(1)], [[1]]),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (["ab", [1], {"prompt": "c"}, {"token_ids": (5, 6)}], ["ab", [1], "c", [5, 6]]),
        ((text for text in ("ab", "c")), ["ab", "c"]),
        ([], []),
    ],
)
def test_prompts_come_in_many_forms(prompts: Any, contents: list[Any]) -> None:
    found = pair(prompts, SHORT)
    assert [each.content for each in found] == contents
    assert all(type(t) is int for each in found if isinstance(each.content, list) for t in each.content)
    assert all(each.params == SHORT for each in found)


@pytest.mark.parametrize(
    ("prompts", "field", "kind"),
    [
        (None, "prompts", "None"),
        (b"hello", "prompts", "bytes"),
        (bytearray(b"hello"), "prompts", "bytearray"),
        (5, "prompts", "int"),
        ({1, 2}, "prompts", "set"),
        (Path("x"), "prompts", "PosixPath"),
        ([True, False], r"prompt\[0\]", "bool"),
        ([1, True], r"prompt\[1\]", "bool"),
        ([[1, 2.0]], r"prompt\[1\]", "float"),
        (["ab", None], r"prompts\[1\]", "None"),
        (["ab", b"c"], r"prompts\[1\]", "bytes"),
        ([1.0, 2.0], r"prompts\[0\]", "float"),
        ([["a"]], r"prompt\[0\]", "str"),
        ({"prompt": 5}, r"prompt\['prompt'\]", "int"),
        ({"token_ids": b"ab"}, r"prompt\['token_ids'\]", "bytes"),
        ({"token_ids": [True]}, r"prompt\['token_ids'\]\[0\]", "bool"),
        ({"promt": "a"}, "prompt needs exactly one of prompt, token_ids, messages", "none"),
        ({"prompt": "a", "token_ids": [1]}, "prompt needs exactly one of", "prompt, token_ids"),
        ({"prompt": "a", "max_token": 3}, "prompt has the unknown key", "'max_token'"),
        (["a", {"prompt": "a", "max_tokens": 3.0}], "max_tokens", "float"),
        ("\ud800", "prompt", "surrogate"),
    ],
)
def test_what_is_no_prompt_is_refused_by_name(prompts: Any, field: str, kind: str) -> None:
    with pytest.raises(InputError, match=f"^{field}.*{kind}"):
        pair(prompts, None)


def test_a_dict_has_parameters_of_its_own() -> None:
    line = {"prompt": "a", "max_tokens": 7, "stop": "x", "logit_bias": {"3": 1.5}}
    (found,) = pair(line, {"max_tokens": 2, "temperature": 0.5})
    params = SamplingParams(max_tokens=7, stop=("x",), logit_bias=((3, 1.5),), temperature=0.5)
    assert found == PromptSpec("a", params)
    messages = [{"role": "user", "content": "ab"}]
    assert spec({"messages": messages}) == PromptSpec(None, SamplingParams(), messages)


@pytest.mark.parametrize("params", ["x", 5, b"x", True, SamplingParams, ["x"], {"max_token": 2}, {5: 2}])
def test_what_are_no_parameters_is_refused_by_name(params: Any) -> None:
    with pytest.raises(InputError, match="param"):
        pair("a", params)


def test_all_calls_take_the_same_forms(llm: LLM) -> None:
    (expected,) = llm.generate("ab", SHORT)
    assert llm.generate({"prompt": "ab"}, {"max_tokens": 2}) == [expected]
    assert llm.generate({"token_ids": expected.prompt_ids, "max_tokens": 2}) == [expected]
    *_, last = llm.stream({"prompt": "ab", "max_tokens": 2})
    assert last.output == expected.samples[0]
    assert llm.score({"prompt": "cde"}) == llm.score("cde")
    messages = [{"role": "user", "content": "ab"}]
    assert llm.generate({"messages": messages}, SHORT) == [llm.chat(messages, {"max_tokens": 2})]
    for call in (llm.score, llm.stream, llm.request):
        with pytest.raises(InputError, match=r"^prompt must be .* not None"):
            call(None)  # type: ignore[operator]
    with pytest.raises(InputError, match=r"^requests must be"):
        llm.run(["ab"])  # type: ignore[list-item]


def test_a_receipt_of_numpy_numbers_can_be_read(llm: LLM) -> None:
    (done,) = llm.generate(np.array([1, 2]), {"max_tokens": np.int64(2), "seed": np.int64(5)}, receipts=True)
    assert parse(done.receipts[0].to_json()) == done.receipts[0]


def test_a_drawn_seed_survives_any_json_reader(llm: LLM) -> None:
    seeds = [llm.generate("ab", {"max_tokens": 1})[0].seed for _ in range(20)]
    assert max(seeds) < 2**53
    assert len(set(seeds)) == 20


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("max_len", 100.0, "float"),
        ("max_len", True, "bool"),
        ("max_len", 10**6, "10..000"),
        ("kv_slots", 1, "1"),
        ("kv_slots", 10**12, "10+"),
        ("kv_slots", 10**9, "takes .* GiB .* this machine has .* GiB"),
        ("max_running", 2.0, "float"),
        ("row_budget", "8", "str"),
        ("draft_len", 1.5, "float"),
        ("threads", True, "bool"),
        ("threads", 0, "0"),
        ("prefix_cache", 1, "int"),
        ("force", "no", "str"),
        ("family", 5, "int"),
        ("family", [2.5], "float"),
        ("model", None, "NoneType"),
        ("draft_model", 5, "int"),
    ],
)
def test_options_are_refused_by_name(model: Path, name: str, value: Any, problem: str) -> None:
    options: dict[str, Any] = {"model": model, "backend": "numpy", "drafter": "none", name: value}
    with pytest.raises(InputError, match=f"^{name} .*{problem}"):
        LLM(**options)

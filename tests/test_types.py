"""Every parameter is checked where it enters, and the message names it."""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import replace

import numpy as np
import pytest

from verispec.config import EngineConfig
from verispec.errors import InputError
from verispec.llm import Completion
from verispec.types import (
    Draft,
    FinishReason,
    SampleOutput,
    SamplingParams,
    SequenceStats,
    TokenLogprob,
    TokenLogprobs,
)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_tokens", "5"),
        ("min_tokens", -1),
        ("min_tokens", 257),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("top_k", -1),
        ("top_k", 2.0),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-39),
        ("temperature", 1e-39),
        ("temperature", None),
        ("n", None),
        ("repetition_penalty", math.inf),
        ("presence_penalty", math.nan),
        ("frequency_penalty", math.inf),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {"a": 1.0}),
        ("stop", 5),
        ("stop_ids", 5),
        ("logit_bias", 5),
        ("logit_bias", [5]),
        ("stop", ("",)),
        ("stop", (3,)),
        ("stop", ("x",) * 65),
        ("stop_ids", (-1,)),
        ("stop_ids", ("a",)),
        ("ignore_eos", 1),
        ("n", 0),
        ("n", 10**6),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 1.0),
        ("logprobs", -1),
        ("logprobs", 65),
        ("prompt_logprobs", -1),
        ("deterministic", "yes"),
    ],
)
def test_a_bad_parameter_is_named(field: str, value: object) -> None:
    with pytest.raises(InputError, match=field):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


def test_unknown_parameters_are_refused() -> None:
    assert SamplingParams.from_mapping({"top_k": 3}).top_k == 3
    with pytest.raises(InputError, match="'topk'"):
        SamplingParams.from_mapping({"topk": 3})


def test_scoring_needs_prompt_logprobs() -> None:
    assert SamplingParams(max_tokens=0, prompt_logprobs=0).max_tokens == 0


def test_a_single_stop_string_is_one_string() -> None:
    assert SamplingParams(stop="ab").stop == ("ab",)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"num_slots": 1},
        {"row_budget": 0},
        {"stream_row_budget": 0},
        {"max_len": 1},
        {"max_len": 9999},
        {"max_draft": -1},
    ],
)
def test_bad_engine_sizes_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(InputError, match=next(iter(options))):
        EngineConfig(**options)


def test_drafts_are_trees() -> None:
    tree = Draft((5, 6, 7), (-1, 0, 0))
    assert tree.path_to(2) == (0, 2)
    assert tree.path_to(-1) == ()
    assert Draft.chain([1, 2, 3]).parents == (-1, 0, 1)
    assert tree.is_valid(vocab_size=8, max_nodes=3)
    for bad in (Draft((5,), (0,)), Draft((8,), (-1,)), Draft((-1,), (-1,)), Draft((1, 2), (-1,)), Draft((1,), (-2,))):
        assert not bad.is_valid(vocab_size=8, max_nodes=3)
    assert not tree.is_valid(vocab_size=8, max_nodes=2)


@pytest.mark.parametrize(
    ("parents", "is_chain", "depth"),
    [
        ((), True, 0),
        ((-1,), True, 1),
        ((-1, 0, 1, 2), True, 4),
        ((-1, -1), False, 1),
        ((-1, 0, 0), False, 2),
        ((-1, -1, 0, 2, 1), False, 3),
        ((-1, 0, 1, 0), False, 3),
    ],
)
def test_chains_are_told_from_trees_and_depth_is_the_longest_path(
    parents: tuple[int, ...], is_chain: bool, depth: int
) -> None:
    draft = Draft(tuple(range(len(parents))), parents)
    assert (draft.is_chain, draft.depth) == (is_chain, depth)
    assert draft.depth == max((len(draft.path_to(node)) for node in range(len(draft))), default=0)
    assert Draft.chain(draft.token_ids).is_chain


def test_the_digest_is_over_ids_then_logprobs_little_endian() -> None:
    entries = TokenLogprobs((1, 70000), (-0.5, -1.25))
    output = SampleOutput(0, 3, entries, "", FinishReason.LENGTH, 0, SequenceStats())
    expected = hashlib.sha256(struct.pack("<ii", 1, 70000) + struct.pack("<ff", -0.5, -1.25)).hexdigest()
    assert output.digest == expected
    other = replace(output, logprobs=replace(entries, values=(-0.5, -1.25000012)))
    assert other.digest != expected


def test_entries_kept_as_columns_are_a_sequence() -> None:
    entries = [TokenLogprob(5, -0.5), TokenLogprob(6, -1.0, ((6, -1.0), (7, -2.0))), TokenLogprob(7, 0.0)]
    for wanted in (entries, [entry._replace(alternatives=()) for entry in entries]):
        columns = TokenLogprobs.of(wanted)
        assert (list(columns), len(columns), columns.token_ids) == (wanted, 3, (5, 6, 7))
        assert [columns[i] for i in range(-3, 3)] == wanted * 2
        assert list(columns[1:]) == wanted[1:]
        assert (columns[:3], hash(columns[:3])) == (columns, hash(columns))
        assert columns[:2] != columns
        assert wanted[1] in columns


def test_numbers_of_other_libraries_become_pythons_own() -> None:
    params = SamplingParams(
        max_tokens=np.int64(3), temperature=np.float32(0.5), seed=np.uint64(7), stop_ids=[np.int32(1)]
    )  # type: ignore[arg-type]
    assert params == SamplingParams(max_tokens=3, temperature=0.5, seed=7, stop_ids=(1,))
    assert [type(v) for v in (params.max_tokens, params.temperature, params.seed, *params.stop_ids)] == [
        int, float, int, int,
    ]  # fmt: skip
    config = EngineConfig(num_slots=np.int64(64), max_len=np.int16(8))  # type: ignore[arg-type]
    assert (type(config.num_slots), type(config.max_len)) == (int, int)
    assert isinstance(SamplingParams(temperature=1).temperature, int), "what receipts recorded stays as it was"


def output_of(text: str = "abc", **changes: object) -> SampleOutput:
    fields = {"sample_index": 0, "prompt_len": 1, "logprobs": TokenLogprobs((1,), (-0.5,)), "text": text}
    return SampleOutput(**{
        **fields, "finish_reason": FinishReason.STOP, "seed": 1, "stats": SequenceStats(arrival_time=1.0), **changes,
    })  # type: ignore[arg-type]  # fmt: skip


def test_outputs_compare_by_what_they_say_and_print_in_short() -> None:
    same = output_of(seed=2, stats=SequenceStats(arrival_time=9.0))
    assert (output_of(), hash(output_of())) == (same, hash(same))
    others = ({"text": "abd"}, {"logprobs": TokenLogprobs((1,), (-0.6,))}, {"finish_reason": "length"})
    for other in (output_of(**changes) for changes in others):  # type: ignore[arg-type]
        assert other != output_of()
    completion, again = (Completion((1,), (o,), "profile") for o in (output_of(), same))
    assert completion == again
    assert completion != Completion((1,), (output_of(),), "another")
    assert repr(completion) == f"Completion(text='abc', finish_reason='stop', digest='{output_of().digest[:16]}')"
    assert len(repr(output_of("x" * 10_000))) < 200
    assert repr(Completion((1,), (output_of(),) * 3, "profile")).endswith(", samples=3)")
    assert "error='no'" in repr(output_of(error="no"))

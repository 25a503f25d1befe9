"""Receipts: what is written can be read, run again and found equal; what is not so is found, named and located."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.tiny_llm import TOKENS, loaded, write_model
from verispec import __version__
from verispec.backends.calibration import Profile
from verispec.engine import Engine
from verispec.errors import InputError, ModelFileError
from verispec.llm import LLM
from verispec.model import file_digest
from verispec.receipt import Receipt, parse, replay
from verispec.receipt.rerun import Positions, ReplayResult, TokenDifference
from verispec.receipt.values import content_digest
from verispec.spec.drafter import Refusal
from verispec.spec.recorded import RecordedDrafter
from verispec.strict_json import MAX_OBJECT_NBYTES
from verispec.types import CONSTRAINTS, Draft, FinishReason, SampleOutput, SamplingParams, TokenLogprobs

PROMPT = "the abba and the other: xyz"
SAMPLED = SamplingParams(max_tokens=90, temperature=1.0, seed=11, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("receipts")
    write_model(folder / "tiny.gguf")
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with loaded(folder / "tiny.gguf", folder) as llm:
        yield llm


@pytest.fixture(scope="module")
def receipt(llm: LLM) -> Receipt:
    """An answer of 90 sampled tokens."""
    return receipts_of(llm, SAMPLED)[0]


def receipts_of(llm: LLM, params: SamplingParams, prompt: Any = PROMPT, **options: Any) -> tuple[Receipt, ...]:
    (completion,) = llm.generate([prompt], params, receipts=True, **options)
    return completion.receipts


def plain(receipt: Receipt) -> dict[str, Any]:
    return json.loads(receipt.to_json())


def edited(receipt: Receipt, path: str, change: Any) -> Receipt:
    """The receipt with one field changed; `change` is the new value, or a function of the old one."""
    data = plain(receipt)
    *parents, key = path.split(".")
    target = data
    for name in parents:
        target = target[int(name)] if isinstance(target, list) else target[name]
    target[key] = change(target[key]) if callable(change) else change
    return parse(json.dumps(data))


def redigested(receipt: Receipt) -> Receipt:
    """As somebody would hand it in who knows how the digest is made."""
    return replace(receipt, digest=content_digest(receipt))


def prompt_len_of(receipt: Receipt) -> int:
    assert receipt.prompt.token_ids is not None
    return len(receipt.prompt.token_ids)


def flipped(token_id: int) -> int:
    return (token_id + 1) % len(TOKENS)


# --- what is written can be run again -----------------------------------------------------------------------------

KINDS = {
    "greedy": SamplingParams(max_tokens=70),
    "sampled": SAMPLED,
    "ended by EOS": SamplingParams(max_tokens=200, temperature=1.0, seed=2),
    "filters": SamplingParams(max_tokens=40, temperature=1.3, top_k=9, top_p=0.9, min_p=0.02, seed=3),
    "penalties": SamplingParams(
        max_tokens=40, temperature=1.0, seed=4, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2
    ),
    "bias": SamplingParams(max_tokens=40, temperature=1.0, seed=5, logit_bias={3: 2.5, 7: -1e4}),  # type: ignore[arg-type]
    "stop strings": SamplingParams(max_tokens=200, temperature=1.0, seed=6, stop=("ab", "q"), ignore_eos=True),
    "stop ids": SamplingParams(max_tokens=200, temperature=1.0, seed=7, stop_ids=(5, 6), ignore_eos=True),
    "min_tokens": SamplingParams(max_tokens=200, temperature=1.0, seed=8, min_tokens=30, stop=("a",), stop_ids=(9,)),
    "samples": SamplingParams(max_tokens=50, temperature=1.0, seed=9, n=4, stop=("th",)),
    "alternatives": SamplingParams(max_tokens=9, logprobs=3, prompt_logprobs=2),
    "a random seed": SamplingParams(max_tokens=30, temperature=1.0),
    "up to max_len": SamplingParams(max_tokens=None, ignore_eos=True),
    "one token": SamplingParams(max_tokens=1),
}


@pytest.mark.parametrize("params", KINDS.values(), ids=KINDS)
def test_a_receipt_survives_the_file_and_is_reproduced(llm: LLM, params: SamplingParams) -> None:
    receipts = receipts_of(llm, params)
    assert len(receipts) == params.n
    for index, receipt in enumerate(receipts):
        again = parse(receipt.to_json())
        assert again == receipt
        assert not again.is_edited
        assert again.contradictions() == ()
        assert again.parameters.sample_index == index
        result = replay(llm, again)
        assert result.reproduced, result
        assert result.agrees
        assert result.num_equal == len(receipt.output.token_ids) > 0


def test_the_kinds_are_what_they_say(llm: LLM) -> None:
    def ends(kind: str) -> list[tuple[FinishReason, int]]:
        return [(r.output.finish_reason, len(r.output.token_ids)) for r in receipts_of(llm, KINDS[kind])]

    for kind in ("ended by EOS", "stop strings", "stop ids", "min_tokens"):
        ((reason, num_tokens),) = ends(kind)
        assert (reason, num_tokens < 200) == (FinishReason.STOP, True), kind
    assert ends("min_tokens")[0][1] >= 30
    assert len({reason for reason, _ in ends("samples")} | {n for _, n in ends("samples")}) > 2


def test_a_replay_is_a_few_passes_of_the_one_sample(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = replace(SAMPLED, n=40)  # more than run at once
    (completion,) = llm.generate([PROMPT], params, receipts=True)
    assert completion.samples[39].stats.passes >= 89
    committed = []
    real = Engine.step

    def counted(engine: Engine) -> Any:
        events = real(engine)
        committed.extend(token_id for event in events for token_id in event.token_ids)
        return events

    monkeypatch.setattr(Engine, "step", counted)
    result = replay(llm, completion.receipts[39])
    assert result.reproduced
    assert result.num_passes <= 15  # the planner chooses by what passes cost here
    assert len(committed) == 90  # and not one token of the samples before it


def test_a_replay_takes_nothing_on_trust(llm: LLM, receipt: Receipt, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is drafted decides how many passes it takes, and nothing else."""
    monkeypatch.setattr(RecordedDrafter, "state", lambda *arguments: Refusal("a test"))
    without = replay(llm, receipt)
    assert (without.reproduced, without.num_passes) == (True, 90)
    monkeypatch.setattr(RecordedDrafter, "state", lambda *arguments: 3)
    monkeypatch.setattr(
        RecordedDrafter, "draft", lambda drafter, turns: [Draft.chain([1] * t.choice.num_nodes) for t in turns]
    )
    assert replay(llm, receipt).reproduced


def test_drafters_and_streams_give_the_same_receipt(llm: LLM, receipt: Receipt) -> None:
    assert receipts_of(llm, SAMPLED, drafter="suffix") == (receipt,)
    *_, last = llm.stream(PROMPT, SAMPLED)
    assert last.output is not None
    assert llm.receipt(PROMPT, SAMPLED, last.output) == receipt
    assert receipts_of(llm, SAMPLED, np.array(llm.tokenizer.encode(PROMPT))) == (receipt,)


def test_a_receipt_holds_what_it_promises(llm: LLM, folder: Path, receipt: Receipt) -> None:
    data = plain(receipt)
    file = (folder / "tiny.gguf").read_bytes()
    ids = llm.tokenizer.encode(PROMPT)
    assert (data["format"], data["verispec"]) == (3, __version__)
    assert data["model"]["name"] == "tiny.gguf"
    assert data["model"]["files"] == [
        {
            "name": "tiny.gguf",
            "nbytes": len(file),
            "sha256": hashlib.sha256(file).hexdigest(),
            "blocks": [f"{zlib.crc32(file):08x}"],
        }
    ]
    assert data["profile"]["hash"] == llm.profile
    assert data["profile"]["fingerprint"] == dict(llm.calibration.profile.fingerprint)
    assert data["prompt"] == {
        "sha256": hashlib.sha256(struct.pack(f"<{len(ids)}i", *ids)).hexdigest(),
        "token_ids": ids,
    }
    assert set(data["parameters"]["sampling"]) == {f.name for f in fields(SamplingParams)} - set(CONSTRAINTS)
    assert (data["parameters"]["sampling"]["seed"], data["parameters"]["max_len"]) == (11, 256)
    assert data["parameters"]["eos_ids"] == [0]
    assert str(folder) not in receipt.to_json()


def test_the_digests_are_what_the_documents_say(llm: LLM) -> None:
    (completion,) = llm.generate([PROMPT], SAMPLED, receipts=True)
    data = plain(completion.receipts[0])
    values = [struct.pack("<f", entry.logprob) for entry in completion.logprobs]
    blocks = [values[:32], values[32:64], values[64:]]
    assert data["output"]["logprob_digests"] == [hashlib.sha256(b"".join(block)).hexdigest() for block in blocks]
    digest = data.pop("digest")
    del data["prompt"]["token_ids"]
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    assert hashlib.sha256(text.encode()).hexdigest() == digest


# --- what was changed is found ------------------------------------------------------------------------------------


def test_each_flipped_token_is_found_at_its_position_even_if_digested_again(llm: LLM, receipt: Receipt) -> None:
    prompt_len = prompt_len_of(receipt)
    for i, token_id in enumerate(receipt.output.token_ids):
        changed = edited(receipt, "output.token_ids", lambda ids, i=i: [*ids[:i], flipped(ids[i]), *ids[i + 1 :]])
        assert changed.is_edited
        result = replay(llm, changed if i % 2 else redigested(changed))
        assert result.token == TokenDifference(prompt_len + i, flipped(token_id), token_id)
        assert result.logprobs is None
        assert not result.reproduced
        assert not result.agrees
        assert result.is_edited == bool(i % 2)


def test_an_answer_cut_short_or_made_longer_is_found_at_its_end(llm: LLM, receipt: Receipt) -> None:
    end = prompt_len_of(receipt) + 90
    last = receipt.output.token_ids[-1]
    shorter = redigested(edited(receipt, "output.token_ids", lambda ids: ids[:-1]))
    assert replay(llm, shorter).token == TokenDifference(end - 1, None, last)
    longer = redigested(edited(receipt, "output.token_ids", lambda ids: [*ids, 5]))
    assert replay(llm, longer).token == TokenDifference(end, 5, None)
    other_end = replay(llm, redigested(edited(receipt, "output.finish_reason", "stop")))
    assert (other_end.token, other_end.found_finish) == (None, FinishReason.LENGTH)
    assert not other_end.agrees


def test_each_changed_digest_is_found_in_its_block_even_if_digested_again(llm: LLM, receipt: Receipt) -> None:
    start, end = prompt_len_of(receipt), prompt_len_of(receipt) + 90
    blocks = [Positions(start, start + 32), Positions(start + 32, start + 64), Positions(start + 64, end)]
    assert len(receipt.output.logprob_digests) == 3
    for k, block in enumerate(blocks):
        changed = edited(receipt, "output.logprob_digests", lambda all, k=k: [*all[:k], "0" * 64, *all[k + 1 :]])
        assert changed.is_edited
        result = replay(llm, redigested(changed))
        assert (result.token, result.logprobs) == (None, block)
        assert not result.agrees
    for change in (lambda all: all[:-1], lambda all: [*all, "0" * 64], lambda all: []):
        result = replay(llm, redigested(edited(receipt, "output.logprob_digests", change)))
        assert result.logprobs is not None
        assert not result.agrees


def test_a_log_probability_that_differs_by_one_bit_is_found_in_its_block(llm: LLM) -> None:
    (completion,) = llm.generate([PROMPT], SAMPLED)
    prompt_len = len(completion.prompt_ids)
    for i in (0, 40, 89):
        receipt = llm.receipt(PROMPT, SAMPLED, nudged(completion.samples[0], i))
        assert not receipt.is_edited
        result = replay(llm, receipt)
        assert result.tokens_equal
        assert result.logprobs is not None
        assert result.logprobs.start <= prompt_len + i < result.logprobs.end
        assert not result.agrees


def nudged(output: SampleOutput, index: int) -> SampleOutput:
    """The output with the last bit of one log-probability changed."""
    entries = list(output.logprobs)
    value = float(np.nextafter(np.float32(entries[index].logprob), np.float32(0)))
    entries[index] = entries[index]._replace(logprob=value)
    return replace(output, logprobs=TokenLogprobs.of(entries))


SAMPLING_CHANGES: dict[str, Any] = {
    "max_tokens": 91, "min_tokens": 1, "temperature": 2.0, "top_k": 5, "top_p": 0.5, "min_p": 0.5,
    "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {"1": 1.0},
    "stop": ["zz"], "stop_ids": [3], "ignore_eos": False, "n": 2, "seed": 12, "logprobs": 1, "prompt_logprobs": 1,
    "schema": "{}", "regex": "b*", "grammar": "start: \"b\"*",
}  # fmt: skip
OTHER_CHANGES: list[tuple[str, Any]] = [
    ("parameters.sample_index", 1),
    ("parameters.max_len", 255),
    ("parameters.eos_ids", [1]),
    ("model.name", "other"),
    ("model.files.0.name", "other.gguf"),
    ("model.files.0.nbytes", 5),
    ("model.files.0.sha256", "0" * 64),
    ("model.files.0.blocks", []),
    ("profile.fingerprint", lambda values: {**values, "arithmetic": "9"}),
    ("profile.family", [1, 2]),
    ("profile.weights_version", 1),
    ("profile.hash", "0" * 16),
    ("prompt.token_ids", lambda ids: [*ids[:-1], flipped(ids[-1])]),
    ("prompt.sha256", "0" * 64),
    ("output.token_ids", lambda ids: ids[:5]),
    ("output.finish_reason", "stop"),
    ("output.logprob_digests", lambda digests: digests[::-1]),
    ("verispec", "9.9"),
    ("digest", "0" * 64),
]  # fmt: skip


def test_each_changed_sampling_parameter_is_found(llm: LLM, receipt: Receipt) -> None:
    assert set(SAMPLING_CHANGES) == {f.name for f in fields(SamplingParams)} - {"deterministic"}
    for name, value in SAMPLING_CHANGES.items():
        changed = edited(receipt, f"parameters.sampling.{name}", value)
        assert changed != receipt
        result = replay(llm, changed)
        assert result.is_edited, name
        assert not result.agrees
    with pytest.raises(InputError, match=r"parameters\.sampling\.deterministic is off"):
        edited(receipt, "parameters.sampling.deterministic", False)


@pytest.mark.parametrize(("path", "change"), OTHER_CHANGES, ids=[path for path, _ in OTHER_CHANGES])
def test_each_other_change_is_found(llm: LLM, receipt: Receipt, path: str, change: Any) -> None:
    result = replay(llm, edited(receipt, path, change))
    assert result.is_edited or path == "prompt.token_ids"
    assert not result.agrees


# --- what cannot be true is found, even if digested again -----------------------------------------------------------


def names(result: ReplayResult) -> list[str]:
    return [difference.name for difference in result.fields]


def test_parameters_that_matter_show_in_the_answer(llm: LLM, receipt: Receipt) -> None:
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "logit_bias", "seed", "max_tokens"):
        changed = redigested(edited(receipt, f"parameters.sampling.{name}", SAMPLING_CHANGES[name]))
        result = replay(llm, changed)
        assert (result.is_edited, result.fields) == (False, ())
        assert result.token is not None, name


def test_parameters_that_do_not_matter_make_another_true_receipt(llm: LLM, receipt: Receipt) -> None:
    """A control: the digest is what tells these, and nothing else can."""
    for name in ("n", "logprobs", "prompt_logprobs"):
        changed = redigested(edited(receipt, f"parameters.sampling.{name}", SAMPLING_CHANGES[name]))
        assert replay(llm, changed).reproduced, name


def test_an_answer_cut_short_by_an_eos_id_that_the_model_does_not_have(llm: LLM, receipt: Receipt) -> None:
    """The answer up to the first token of its kind, as if that had ended it."""
    last = receipt.output.token_ids[40]
    end = receipt.output.token_ids.index(last) + 1
    cut = edited(receipt, "output.token_ids", lambda ids: ids[:end])
    cut = edited(cut, "output.finish_reason", "stop")
    cut = edited(cut, "parameters.sampling.ignore_eos", False)
    cut = redigested(edited(cut, "parameters.eos_ids", sorted({0, last})))
    result = replay(llm, cut)
    assert "parameters.eos_ids" in names(result)
    assert result.token == TokenDifference(prompt_len_of(receipt) + end, None, receipt.output.token_ids[end])
    assert not result.agrees


def test_eos_ids_that_made_no_difference_are_named(llm: LLM, receipt: Receipt) -> None:
    for wrong in ([], [0, 0], [0, 5]):
        result = replay(llm, redigested(edited(receipt, "parameters.eos_ids", wrong)))
        assert names(result) == ["parameters.eos_ids"]
        assert result.logprobs_equal
        assert not result.agrees


def test_a_sample_that_was_not_asked_for_is_named(llm: LLM) -> None:
    params = replace(SAMPLED, n=3)
    third = receipts_of(llm, params)[2]
    assert replay(llm, third).reproduced
    result = replay(llm, redigested(edited(third, "parameters.sampling.n", 2)))
    assert names(result) == ["parameters.sample_index"]
    assert result.logprobs_equal
    assert not result.agrees


def test_a_max_len_beyond_the_models_context_is_named(llm: LLM, receipt: Receipt) -> None:
    for max_len, expected in ((256, []), (257, ["parameters.max_len"])):
        result = replay(llm, redigested(edited(receipt, "parameters.max_len", max_len)))
        assert names(result) == expected
        assert result.reproduced == (not expected)


def test_fields_that_contradict_each_other_are_named(llm: LLM, receipt: Receipt) -> None:
    for path, change in (
        ("profile.hash", "0" * 16),
        ("prompt.sha256", "0" * 64),
        ("prompt.token_ids", lambda ids: [*ids[:-1], flipped(ids[-1])]),
    ):
        result = replay(llm, redigested(edited(receipt, path, change)))
        assert names(result) == [path.replace("token_ids", "sha256")]
        assert not result.agrees


PLAUSIBLE: list[Any] = [None, True, 1, 1.0, "x", "0" * 64, [], 2**31 - 1]
FREE = {"verispec", "model.name", "model.files.0.name", "parameters.max_len"}  # names, and room that was not needed


def values_in(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of a receipt with its path; of a list, the first two."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, inner in items:
        yield f"{path}{key}", inner
        yield from values_in(inner, f"{path}{key}.")


def similar(value: Any) -> Iterator[Any]:
    """What somebody might put in its place."""
    match value:
        case bool():
            yield not value
        case int() | float():
            yield from (value + 1, value - 1, float(value) + 0.5, str(value))
        case str():
            yield from (value[:-1] + chr(ord(value[-1]) ^ 1), value[::-1], value + "0")
        case [*items]:
            yield from (items[1:], items[:-1], items + items[-1:], items[::-1], [*items, 5])
        case dict():
            yield from ({k: v for k, v in value.items() if k != name} for name in value)


def test_any_value_in_any_fields_place_is_refused_or_named_at_little_cost(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    (receipt,) = receipts_of(llm, replace(SAMPLED, max_tokens=5), [1, 2, 3])
    steps = named = 0
    real = Engine.step

    def counted(engine: Engine) -> Any:
        nonlocal steps
        steps += 1
        return real(engine)

    monkeypatch.setattr(Engine, "step", counted)
    for path, value in values_in(plain(receipt)):
        for other in (*PLAUSIBLE, *similar(value)):
            data, steps = plain(receipt), 0
            put(path, other)(data)
            try:
                changed = parse(json.dumps(data))
                result = replay(llm, redigested(changed))
            except InputError:
                continue
            if redigested(changed) == receipt:
                continue
            assert steps <= 6, (path, other)  # a step per token, and one to see it go on
            assert changed.is_edited or result.fields, (path, other)
            named += not result.agrees
            if result.agrees and path not in FREE:  # then it must be true
                assert path.startswith("parameters.sampling."), other
                (answer,) = llm.generate([[1, 2, 3]], changed.parameters.sampling)
                assert answer.token_ids == receipt.output.token_ids, (path, other)
                assert answer.finish_reason == receipt.output.finish_reason, (path, other)
    assert named > 50


def test_an_answer_is_not_ended_by_the_room_that_a_replay_has(folder: Path) -> None:
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    with loaded(folder / "tiny.gguf", folder, max_len=128) as short:
        (receipt,) = receipts_of(short, params)
    longer = redigested(edited(receipt, "parameters.max_len", 256))  # where the answer would have gone on
    with loaded(folder / "tiny.gguf", folder, kv_slots=128) as small:
        assert replay(small, receipt).reproduced
        result = replay(small, longer)
        assert (result.token, result.found_finish) == (None, None)
        assert not result.agrees


# --- the model ----------------------------------------------------------------------------------------------------


def test_one_changed_byte_of_a_weight_is_found_and_so_is_what_it_does(
    llm: LLM, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_digest, "BLOCK_NBYTES", 4096)
    with loaded(folder / "tiny.gguf", folder) as fresh:
        (receipt,) = receipts_of(fresh, SAMPLED)
    data = bytearray((folder / "tiny.gguf").read_bytes())
    assert len(receipt.model.files[0].blocks) == -(-len(data) // 4096) > 10
    for offset in (len(data) - 4 * 32 + 3, len(data) // 2 | 3):  # high bytes of float32 weights
        other = tmp_path / f"{offset}.gguf"
        spoilt = data.copy()
        spoilt[offset] ^= 0x80  # the sign
        other.write_bytes(spoilt)
        with loaded(other, folder) as changed:
            result = replay(changed, receipt)
        assert (result.is_edited, result.fields, result.profile) == (False, (), ())
        (difference,) = result.files
        assert difference.ranges == ((offset // 4096 * 4096, min(offset // 4096 * 4096 + 4096, len(data))),)
        assert not result.agrees
        assert result.token is not None or result.logprobs is not None
    same = shutil.copy(folder / "tiny.gguf", tmp_path / "renamed.gguf")
    with loaded(Path(same), folder) as renamed:
        assert replay(renamed, receipt).reproduced


def test_a_byte_that_no_answer_depends_on_is_a_difference_all_the_same(
    llm: LLM, folder: Path, receipt: Receipt, tmp_path: Path
) -> None:
    data = (folder / "tiny.gguf").read_bytes()
    (tmp_path / "other.gguf").write_bytes(data.replace(b"{{ m.role }}", b"{{ m.ROLE }}"))
    with loaded(tmp_path / "other.gguf", folder) as other:
        result = replay(other, receipt)
    assert result.logprobs_equal
    assert [d.ranges for d in result.files] == [((0, len(data)),)]
    assert not result.agrees


@pytest.mark.parametrize("backend", ["native", "numpy"])
def test_no_receipt_names_a_file_that_was_edited_after_loading(folder: Path, tmp_path: Path, backend: str) -> None:
    path = Path(shutil.copy(folder / "tiny.gguf", tmp_path / "tiny.gguf"))
    before = path.stat()
    with loaded(path, folder, backend=backend) as early, loaded(path, folder, backend=backend) as late:
        (receipt,) = receipts_of(early, SAMPLED)
        with path.open("r+b") as file:
            file.write(bytes(before.st_size))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert receipts_of(early, SAMPLED) == (receipt,)  # it was hashed in time, and computes what was loaded
        with pytest.raises(ModelFileError, match="has changed since it was loaded"):
            receipts_of(late, SAMPLED)


def test_tokens_outside_the_vocabulary_are_refused(llm: LLM, receipt: Receipt) -> None:
    changed = edited(receipt, "output.token_ids", lambda ids: [*ids[:-1], 10**6])
    result = replay(llm, changed)
    assert result.is_edited
    assert result.refusal == f"output.token_ids holds 1000000, which is not in the vocabulary of {len(TOKENS)}"
    with pytest.raises(InputError, match=r"output\.token_ids holds 1000000"):
        replay(llm, redigested(changed))


# --- another profile, other limits --------------------------------------------------------------------------------


def elsewhere(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the LLM believe it runs on another library."""
    profile = llm.calibration.profile
    fingerprint = tuple((k, "9.9.9" if k == "arithmetic" else v) for k, v in profile.fingerprint)
    monkeypatch.setattr(llm, "calibration", replace(llm.calibration, profile=Profile(fingerprint, profile.family)))


def test_on_another_profile_equal_tokens_are_enough_and_it_is_said(
    llm: LLM, receipt: Receipt, monkeypatch: pytest.MonkeyPatch
) -> None:
    (completion,) = llm.generate([PROMPT], SAMPLED)
    other_bits = llm.receipt(PROMPT, SAMPLED, nudged(completion.samples[0], 50))
    other_token = redigested(edited(receipt, "output.token_ids", lambda ids: [flipped(ids[0]), *ids[1:]]))
    here = llm.calibration.profile
    elsewhere(llm, monkeypatch)
    result = replay(llm, receipt)
    assert [d.name for d in result.profile] == ["arithmetic", "hash"]
    assert result.profile[0][1:] == (dict(here.fingerprint)["arithmetic"], "9.9.9")
    assert (result.agrees, result.reproduced, result.logprobs_equal) == (True, False, True)
    result = replay(llm, other_bits)
    assert (result.agrees, result.tokens_equal, result.logprobs_equal) == (True, True, False)
    assert not replay(llm, other_token).agrees
    monkeypatch.undo()
    assert replay(llm, receipt).reproduced


@pytest.mark.parametrize("version", [None, "1", "99"])
def test_a_receipt_of_other_sampling_rules_is_refused(llm: LLM, receipt: Receipt, version: str | None) -> None:
    """Receipts from before the rules had a version do not name one."""

    def changed(values: dict[str, str]) -> dict[str, str]:
        others = {name: value for name, value in values.items() if name != "sampling"}
        return others if version is None else {**others, "sampling": version}

    with pytest.raises(InputError, match=f"version {version or 1} of the sampling rules"):
        replay(llm, redigested(edited(receipt, "profile.fingerprint", changed)))


def test_another_max_len_is_served_as_far_as_it_goes(llm: LLM, folder: Path, receipt: Receipt) -> None:
    with loaded(folder / "tiny.gguf", folder, kv_slots=128) as small:
        result = replay(small, receipt)
        assert result.reproduced
        assert result.notes == ("recorded with a max_len of 256; this engine serves 128, enough for this answer",)
        (long,) = receipts_of(llm, KINDS["up to max_len"])
        with pytest.raises(InputError, match="takes 256 positions of a max_len of 256; at most 128 fit"):
            replay(small, long)
    with loaded(folder / "tiny.gguf", folder, max_len=100) as short:
        assert replay(short, receipt).reproduced  # its own max_len is no limit for others
        (ended,) = receipts_of(short, KINDS["up to max_len"])
        assert prompt_len_of(ended) + len(ended.output.token_ids) == 100
    assert replay(llm, ended).reproduced


# --- the LLM around it --------------------------------------------------------------------------------------------


def test_a_replay_leaves_no_stale_cache_behind(llm: LLM, receipt: Receipt) -> None:
    (before,) = llm.generate([PROMPT], SAMPLED)
    (other,) = receipts_of(llm, SAMPLED, "zzz yyy xxx www vvv uuu ttt sss rrr qqq")
    replay(llm, other)
    (after,) = llm.generate([PROMPT], SAMPLED)
    assert after.digest == before.digest
    llm.engine.check()


def test_streams_that_are_open_are_waited_for(llm: LLM, receipt: Receipt) -> None:
    expected = [e.token_ids for e in llm.stream(PROMPT, SAMPLED)]
    stream = llm.stream(PROMPT, SAMPLED)
    first = next(stream)
    assert replay(llm, receipt).reproduced
    assert sum((e.token_ids for e in stream), first.token_ids) == sum(expected, ())


def test_receipts_are_made_on_request_and_only_of_what_can_be_had_again(llm: LLM) -> None:
    short = SamplingParams(max_tokens=2)
    assert llm.generate([PROMPT], short)[0].receipts == ()
    with pytest.raises(InputError, match="deterministic is off"):
        llm.generate([PROMPT, PROMPT], [short, replace(short, deterministic=False)], receipts=True)
    with pytest.raises(InputError, match="max_tokens is 0"):
        llm.generate([PROMPT], SamplingParams(max_tokens=0, prompt_logprobs=0), receipts=True)
    (done,) = llm.generate([PROMPT], short)
    for reason in (FinishReason.ABORT, FinishReason.ERROR):
        with pytest.raises(InputError, match=f"ended with {reason}"):
            llm.receipt(PROMPT, short, replace(done.samples[0], finish_reason=reason))
    assert not llm.engine.num_running


def test_a_sample_that_failed_has_no_receipt(llm: LLM) -> None:
    everything = dict.fromkeys(range(len(TOKENS)), -1e4)
    (fine,) = llm.generate([PROMPT], SamplingParams(max_tokens=2, logit_bias=everything), receipts=True)  # type: ignore[arg-type]
    assert len(fine.receipts) == 1
    request = llm.request(PROMPT, SamplingParams(max_tokens=9))

    class Broken:
        can_stop = True

        def push(self, token_id: int, *, may_stop: bool = True) -> Any:
            raise RuntimeError("oh")

        def finish(self) -> str:
            return ""

    (failed,) = llm.run([replace(request, text=Broken)], receipts=True)
    assert failed.error is not None
    assert failed.receipts == ()


def test_the_replay_stops_at_the_first_difference(llm: LLM, receipt: Receipt, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 0
    real = Engine.step

    def counted(engine: Engine) -> Any:
        nonlocal steps
        steps += 1
        return real(engine)

    monkeypatch.setattr(Engine, "step", counted)
    changed = redigested(edited(receipt, "output.token_ids", lambda ids: [flipped(ids[0]), *map(flipped, ids[1:])]))
    result = replay(llm, changed)
    assert result.token is not None
    assert result.token.position == prompt_len_of(receipt)
    assert steps <= 2


# --- private receipts ---------------------------------------------------------------------------------------------


def test_a_private_receipt_has_the_same_hashes_and_needs_its_prompt(llm: LLM, receipt: Receipt) -> None:
    private = parse(receipt.private().to_json())
    assert private.is_private
    assert "token_ids" not in plain(private)["prompt"]
    assert (private.digest, private.output, private.is_edited) == (receipt.digest, receipt.output, False)
    ids = receipt.prompt.token_ids
    assert ids is not None
    with pytest.raises(InputError, match="the prompt is needed"):
        replay(llm, private)
    assert replay(llm, private, ids).reproduced
    assert replay(llm, receipt, np.array(ids)).reproduced  # type: ignore[arg-type]
    for wrong in (ids[:-1], (*ids[:-1], flipped(ids[-1])), (*ids, 2**40), (-1,), ()):
        for each in (private, receipt):
            with pytest.raises(InputError, match="not the receipt's"):
                replay(llm, each, wrong)


# --- receipts from anywhere ---------------------------------------------------------------------------------------

DEEP = "[" * 100_000
Change = Callable[[dict[str, Any]], Any]


def put(path: str, value: Any) -> Change:
    def change(data: dict[str, Any]) -> None:
        *parents, key = path.split(".")
        target: Any = data
        for name in parents:
            target = target[int(name)] if isinstance(target, list) else target[name]
        if value is ...:
            del target[key]
        elif isinstance(target, list):
            target[int(key)] = value
        else:
            target[key] = value

    return change


BAD_FIELDS: list[tuple[str, Any, str]] = [
    ("format", 4, "format must be 3, not 4"),
    ("format", 2, "its format is 2, of an older verispec; this one reads format 3"),
    ("format", 2.0, "format must be 3, not 2.0"),
    ("format", True, "format must be 3, not True"),
    ("format", ..., "format must be 3, not None"),
    ("extra", 1, "the field 'extra' is unknown"),
    ("output.extra", 1, "the field 'output.extra' is unknown"),
    ("parameters.sampling.extra", 1, "the field 'parameters.sampling.extra' is unknown"),
    ("verispec", "", "verispec must be printable text"),
    ("verispec", "1\nreproduced", "verispec must be printable text"),
    ("model", [], "model must be an object"),
    ("model", ..., "model is missing"),
    ("model.name", "\x1b[2J", "model.name must be printable"),
    ("model.name", "x" * 300, "model.name must be printable text of 1 to 255"),
    ("model.files", [], "model.files must be a list of 1 to"),
    ("model.files", [1], "model.files[0] must be an object"),
    ("model.files.0.name", "../x", "model.files[0].name must be a file name without directories"),
    ("model.files.0.nbytes", -1, "model.files[0].nbytes must be a whole number"),
    ("model.files.0.nbytes", True, "model.files[0].nbytes must be a whole number"),
    ("model.files.0.sha256", "x" * 64, "model.files[0].sha256 must be 64 hex digits"),
    ("model.files.0.blocks", ["0"], "model.files[0].blocks[0] must be 8 hex digits"),
    ("profile.fingerprint", {"a": 1}, "profile.fingerprint.a must be printable"),
    ("profile.fingerprint", {"a\n": "b"}, "profile.fingerprint name must be printable"),
    ("profile.fingerprint", {str(i): "x" for i in range(99)}, "profile.fingerprint must be an object of at most 64"),
    ("profile.family", [], "profile.family must be a list"),
    ("profile.family", [0], "profile.family[0] must be a whole number"),
    ("profile.hash", "ABCDEF0123456789", "profile.hash must be 16 hex digits"),
    ("profile.kv_dtype", "float16", "the field 'profile.kv_dtype' is unknown"),
    ("prompt.token_ids", None, "prompt.token_ids must be a list"),
    ("prompt.token_ids", [], "prompt.token_ids must be a list"),
    ("prompt.token_ids", [1, "2"], "prompt.token_ids[1] must be a whole number"),
    ("prompt.token_ids", [2**31], "prompt.token_ids[0] must be a whole number"),
    ("parameters.seed", 11, "the field 'parameters.seed' is unknown"),
    ("parameters.sampling.seed", None, "parameters.sampling.seed must be a whole number"),
    ("parameters.sampling.seed", -1, "parameters.sampling.seed must be"),
    ("parameters.sampling.seed", 2**64, "parameters.sampling.seed must be"),
    ("parameters.sampling.seed", 11.0, "parameters.sampling.seed must be"),
    ("parameters.sampling.n", 1.0, "parameters.sampling.n must be a whole number"),
    ("parameters.sampling.stop", "ab", "parameters.sampling.stop must be a list"),
    ("parameters.sample_index", -1, "parameters.sample_index must be"),
    ("parameters.max_len", 1, "parameters.max_len must be"),
    ("parameters.eos_ids", [-1], "parameters.eos_ids[0] must be"),
    ("parameters.sampling", 5, "parameters.sampling must be an object"),
    ("parameters.sampling.top_p", ..., "parameters.sampling.top_p is missing"),
    ("parameters.sampling.top_p", 2, "parameters.sampling.top_p must be in (0, 1]"),
    ("parameters.sampling.temperature", 10**400, "parameters.sampling.temperature must be in [0, 100]"),
    ("parameters.sampling.temperature", [], "parameters.sampling.temperature must be a number"),
    ("parameters.sampling.max_tokens", 0, "parameters.sampling.max_tokens must be from 1"),
    ("parameters.sampling.logit_bias", [[1, 2]], "parameters.sampling.logit_bias must be an object"),
    ("parameters.sampling.logit_bias", {"01": 1}, "parameters.sampling.logit_bias must be an object"),
    ("parameters.sampling.logit_bias", {"1": "x"}, "parameters.sampling.logit_bias must be a number"),
    ("parameters.sampling.stop", {"a": 1}, "parameters.sampling.stop must be"),
    ("parameters.sampling.stop_ids", 5, "parameters.sampling.stop_ids must be"),
    ("output.token_ids", {}, "output.token_ids must be a list"),
    ("output.token_ids", [None], "output.token_ids[0] must be a whole number"),
    ("output.finish_reason", "error", "output.finish_reason must be stop or length"),
    ("output.finish_reason", 1, "output.finish_reason must be"),
    ("output.token_ids", [], "output.token_ids must be a list of 1 to"),
    ("output.logprob_digests", ["0"], "output.logprob_digests[0] must be 64 hex digits"),
    ("digest", "0" * 63, "digest must be 64 hex digits"),
    ("digest", ..., "digest is missing"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "value", "words"), BAD_FIELDS, ids=[f"{p}-{i}" for i, (p, *_) in enumerate(BAD_FIELDS)]
)
def test_a_bad_field_is_one_sentence_that_names_it(receipt: Receipt, path: str, value: Any, words: str) -> None:
    data = plain(receipt)
    put(path, value)(data)
    with pytest.raises(InputError) as refused:
        parse(json.dumps(data), name="r.json")
    assert str(refused.value).startswith("r.json: ")
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "blank"),
        ("null", "must be an object"),
        (DEEP, "nested too deeply"),
        ('{"format": 3, "output": ' + DEEP, "nested too deeply"),
        ('{"format": NaN}', "NaN"),
        ('{"format": 1, "format": 1}', "the key 'format' twice"),
        ('{"format": ' + "9" * 5000 + "}", "too many digits"),
        (b'{"format": "\xff"}', "is not UTF-8"),
        ("\ud800", "is not UTF-8"),
        (" " * (MAX_OBJECT_NBYTES + 1), "the limit is"),
    ],
    ids=range(10),
)
def test_what_is_no_object_is_refused(text: str | bytes, words: str) -> None:
    with pytest.raises(InputError) as refused:
        parse(text)
    assert words in str(refused.value)


def test_cut_off_anywhere_or_with_any_byte_changed_a_receipt_is_refused_or_found_edited(llm: LLM) -> None:
    (receipt,) = receipts_of(llm, SamplingParams(max_tokens=3), [1, 2])
    data = receipt.to_json().encode()
    for end in range(len(data)):
        with pytest.raises(InputError):
            parse(data[:end])
    refused = found = 0
    for i in range(len(data)):
        for byte in (0x00, 0xFF, ord('"'), ord("7"), ord("}"), data[i] ^ 1):
            try:
                changed = parse(data[:i] + bytes([byte]) + data[i + 1 :])
            except InputError:
                refused += 1
                continue
            if changed != receipt:
                assert changed.is_edited or changed.contradictions(), (i, byte)
                found += 1
    assert refused > 2 * len(data)
    assert found > len(data) // 2

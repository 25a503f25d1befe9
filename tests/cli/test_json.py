"""`generate --json`: one object that says everything, and enough to get it again."""

from __future__ import annotations

import hashlib
import struct

import pytest

from tests.cli.conftest import Cli

FIELDS = {
    "text", "token_ids", "logprobs", "finish_reason", "prompt_tokens", "seed", "digest", "profile", "stats",
}  # fmt: skip
STATS = {
    "drafter", "passes", "fast_passes", "draft_passes", "drafted", "accepted", "replays", "mismatches", "recomputed",
    "recomputed_fraction", "accepted_per_replay", "preemptions", "tokens_per_pass", "tokens_per_second",
    "prompt_tokens_per_second", "cached_tokens",
    "time_to_first_token", "longest_gap", "longest_stall", "stall_caused", "chosen", "chosen_because", "accepted_by",
    "no_draft_reason", "exit_threshold", "exit_rate",
}  # fmt: skip


def test_the_object_is_complete_and_consistent(cli: Cli) -> None:
    done = cli("generate", "Name a colour.", "--json", "--max-tokens", "6", "--seed", "3", "--temperature", "0.8")
    assert (done.code, done.err) == (0, "")
    found = done.json()
    assert set(found) == FIELDS
    assert set(found["stats"]) == STATS
    count = len(found["token_ids"])
    assert len(found["logprobs"]) == count <= 6
    packed = struct.pack(f"<{count}i", *found["token_ids"]) + struct.pack(f"<{count}f", *found["logprobs"])
    assert found["digest"] == hashlib.sha256(packed).hexdigest()
    stats = found["stats"]
    assert stats["tokens_per_pass"] == count / (stats["passes"] + stats["fast_passes"])
    assert 0 <= stats["accepted"] <= stats["drafted"]
    assert (stats["no_draft_reason"] is None) == bool(stats["drafted"])


def test_nothing_drafted_has_its_reason(cli: Cli) -> None:
    stats = cli("generate", "hi", "--json", "--max-tokens", "4", "--drafter", "none").json()["stats"]
    assert (stats["drafter"], stats["drafted"]) == ("none", 0)
    assert stats["no_draft_reason"]


def test_the_reported_seed_gives_the_digest_again(cli: Cli) -> None:
    arguments = ["generate", "Once upon a time", "--json", "--max-tokens", "8", "--temperature", "1.5"]
    first = cli(*arguments).json()
    again = cli(*arguments, "--seed", str(first["seed"]), "--drafter", "none").json()
    other = cli(*arguments, "--seed", str((first["seed"] + 1) % 2**64)).json()
    assert again["digest"] == first["digest"]
    assert other["digest"] != first["digest"]


def test_several_samples_differ_and_the_first_is_the_object_itself(cli: Cli) -> None:
    found = cli(
        "generate", "hi", "--json", "-n", "3", "--max-tokens", "6", "--temperature", "1.5", "--seed", "1"
    ).json()
    samples = found["samples"]
    assert len({sample["digest"] for sample in samples}) == 3
    assert samples[0]["digest"] == found["digest"]


@pytest.mark.parametrize(
    ("options", "reason"), [(["--max-tokens", "2"], "length"), (["--stop", "Paris"], "stop"), ([], "stop")]
)
def test_why_it_ended(cli: Cli, options: list[str], reason: str) -> None:
    found = cli("generate", "What is the capital of France?", "--json", *options).json()
    assert found["finish_reason"] == reason
    assert ("Paris" in found["text"]) == (options == [])


def test_control_characters_stay_escaped(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verispec.batch.prompts.as_object", lambda *_, **__: {"text": "\x1b[2J\x9b2J\x7fé"})
    done = cli("generate", "hi", "--json", "--max-tokens", "1")
    assert done.out == '{"text": "\\u001b[2J\\u009b2J\\u007fé"}\n'
    assert done.json()["text"] == "\x1b[2J\x9b2J\x7fé"

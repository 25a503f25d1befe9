"""Draft trees on the command line: how they look, the options that ask for them, and one sentence for every mistake."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Cli
from tests.support.tiny_llm import CONFIG, TOKENS, write_model
from verispec.backends.calibration import Calibration, calibrate
from verispec.backends.cost import FLAT_COST
from verispec.cli.show import BOLD, GREEN, PLAIN, RED, tree_lines
from verispec.cli.terminal import safe
from verispec.model.hub import known_models
from verispec.types import NO_PARENT, Draft, DraftTrace, Verdict

# Tree text


def trace(parents: list[int], path: list[int], *, bonus_id: int = 9, probabilities: bool = True) -> DraftTrace:
    """A draft whose node i has token i."""
    count = len(parents)
    shares = tuple(0.5 / (1 + i) for i in range(count))
    draft = Draft(tuple(range(count)), tuple(parents), shares if probabilities else ())
    return DraftTrace(draft, Verdict(tuple(path), bonus_id), tuple(1 - p for p in shares), "model")


def lines(drafted: DraftTrace, *, paint: bool = False, text: Callable[[int], str] = "abcdefghij".__getitem__) -> str:
    return "\n".join(tree_lines(drafted, text, paint=paint))


def test_branches_hang_under_their_parents_and_the_bonus_behind_the_path() -> None:
    assert lines(trace([NO_PARENT, NO_PARENT, 0, 0, 1, 3], [0, 3])) == (
        "├─ 'a'  draft 0.500  target 0.500  accepted\n"
        "│  ├─ 'c'  draft 0.167  target 0.833  rejected\n"
        "│  └─ 'd'  draft 0.125  target 0.875  accepted\n"
        "│     ├─ 'f'  draft 0.083  target 0.917  rejected\n"
        "│     └─ 'j'  the target's own\n"
        "└─ 'b'  draft 0.250  target 0.750  rejected\n"
        "   └─ 'e'  draft 0.100  target 0.900  rejected"
    )


def test_a_chain_with_nothing_accepted_and_one_with_everything() -> None:
    assert lines(trace([NO_PARENT, 0], [])) == (
        "├─ 'a'  draft 0.500  target 0.500  rejected\n"
        "│  └─ 'b'  draft 0.250  target 0.750  rejected\n"
        "└─ 'j'  the target's own"
    )
    assert lines(trace([NO_PARENT, 0], [0, 1])) == (
        "└─ 'a'  draft 0.500  target 0.500  accepted\n"
        "   └─ 'b'  draft 0.250  target 0.750  accepted\n"
        "      └─ 'j'  the target's own"
    )


def test_a_drafter_without_probabilities_and_a_draft_without_nodes() -> None:
    assert lines(trace([NO_PARENT], [], probabilities=False)) == (
        "├─ 'a'  draft   -    target 0.500  rejected\n└─ 'j'  the target's own"
    )
    assert lines(trace([], [])) == "└─ 'j'  the target's own"


def test_painted_the_path_is_green_the_rest_red_and_the_bonus_bold() -> None:
    drafted = trace([NO_PARENT, NO_PARENT, 0, 0, 1, 3], [0, 3])
    painted, plain = lines(drafted, paint=True), lines(drafted)
    assert "\x1b" not in plain
    assert re.sub(r"\x1b\[\d*m", "", painted) == plain
    for line in painted.splitlines():
        colour = GREEN if "accepted" in line else RED if "rejected" in line else BOLD
        assert re.search(r"\x1b\[\d+m", line)[0] == colour  # type: ignore[index]
        assert line.endswith(PLAIN)
        assert not re.match(r"[│├└─ ]*[^│├└─ \x1b]", line), "the stems are not coloured"


def test_every_node_has_a_line_of_its_own_whatever_the_tokens_hold() -> None:
    """Control characters, line ends and colours of a token are shown as what they are."""
    nasty = {0: "a\nb", 1: "\x1b[31mred", 2: "\t\r", 3: "\x9b2J\x07", 4: "it's", 5: 'say "x"', 9: "\u2028\x00"}
    drafted = trace([NO_PARENT, NO_PARENT, 0, 0, 1, 3], [0, 3])
    for paint in (False, True):
        shown = list(tree_lines(drafted, nasty.__getitem__, paint=paint))
        assert len(shown) == 7
        joined = re.sub(r"\x1b\[\d*m", "", "\n".join(shown)) if paint else "\n".join(shown)
        assert safe(joined) == joined
        assert len(joined.splitlines()) == 7
    assert "'a\\nb'" in shown[0]
    assert "\\x1b[31mred" in "".join(shown)


# The command


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture
def tiny(bare_cli: Cli, model: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """`generate` on a tiny model that is its own draft model; the calibration is kept beside it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(model.parent))

    def call(*arguments: str, draft: bool = True) -> Any:
        drafting = ["--draft-model", str(model), "--drafter", "model", "--force"] if draft else []
        return bare_cli("generate", "--raw", "abc the other", "--model", str(model), *drafting, *arguments)

    return call


def test_show_tree_shows_the_last_drafts_on_stderr(tiny: Cli) -> None:
    plain = tiny("--max-tokens", "30", "-q", draft=False)
    done = tiny("--max-tokens", "30", "--tree", "beam:3,3", "--show-tree")
    assert (done.code, done.out) == (0, plain.out)
    shown = done.err.splitlines()
    heads = [line for line in shown if re.fullmatch(r"draft \d of the last 3 \(model\): \d+ nodes, \d accepted", line)]
    assert [head[6] for head in heads] == ["1", "2", "3"]
    assert re.search(r"\d+ new .*, drafts \d+/\d+, .*digest", shown[-1])
    nodes = sum(int(head.split(":")[1].split()[0]) for head in heads)
    accepted = sum(int(head.split(",")[1].split()[0]) for head in heads)
    assert sum("  draft 0." in line or "  draft 1." in line for line in shown) == nodes > 9
    assert sum(line.endswith("  accepted") for line in shown) == accepted > 0
    assert sum(line.endswith("  the target's own") for line in shown) == 3
    assert "\x1b" not in done.err, "no colours where stderr is no terminal"


@pytest.fixture
def flat_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the clock says of this machine, a draft is worth its rows."""

    def calibrated(*arguments: Any, **options: Any) -> Calibration:
        return replace(calibrate(*arguments, **options), cost=FLAT_COST, records=())

    monkeypatch.setattr("verispec.runtime.calibrate", calibrated)


@pytest.mark.usefixtures("flat_cost")
def test_show_tree_of_drafts_from_the_text_and_of_none(tiny: Cli) -> None:
    suffix = tiny("--max-tokens", "40", "--drafter", "suffix", "--show-tree", "-q", draft=False)
    assert suffix.code == 0
    node = r"^[│├└─ ]+'.*'  draft [01]\.\d{3}  target \d\.\d{3}  (accepted|rejected)$"
    assert re.search(node, suffix.err, re.MULTILINE)
    nothing = tiny("--max-tokens", "5", "--drafter", "none", "--show-tree", "-q", draft=False)
    assert (nothing.code, nothing.err) == (0, "no drafts to show\n")


@pytest.mark.usefixtures("flat_cost")
def test_show_tree_says_who_drafted(tiny: Cli) -> None:
    forced = tiny("--max-tokens", "16", "--regex", "(abc){5}", "--drafter", "suffix", "--show-tree", "-q", draft=False)
    assert forced.out == "abcabcabcabcabc\n"
    assert re.search(r"^draft 1 of the last \d \(grammar\): \d+ nodes?, \d+ accepted$", forced.err, re.MULTILINE)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--tree", "chain:3", "--accept", "rejection"],
        ["--tree", "beam:3,3", "--accept", "recursive"],
        ["--tree", "branch:2,2", "--accept", "recursive"],
    ],
    ids=" ".join,
)
def test_rules_of_probabilities_run_and_are_told_in_the_figures(tiny: Cli, arguments: list[str]) -> None:
    sampled = ["--max-tokens", "20", "--temperature", "1", "--seed", "1", "--no-deterministic"]
    stats = tiny(*sampled, *arguments, "--json").json()["stats"]
    assert stats["drafter"] == "model"
    assert 0 < stats["accepted"] <= stats["drafted"]
    assert stats["draft_passes"] > 0
    shown = tiny(*sampled, *arguments, "--show-tree")
    assert shown.code == 0
    assert "  the target's own" in shown.err


def test_json_counts_what_trees_did(tiny: Cli) -> None:
    plain = tiny("--max-tokens", "30", "--json", draft=False).json()
    found = tiny("--max-tokens", "30", "--tree", "branch:2,1,1", "--json").json()
    assert (found["digest"], found["profile"]) == (plain["digest"], plain["profile"])
    stats = found["stats"]
    assert set(stats["chosen"]) <= {"plain", "model"}
    assert stats["drafted"] % 2 == 0, "each level of branch:2,1,1 has two nodes"
    assert 6 <= stats["drafted"] <= 6 * stats["chosen"]["model"]
    assert 3 <= stats["draft_passes"] <= 3 * stats["chosen"]["model"]
    assert stats["tokens_per_pass"] > 1.5, "the model drafts for itself"
    assert stats["no_draft_reason"] is None


def test_restraint_is_told(tiny: Cli, tmp_path: Path) -> None:
    """Without --force a draft model far larger than the model is not used, and the figures say why."""
    large = write_model(tmp_path / "large.gguf", replace(CONFIG, num_layers=24, hidden_size=256, mlp_size=1024))
    done = tiny("--max-tokens", "6", "--draft-model", str(large), "--drafter", "model", draft=False)
    assert re.search(
        r"nothing drafted: the draft model predicted 0\.\d\dx on this model and device; not drafting; "
        r"--force to draft anyway\n",
        done.err,
    )


def named(value: Any) -> str:
    return " ".join(value)[:40] if isinstance(value, list) else ""


MISTAKES: list[tuple[list[str], str]] = [
    (["--drafter", "model"], "verispec: --drafter model needs --draft-model"),
    (["--tree", "beam:3"], "verispec: --tree must be chain:N, branch:b1,b2,... or beam:W,L with whole numbers from 1 "
                           "to 999, not 'beam:3'"),
    (["--tree", "beam:99,99"], "verispec: --tree beam:99,99 has 9801 nodes; at most 256 are possible"),
    (["--tree", "chain:3", "--draft-len", "4"],
     "verispec: --tree chain:3 and --draft-len 4 contradict each other"),
    (["--tree", "chain:0", "--draft-len", "4"], "verispec: --tree must be chain:N, branch:b1,b2,... or beam:W,L with "
                                                "whole numbers from 1 to 999, not 'chain:0'"),
    (["--drafter", "model", "--draft-model", "no-such-model"],
     "verispec: --draft-model: 'no-such-model' is neither an existing path nor a known model; known models: "
     f"{', '.join(known_models())}, and other Hugging Face ids such as org/name"),
    (["--accept", "recursive", "--receipt", "r.json", "--no-deterministic"],
     "verispec: --receipt needs an answer that can be had again, which --no-deterministic gives up"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "sentence"), MISTAKES, ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else ""
)
def test_a_mistake_is_one_sentence(tiny: Cli, arguments: list[str], sentence: str) -> None:
    done = tiny(*arguments, draft=False)
    assert (done.code, done.out, done.err) == (2, "", sentence + "\n")


SENSELESS: list[tuple[list[str], str]] = [
    (["--drafter", "decode", "--tree", "chain:3"],
     "--tree chain:3 needs a drafter of trees (suffix, skip, model, auto), not 'decode'"),
    (["--drafter", "none", "--tree", "beam:2,2"],
     "--tree beam:2,2 needs a drafter of trees (suffix, skip, model, auto), not 'none'"),
    (["--drafter", "model", "--accept", "recursive"],
     "--accept recursive lets tokens depend on the drafter, the tree and the load, so it needs --no-deterministic"),
    (["--drafter", "suffix", "--accept", "rejection", "--no-deterministic"],
     "--accept rejection needs the probabilities of drafter skip or model, not 'suffix'"),
    (["--drafter", "auto", "--accept", "recursive", "--no-deterministic"],
     "--accept recursive needs the probabilities of drafter skip or model, not 'auto'"),
    (["--drafter", "model", "--accept", "rejection", "--tree", "beam:2,2", "--no-deterministic"],
     "--accept rejection is for chains; tree beam:2,2 needs accept recursive"),
]  # fmt: skip


@pytest.mark.parametrize("as_json", [False, True], ids=["stream", "json"])
@pytest.mark.parametrize(
    ("arguments", "sentence"), SENSELESS, ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else ""
)
def test_a_request_that_makes_no_sense_is_told_in_flags(
    tiny: Cli, model: Path, arguments: list[str], sentence: str, as_json: bool
) -> None:
    second = ["--draft-model", str(model)] if {"model", "auto"} & set(arguments) else []
    done = tiny(*second, *arguments, *["--json"] * as_json, draft=False)
    assert (done.code, done.out, done.err) == (2, "", f"verispec: {sentence}\n")


def test_what_agrees_is_accepted_and_what_has_no_effect_is_said(tiny: Cli, model: Path) -> None:
    short = ["--max-tokens", "3"]
    implied = tiny("--draft-model", str(model), "--force", "--json", *short, draft=False).json()
    assert implied["stats"]["drafter"] == "model"
    assert tiny("--tree", "chain:2", "--draft-len", "2", *short).code == 0
    assert tiny("--tree", "branch:2,1", "--draft-len", "2", *short).code == 0
    vain = ["--draft-model", "no-such-model", "--drafter", "none", "--force"]
    done = tiny(*vain, "--json", "--show-tree", "--color", "drafts", *short, draft=False)
    assert (done.code, done.json()["digest"]) == (0, implied["digest"])
    assert done.err.splitlines()[:4] == [
        "note: --color has no effect with --json",
        "note: --show-tree has no effect with --json",
        "note: --draft-model has no effect with --drafter none",
        "note: --force has no effect with --drafter none",
    ]
    assert tiny(*vain, "-q", *short, draft=False).err == ""


def test_a_draft_model_of_another_vocabulary_is_refused(tiny: Cli, tmp_path: Path) -> None:
    tokens = ["A" if token == "a" else token for token in TOKENS]
    other = write_model(tmp_path / "other.gguf", tokens=tokens, merges=["t h", "e r"])
    done = tiny("--draft-model", str(other), "--drafter", "model", draft=False)
    assert (done.code, done.err) == (
        2,
        "verispec: the draft model's vocabulary is not the model's: token 1 is 'A' there and 'a' here\n",
    )


def test_chat_tells_it_in_flags_too(bare_cli: Cli, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(model.parent))
    done = bare_cli("chat", "--model", str(model), "--drafter", "none", "--tree", "chain:3", stdin=b"abc\n")
    assert (done.code, done.out) == (2, "")
    assert done.err == ("verispec: --tree chain:3 needs a drafter of trees (suffix, skip, model, auto), not 'none'\n")


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_help_names_every_option_of_drafting(bare_cli: Cli, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    done = bare_cli(command, "--help")
    for words in (
        "--drafter", "--draft-len", "--draft-model", "--tree", "SHAPE", "--accept", "--force", "--no-deterministic",
        "chain:N", "branch:3,2,1", "beam:W,L", "rejection", "recursive",
    ):  # fmt: skip
        assert words in done.out, words
    assert ("--show-tree" in done.out) == (command == "generate")


def test_drafts_do_not_reach_the_answer_of_a_batch(tiny: Cli, model: Path, tmp_path: Path, bare_cli: Cli) -> None:
    """`--prompts` with trees gives what it gives without."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "abc the"}\n{"prompt": "other", "temperature": 1, "seed": 3}\n')
    common = ["generate", "--raw", "--prompts", str(prompts), "--model", str(model), "--max-tokens", "20", "-q"]
    plain = bare_cli(*common, "--drafter", "none").json_lines()
    drafted = bare_cli(
        *common, "--stats", "--draft-model", str(model), "--drafter", "model", "--force", "--tree", "beam:2,3"
    ).json_lines()
    assert [line["digest"] for line in drafted] == [line["digest"] for line in plain]
    assert all(line["stats"]["drafted"] > 0 for line in drafted)

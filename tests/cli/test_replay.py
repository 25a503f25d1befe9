"""`generate --receipt` and `replay` as a person meets them: files, sentences and exit codes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Cli, press_ctrl_c, verispec
from tests.support.tiny_llm import TOKENS, write_model
from verispec.backends.cost import CostTable
from verispec.cli import receipt_file
from verispec.engine import Engine
from verispec.llm import LLM
from verispec.model.hub import REGISTRY
from verispec.receipt.values import FORMAT
from verispec.types import SamplingParams

SAMPLED = ["--temperature", "1", "--max-tokens", "40", "--seed", "5", "--ignore-eos"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def tiny(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A tiny model's path; its audit is kept for the other tests of this file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return str(write_model(tmp_path / "tiny.gguf"))


@pytest.fixture
def receipt(bare_cli: Cli, tiny: str, tmp_path: Path) -> Path:
    """The receipt of 40 tokens after the prompt "user: the abba "."""
    path = tmp_path / "r.json"
    assert bare_cli("generate", "-q", "-m", tiny, "the abba", *SAMPLED, "--receipt", str(path)).code == 0
    return path


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> str:
    data = json.loads(path.read_text())
    change(data)
    target = path.with_name("edited.json")
    target.write_text(json.dumps(data))
    return str(target)


# --- writing ------------------------------------------------------------------------------------------------------


def test_a_receipt_beside_the_answer(bare_cli: Cli, tiny: str, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text("what was here before")
    done = bare_cli("generate", "-m", tiny, "the abba", *SAMPLED, "--receipt", str(path))
    assert done.code == 0
    figures, note = done.err.splitlines()[-2:]  # behind what is said where kernels are missing
    assert " prompt tokens" in figures
    assert note == f"receipt in {path}"
    (line,) = path.read_text().splitlines()
    data = json.loads(line)
    assert len(data["output"]["token_ids"]) == 40
    assert data["parameters"]["sampling"]["seed"] == 5
    assert "token_ids" in data["prompt"]
    assert {p.name for p in tmp_path.iterdir()} == {"r.json", "tiny.gguf"}
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()
    quiet = bare_cli("generate", "-q", "-m", tiny, "the abba", *SAMPLED, "--receipt", str(path), "--drafter", "none")
    assert quiet.err == ""
    assert path.read_text() == line + "\n"


def test_a_receipt_does_not_replace_what_is_read(bare_cli: Cli, tiny: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "the abba"}\n')
    done = bare_cli("generate", "-m", tiny, "--prompts", str(path), *SAMPLED, "--receipt", str(path))
    assert done.code == 2
    assert done.err == f"verispec: --receipt {path}: is a file that this command reads\n"
    assert path.read_text() == '{"prompt": "the abba"}\n'


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_samples_and_prompts_give_one_receipt_per_line_in_input_order(bare_cli: Cli, tiny: str, tmp_path: Path) -> None:
    path, prompts = tmp_path / "r.jsonl", tmp_path / "p.jsonl"
    done = bare_cli("generate", "-m", tiny, "ab", *SAMPLED, "-n", "3", "--json", "--receipt", str(path))
    assert done.err == f"3 receipts in {path}\n"
    receipts = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["parameters"]["sample_index"] for r in receipts] == [0, 1, 2]
    assert [r["output"]["token_ids"] for r in receipts] == [s["token_ids"] for s in done.json()["samples"]]
    lines = [{"prompt": "ab", "max_tokens": 30}, {"prompt": "cd", "max_tokens": 1, "n": 2}, {"prompt": ""},
             {"prompt": "ef", "deterministic": False}]  # fmt: skip
    prompts.write_text("\n".join(map(json.dumps, lines)))
    done = bare_cli("generate", "-q", "-m", tiny, "--prompts", str(prompts), "--receipt", str(path))
    assert done.code == 2
    assert "deterministic is off" in done.json_lines()[3]["error"]
    receipts = [json.loads(line) for line in path.read_text().splitlines()]
    assert [len(r["output"]["token_ids"]) for r in receipts] == [30, 1, 1]
    assert bare_cli("replay", str(path), "-m", tiny).code == 0


def test_ctrl_c_keeps_the_receipts_of_what_is_finished(
    bare_cli: Cli, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(engine: Engine) -> Any:
        nonlocal steps
        steps += 1
        if steps == 3:  # behind the prompts and one burst
            press_ctrl_c()
        return real_step(engine)

    steps, real_step = 0, Engine.step
    lines = [{"prompt": "ab", "max_tokens": 40}, {"prompt": "cd", "max_tokens": 1}]
    path = tmp_path / "r.jsonl"
    stdin = "\n".join(map(json.dumps, lines)).encode()
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", step)
        arguments = ["generate", "-q", "-m", tiny, "--ignore-eos", "--drafter", "none", "--receipt", str(path)]
        done = bare_cli(*arguments, "--prompts", "-", stdin=stdin)
        assert done.code == 130
        assert len(path.read_text().splitlines()) == 1
        steps = 0
        other = tmp_path / "other.json"
        assert bare_cli(*arguments[:-1], str(other), "ab").code == 130
        assert not other.exists()
    assert {p.name for p in tmp_path.iterdir()} == {"r.jsonl", "tiny.gguf"}
    assert bare_cli("replay", str(path), "-m", tiny).out.startswith("reproduced: 1 token ")


def test_what_cannot_be_written_is_found_before_generating(
    bare_cli: Cli, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(**options: Any) -> LLM:
        raise AssertionError("the model was loaded")

    def sentence(*arguments: str) -> str:
        done = bare_cli("generate", "x", "-m", tiny, *arguments)
        assert (done.code, done.out) == (2, "")
        (line,) = done.err.splitlines()
        return line.removeprefix("verispec: ")

    (tmp_path / "folder").mkdir()
    monkeypatch.setattr("verispec.llm.LLM", never)
    missing = str(tmp_path / "no" / "r.json")
    assert sentence("--receipt", missing) == f"--receipt {missing}: No such file or directory"
    assert sentence("--receipt", str(tmp_path / "folder")).endswith("is not a file that can be written")
    assert "takes the name of a file" in sentence("--receipt", "-")
    assert "takes the name of a file" in sentence("--receipt", "")
    assert sentence("--receipt-private") == "--receipt-private needs --receipt FILE"
    assert sentence("--receipt", "r.json", "--no-deterministic") == (
        "--receipt needs an answer that can be had again, which --no-deterministic gives up"
    )
    assert not Path("r.json").exists()


def test_a_full_disk_leaves_the_old_file(
    bare_cli: Cli, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "r.json"
    path.write_text("old")
    monkeypatch.setattr(receipt_file.os, "fsync", full)
    done = bare_cli("generate", "-q", "-m", tiny, "ab", "--max-tokens", "2", "--receipt", str(path))
    assert done.code == 2
    assert done.err == f"verispec: --receipt {path}: No space left on device\n"
    assert path.read_text() == "old"
    assert {p.name for p in tmp_path.iterdir()} == {"r.json", "tiny.gguf"}


# --- replaying ----------------------------------------------------------------------------------------------------


def test_a_receipt_is_reproduced(bare_cli: Cli, tiny: str, receipt: Path) -> None:
    done = bare_cli("replay", str(receipt), "-m", tiny)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("reproduced: 40 tokens with log-probabilities, in ")
    found = bare_cli("replay", "-", "-m", tiny, "--json", stdin=receipt.read_bytes()).json()
    assert (found["reproduced"], found["agrees"], found["edited"]) == (True, True, False)
    assert (found["num_tokens"], found["num_equal"]) == (40, 40)
    pretty = receipt.with_name("pretty.json")
    pretty.write_text(json.dumps(json.loads(receipt.read_text()), indent=2, sort_keys=True))
    assert bare_cli("replay", str(pretty), "-m", tiny).code == 0


@pytest.mark.usefixtures("native_kernels")
def test_a_gpus_receipt_is_reproduced_where_there_is_none(bare_cli: Cli, tiny: str, tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    made = ("generate", "-q", "-m", tiny, "the abba", *SAMPLED, "--receipt", str(path))
    assert bare_cli(*made, "--backend", "hopper").code == 0
    assert json.loads(path.read_text())["profile"]["fingerprint"]["arithmetic"] == "hopper-1"
    assert bare_cli("replay", str(path), "-m", tiny).out.startswith("reproduced: 40 tokens with log-probabilities, in ")
    # The control: another backend has other bits, and says so.
    done = bare_cli("replay", str(path), "-m", tiny, "--backend", "native")
    assert "arithmetic is cpu-1 here, hopper-1 there" in done.out
    assert "log-probabilities differ" in done.out or "position" in done.out


def test_the_first_tokens_alone(bare_cli: Cli, tiny: str, receipt: Path) -> None:
    def replayed(first: int, file: str = str(receipt)) -> tuple[int, dict[str, Any]]:
        done = bare_cli("replay", file, "-m", tiny, "--first", str(first), "--json")
        return done.code, done.json()

    text = bare_cli("replay", str(receipt), "-m", tiny, "--first", "35")
    assert text.out.startswith("reproduced: the first 35 of 40 tokens, and log-probabilities of 32, in ")
    code, found = replayed(35)
    assert (code, found["reproduced"], found["num_checked"], found["num_equal"]) == (0, True, 35, 35)
    assert found["found_finish"] is None
    for first in (40, 1000):  # that is all
        assert replayed(first)[1]["num_checked"] is None
        assert replayed(first)[1]["found_finish"] == "length"
    # What differs behind the first tokens is not looked at; what differs among them is.
    flipped = edit(receipt, lambda d: d["output"]["token_ids"].__setitem__(17, (d["output"]["token_ids"][17] + 1) % 9))
    assert replayed(17, flipped)[1]["tokens_equal"] is True
    assert replayed(18, flipped)[1]["first_token_difference"]["position"] == prompt_len(receipt) + 17
    forged = edit(receipt, lambda d: d["output"]["logprob_digests"].__setitem__(0, "0" * 64))
    assert replayed(31, forged)[1]["logprobs_equal"] is True  # no whole block
    assert replayed(32, forged)[1]["logprobs_equal"] is False
    assert bare_cli("replay", str(receipt), "-m", tiny, "--first", "0").code == 2


def prompt_len(receipt: Path) -> int:
    return len(json.loads(receipt.read_text())["prompt"]["token_ids"])


def test_what_takes_long_is_announced(bare_cli: Cli, tiny: str, receipt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bare_cli("replay", str(receipt), "-m", tiny).err == ""
    monkeypatch.setattr(CostTable, "seconds", lambda self, num_rows, context_tokens: num_rows / 2)
    whole = bare_cli("replay", str(receipt), "-m", tiny).err
    assert whole == f"replaying 40 tokens: about 0:00:{(40 + prompt_len(receipt)) // 2:02}\n"
    assert "replaying 10 tokens: " in bare_cli("replay", str(receipt), "-m", tiny, "--first", "10").err


def test_a_flipped_token_is_named_with_its_position(bare_cli: Cli, tiny: str, receipt: Path) -> None:
    data = json.loads(receipt.read_text())
    old = data["output"]["token_ids"][17]
    new = (old + 1) % len(TOKENS)
    position = len(data["prompt"]["token_ids"]) + 17
    done = bare_cli("replay", edit(receipt, lambda d: d["output"]["token_ids"].__setitem__(17, new)), "-m", tiny)
    assert done.code == 1
    verdict, edited = done.out.splitlines()
    assert verdict.startswith(f"NOT reproduced: position {position} differs: recorded token {new} ")
    assert f", found token {old} " in verdict
    assert edited == "  the receipt was edited since it was written"
    found = bare_cli("replay", str(receipt.with_name("edited.json")), "-m", tiny, "--json")
    assert found.code == 1
    assert found.json()["first_token_difference"] == {"position": position, "recorded": new, "found": old}


def test_other_differences_in_words(bare_cli: Cli, tiny: str, receipt: Path) -> None:
    def said(change: Callable[[dict[str, Any]], Any]) -> str:
        done = bare_cli("replay", edit(receipt, change), "-m", tiny)
        assert done.code == 1
        return done.out

    num_prompt = len(json.loads(receipt.read_text())["prompt"]["token_ids"])
    shorter = said(lambda d: d["output"]["token_ids"].pop())
    assert f"position {num_prompt + 39} differs: recorded the end (length), found token " in shorter
    longer = said(lambda d: d["output"]["token_ids"].append(1))
    assert f"position {num_prompt + 40} differs: recorded token 1 'a', found the end (length)" in longer
    block = said(lambda d: d["output"]["logprob_digests"].__setitem__(1, "0" * 64))
    differ = f"log-probabilities differ, first in positions {num_prompt + 32} to {num_prompt + 39}"
    assert f"NOT reproduced: tokens equal, {differ}\n  the receipt was edited since it was written\n" in block
    for change in (
        lambda d: d["parameters"]["sampling"].update(logprobs=3),
        lambda d: d.update(verispec="9.9"),
        lambda d: d["model"].update(name="another"),
    ):
        harmless = said(change)
        assert "NOT reproduced: the receipt was edited; tokens equal, log-probabilities equal" in harmless
        assert "edited since it was written: a name, the version, the digest, or a parameter that" in harmless
    eos = said(lambda d: d["parameters"].update(eos_ids=[0, 5]))
    assert "NOT reproduced: the receipt was edited; tokens equal" in eos
    assert "parameters.eos_ids is [0, 5], but must be [0]" in eos
    outside = said(lambda d: d["output"]["token_ids"].append(999))
    assert "it cannot be run: output.token_ids holds 999" in outside


def test_a_receipt_that_cannot_be_true_is_refused_with_a_right_digest_too(
    bare_cli: Cli, tiny: str, receipt: Path
) -> None:
    def forge(data: dict[str, Any]) -> None:
        data["parameters"]["sample_index"] = 2
        del data["digest"]
        signed = {**data, "prompt": {"sha256": data["prompt"]["sha256"]}}
        text = json.dumps(signed, sort_keys=True, separators=(",", ":"))
        data["digest"] = hashlib.sha256(text.encode()).hexdigest()

    done = bare_cli("replay", edit(receipt, forge), "-m", tiny)
    assert done.code == 1
    assert "edited" not in done.out
    assert "\n  parameters.sample_index is 2, but must be below n=1\n" in done.out
    found = bare_cli("replay", str(receipt.with_name("edited.json")), "-m", tiny, "--json").json()
    assert (found["edited"], found["reproduced"], found["agrees"]) == (False, False, False)
    (difference,) = found["field_differences"]
    assert difference == {"name": "parameters.sample_index", "recorded": "2", "found": "below n=1"}


def test_another_model_file_is_named_with_the_bytes(bare_cli: Cli, tiny: str, receipt: Path, tmp_path: Path) -> None:
    data = bytearray(Path(tiny).read_bytes())
    data[-1] ^= 0x80
    (tmp_path / "other.gguf").write_bytes(data)
    done = bare_cli("replay", str(receipt), "-m", str(tmp_path / "other.gguf"))
    assert done.code == 1
    verdict, difference, note = done.out.splitlines()
    assert verdict.startswith("NOT reproduced: ")
    assert " differ" in verdict
    assert difference == (
        "  the model differs: other.gguf is not the recorded tiny.gguf, somewhere in bytes "
        f"0 to {len(data) - 1}"
    )  # fmt: skip
    assert note == "  note: the receipt calls its model tiny.gguf; here it is other.gguf"
    (found,) = bare_cli("replay", str(receipt), "-m", str(tmp_path / "other.gguf"), "--json").json()[
        "model_differences"
    ]
    assert found == {"recorded": "tiny.gguf", "found": "other.gguf", "ranges": [[0, len(data)]]}
    shutil.copy(tiny, tmp_path / "same.gguf")
    assert bare_cli("replay", str(receipt), "-m", str(tmp_path / "same.gguf")).code == 0


@pytest.mark.usefixtures("native_kernels")
def test_on_another_profile_the_tokens_decide(
    bare_cli: Cli, tiny: str, receipt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verispec.backends import native_backend

    real = native_backend.fingerprint
    monkeypatch.setattr(
        native_backend, "fingerprint", lambda models, options: {**real(models, options), "cpu": "an abacus"}
    )
    done = bare_cli("replay", str(receipt), "-m", tiny)
    assert done.code == 0
    verdict, profile = done.out.splitlines()
    assert verdict == "checked on another profile: tokens equal, log-probabilities equal"
    assert profile.startswith("  not the receipt's profile, so equal bits are not promised: cpu is an abacus here, ")
    found = bare_cli("replay", str(receipt), "-m", tiny, "--json").json()
    assert (found["reproduced"], found["agrees"], found["same_profile"]) == (False, True, False)
    assert [d["name"] for d in found["profile_differences"]] == ["cpu", "hash"]
    data = json.loads(receipt.read_text())
    wrong = (data["output"]["token_ids"][3] + 1) % len(TOKENS)
    changed = edit(receipt, lambda d: d["output"]["token_ids"].__setitem__(3, wrong))
    assert bare_cli("replay", changed, "-m", tiny).code == 1


def test_a_private_receipt_needs_its_prompt_in_any_form(bare_cli: Cli, tiny: str, tmp_path: Path) -> None:
    private, raw = tmp_path / "private.json", tmp_path / "raw.json"
    common = ["-q", "-m", tiny, *SAMPLED, "--receipt-private", "--receipt"]
    assert bare_cli("generate", "the abba", *common, str(private)).code == 0
    assert bare_cli("generate", "the abba", "--raw", *common, str(raw)).code == 0
    assert "token_ids" not in json.loads(private.read_text())["prompt"]
    refused = bare_cli("replay", str(private), "-m", tiny)
    assert (refused.code, refused.out) == (2, "")
    assert "private.json is private: it holds only a hash of its prompt; --prompt FILE gives the prompt" in refused.err

    def replayed(content: str | bytes, file: Path = private) -> int:
        prompt = tmp_path / "prompt"
        prompt.write_bytes(content if isinstance(content, bytes) else content.encode())
        done = bare_cli("replay", str(file), "-m", tiny, "--prompt", str(prompt))
        assert done.code == 0 or "--prompt is not its prompt: no reading of it has the recorded hash" in done.err
        return done.code

    messages = [{"role": "user", "content": "the abba"}]
    forms = [json.dumps({"prompt": "the abba"}), json.dumps({"messages": messages})]
    lines = '{"prompt": "x"}\n{"prompt": "the abba", "seed": 1}\n'
    for content in ("the abba", "the abba\n", "the abba\r\n", *forms, lines):
        assert replayed(content) == 0, content
    assert replayed("the abba\n", raw) == 0
    for content in ("the abb", "the abba b", "", '{"prompt": 5}', "[1, 2]", '{"messages": [5]}', "[[]]", "\0"):
        assert replayed(content) == 2, content
    ids = bare_cli(
        "generate", "--raw", "the abba", "-m", tiny, "--max-tokens", "1", "--receipt", str(tmp_path / "open")
    )
    assert ids.code == 0
    token_ids = json.loads((tmp_path / "open").read_text())["prompt"]["token_ids"]
    assert replayed(json.dumps(token_ids), raw) == 0
    assert replayed(json.dumps({"token_ids": token_ids}), raw) == 0
    done = bare_cli("replay", str(private), "-m", tiny, "--prompt", str(tmp_path / "none"))
    assert (done.code, done.err) == (2, f"verispec: --prompt {tmp_path / 'none'}: No such file or directory\n")


@pytest.mark.usefixtures("native_kernels")
def test_receipts_that_cannot_be_used(bare_cli: Cli, tiny: str, receipt: Path, tmp_path: Path) -> None:
    def sentence(content: bytes, *arguments: str) -> str:
        (tmp_path / "x.json").write_bytes(content)
        done = bare_cli("replay", str(tmp_path / "x.json"), "-m", tiny, *arguments)
        assert (done.code, done.out) == (2, "")
        (line,) = done.err.splitlines()
        assert line.startswith(f"verispec: {tmp_path / 'x.json'}")
        return line

    good = receipt.read_bytes()
    assert "is blank" in sentence(b"")
    assert "not JSON" in sentence(good[:100])
    assert "x.json, line 2 is not JSON" in sentence(good + b"{\n")
    assert "x.json, line 2 is blank" in sentence(good + b"\n" + good)
    assert "is not UTF-8" in sentence(b"\xff" + good)
    own_format = b'"format": %d' % FORMAT
    assert "its format is 1, of an older verispec" in sentence(good.replace(own_format, b'"format": 1'))
    assert f"format must be {FORMAT}, not 7" in sentence(good.replace(own_format, b'"format": 7'))
    assert "the field 'output.x' is unknown" in sentence(good.replace(b'"output": {', b'"output": {"x": 1, '))
    assert "output.finish_reason must be stop or length" in sentence(good.replace(b'"length"', b'"error"'))
    for arguments, words in (
        ([str(tmp_path / "none.json")], "none.json: No such file or directory"),
        ([str(tmp_path)], "Is a directory"),
        ([], "missing argument"),
        (["-", "--prompt", "-"], "cannot both come from stdin"),
        ([str(receipt), "-m", "no-such-model"], "--model: 'no-such-model'"),
        ([str(receipt), "-m", tiny, "--kv-slots", "9"], "at most 9 fit here"),
    ):
        done = bare_cli("replay", *arguments)
        assert (done.code, done.out) == (2, "")
        assert words in done.err


def test_no_string_of_a_receipt_becomes_a_path(
    bare_cli: Cli, tiny: str, receipt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even where a file of that name lies around."""
    monkeypatch.chdir(tmp_path)
    done = bare_cli("replay", str(receipt))
    assert (done.code, done.out) == (2, "")
    assert "its model 'tiny.gguf' is not a known name; -m names the model" in done.err
    (known,) = REGISTRY
    shutil.copy(tiny, tmp_path / known)
    done = bare_cli("replay", edit(receipt, lambda d: d["model"].update(name=known)))
    assert done.code == 2
    assert f"its model {known} is not here; `verispec models pull {known}` fetches it" in done.err


def test_the_default_model_is_found_by_its_name(cli: Cli, smollm2: LLM, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    done = cli("generate", "Name a river.", "--max-tokens", "50", "--temperature", "1", "--receipt", str(path), "-q")
    assert done.code == 0
    assert json.loads(path.read_text())["model"]["name"] == "smollm2-135m"
    assert json.loads(path.read_text())["model"]["files"][0]["sha256"] == REGISTRY["smollm2-135m"].sha256
    assert cli("replay", str(path)).out.startswith("reproduced: ")
    (again,) = smollm2.generate(["The river"], SamplingParams(max_tokens=4))
    assert again.text


@pytest.mark.usefixtures("native_kernels")
def test_200_receipts_of_one_process_are_reproduced_by_another(cache: Path, tmp_path: Path) -> None:
    model, prompts, receipts = write_model(tmp_path / "tiny.gguf"), tmp_path / "p.jsonl", tmp_path / "r.jsonl"
    lines = [
        {
            "prompt": f"{'ab' * (i % 7)} the {chr(97 + i % 26)}",
            "max_tokens": 1 + i % 60,
            "temperature": (0.0, 0.7, 1.0, 1.5)[i % 4],
            "seed": i,
            "top_k": (0, 8)[i % 2],
            "repetition_penalty": (1.0, 1.2)[i // 2 % 2],
            "stop": (["th"], [])[i % 3 > 0],
            "ignore_eos": i % 5 > 0,
        }
        for i in range(200)
    ]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    env = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    made = verispec("generate", "-q", "-m", str(model), "--prompts", str(prompts), "--receipt", str(receipts), env=env)
    assert made.returncode == 0, made.stderr
    assert len(receipts.read_text().splitlines()) == 200
    done = verispec("replay", str(receipts), "-m", str(model), "--json", env=env)
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == 200
    assert all(result["reproduced"] for result in results)
    assert done.stderr.splitlines()[-1] == "200 receipts: 200 reproduced"  # behind what a slow load says
    assert sum(result["num_tokens"] for result in results) > 3000
    first, *others = receipts.read_text().splitlines()
    spoilt = json.loads(first)
    spoilt["output"]["token_ids"][0] ^= 1
    receipts.write_text("\n".join([*others[:2], json.dumps(spoilt)]))
    control = verispec("replay", str(receipts), "-m", str(model), env=env)
    assert control.returncode == 1
    assert control.stderr.splitlines()[-1] == "3 receipts: 2 reproduced"

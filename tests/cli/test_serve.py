"""`verispec serve`: its options, and a real process from the first request to SIGTERM."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.cli.conftest import COMMAND, Cli
from tests.support.chat_model import write_chat_model
from verispec.cli.options import Drafting
from verispec.cli.serve import _as_configured
from verispec.errors import InputError
from verispec.server.core import Core

pytestmark = pytest.mark.slow


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_chat_model(tmp_path / "tiny.gguf")


@pytest.fixture
def process(model: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    keys = tmp_path / "keys.txt"
    keys.write_text("# for tests\nsecret-key-1\n")
    command = [*COMMAND, "serve", "-m", str(model), "--port", "0", "--api-key-file", str(keys), "--log-format", "json",
               "--served-model-name", "small", "--served-model-name", "tiny", "--drain", "5"]  # fmt: skip
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    yield running
    running.kill()
    running.communicate()


def test_a_process_serves_until_it_is_told_to_stop(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    line = process.stdout.readline()
    url, names = line.split("  ")
    assert names.startswith("small, tiny (arithmetic cpu-1, profile ")
    headers = {"Authorization": "Bearer secret-key-1"}
    body = {"model": "tiny", "messages": [{"role": "user", "content": "sesame"}], "max_tokens": 3}
    assert httpx.post(f"{url}/v1/chat/completions", json=body).status_code == 401
    with httpx.stream("POST", f"{url}/v1/chat/completions", json={**body, "stream": True}, headers=headers) as answer:
        process.send_signal(signal.SIGTERM)  # what has begun comes to its end
        assert answer.read().endswith(b"data: [DONE]\n\n")
    out, err = process.communicate(timeout=20)
    assert process.returncode == 0
    assert out == ""
    logged = [json.loads(line) for line in err.splitlines() if line.startswith("{")]
    assert [entry["status"] for entry in logged] == [401, 200]
    assert "secret-key-1" not in err
    assert "sesame" not in err


def test_every_option_reaches_what_it_is_about(
    bare_cli: Cli, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is opened unless that is asked for."""
    found: list[tuple[Core, str]] = []
    opened: list[str] = []
    logged: list[tuple[str, str]] = []

    def run(core: Core, on_start: Callable[[str], None]) -> None:
        on_start("http://here")
        found.append((core, core.llm.chosen(None, None).method))

    monkeypatch.setattr("verispec.server.run.serve", run)
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setattr("verispec.server.log.set_up", lambda level, form: logged.append((level, form)))
    (tmp_path / "keys").write_text("key-of-a-file\n")
    assert bare_cli("keys", "new", str(tmp_path / "signing")).code == 0
    done = bare_cli("serve", "-m", str(model))
    assert (done.code, opened, logged) == (0, [], [("info", "text")])
    assert done.out.startswith("http://here  tiny.gguf (arithmetic ")
    assert len(done.out.splitlines()) == 1
    assert bare_cli(
        "serve", "-m", str(model), "--host", "0.0.0.0", "--port", "9", "--served-model-name", "a", "--api-key",
        "key-of-a-flag", "--api-key", "another-key", "--api-key-file", str(tmp_path / "keys"), "--cors-origin", "*",
        "--max-running", "3", "--max-waiting", "4", "--timeout", "5", "--drain", "6", "--metrics-prefix", "vllm",
        "--log-level", "debug", "--log-format", "json", "--signing-key", str(tmp_path / "signing"), "--open",
        "--share-history", "--speculative-config", '{"method": "none"}',
    ).code == 0  # fmt: skip
    (_, method), (core, other) = found
    assert (method, other) == ("auto", "none")
    settings = core.settings
    assert opened == ["http://here"]
    assert logged[1] == ("debug", "json")
    assert [*core.names] == ["a"]
    assert [*settings.api_keys] == ["key-of-a-flag", "another-key", "key-of-a-file"]
    assert (settings.host, settings.port, [*settings.cors_origins]) == ("0.0.0.0", 9, ["*"])
    assert (settings.max_running, settings.max_waiting, settings.timeout, settings.drain) == (3, 4, 5, 6)
    assert (settings.metrics_prefix, settings.is_insecure) == ("vllm", False)
    assert settings.signing_key is not None
    assert bare_cli("serve", "-m", str(model), "--host", "0.0.0.0", "--insecure").code == 0


@pytest.mark.parametrize(("options", "said"), [
    (["--host", "0.0.0.0"], "--host 0.0.0.0 can be reached from other machines"),
    (["--api-key", "x"], "--api-key must be at least 8"),
    (["--port", "70000"], "--port"),
    (["--metrics-prefix", "a b"], "--metrics-prefix must be"),
    (["--api-key-file", "/nowhere"], "/nowhere: No such file"),
    (["--cors-origin", "evil"], "--cors-origin must be"),
])  # fmt: skip
def test_what_cannot_be_served_is_said_in_one_sentence(bare_cli: Cli, options: list[str], said: str) -> None:
    done = bare_cli("serve", *options)
    assert done.code == 2
    assert said in done.err
    assert len(done.err.splitlines()) == 1


def test_drafting_in_vllms_words() -> None:
    config = '{"method": "draft_model", "model": "small.gguf", "num_speculative_tokens": 5}'
    drafting = _as_configured(Drafting(), config)
    assert (drafting.drafter, drafting.draft_model, drafting.draft_len) == ("model", "small.gguf", 5)
    assert _as_configured(Drafting(), '{"method": "ngram"}').drafter == "suffix"
    lookup = '{"method": "ngram", "num_speculative_tokens": 9, "prompt_lookup_max": 4}'
    for bad, said in ((lookup, "prompt_lookup_max says nothing here, leave it out: drafter suffix follows the longest"),
                      ('{"prompt_lookup_min": 2}', "prompt_lookup_min says nothing here"),
                      ('{"x": 1}', "unknown key"), ('{"method": 3}', "method must be"), ("[]", "must be an object"),
                      ('{"num_speculative_tokens": 3}', "contradict")):  # fmt: skip
        with pytest.raises(InputError, match=said):
            _as_configured(Drafting(draft_len=9), bad)

"""`verispec serve`: its options, and a real process from the first request to SIGTERM."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.cli.conftest import COMMAND, Cli
from tests.support.chat_model import write_chat_model
from verispec.cli.options import Drafting
from verispec.cli.serve import _as_configured
from verispec.errors import InputError

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

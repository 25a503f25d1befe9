"""Checkers written by others, against a running server. Prints a table: judge, version, outcome.

    python bench/judges.py [--model NAME] [--examples N]

schemathesis sends requests made from /openapi.json, valid and invalid ones, and checks that none is answered with a 5xx
or against the description. What is not installed is said so.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--examples", type=int, default=30, help="requests per route and kind")
    asked = parser.parse_args()
    command = [sys.executable, "-m", "verispec", "serve", "-m", asked.model, "--port", "0", "--timeout", "20"]
    server = subprocess.Popen([*command, "--max-len", "256", "--log-level", "error"], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().split()[0]
        outcomes = [schemathesis(url, asked.examples), clients()]
        alive = server.poll() is None
    finally:
        server.terminate()
        code = server.wait(30)
    print("\n| judge | version | outcome |\n|---|---|---|")
    for row in outcomes:
        print("| " + " | ".join(row) + " |")
    print(f"\nthe server was {'alive' if alive else 'DEAD'} at the end and left with exit code {code}")
    return int(not alive or code != 0 or any(row[2].startswith("failed") for row in outcomes))


def schemathesis(url: str, examples: int) -> tuple[str, str, str]:
    program = shutil.which("schemathesis", path=str(Path(sys.executable).parent))
    if program is None:
        return "schemathesis", "", "not installed"
    done = subprocess.run(
        [program, "run", f"{url}/openapi.json", "--checks", CHECKS, "--mode", "all", "--seed", "16",
         "--max-examples", str(examples), "--phases", "examples,fuzzing", "--no-color"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    print(done.stdout[-4000:])
    outcome = "passed" if done.returncode == 0 else f"failed (exit code {done.returncode})"
    return "schemathesis", version("schemathesis"), outcome


def clients() -> tuple[str, str, str]:
    """The SDKs of OpenAI and Anthropic, which check answers against strict models: they are part of the tests."""
    try:
        versions = ", ".join(f"{name} {version(name)}" for name in ("openai", "anthropic"))
    except PackageNotFoundError as error:
        return "SDKs", "", f"not installed: {error.name}"
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "tests/server/test_clients.py"], check=False)
    return "SDKs", versions, "passed" if done.returncode == 0 else "failed"


if __name__ == "__main__":
    sys.exit(main())

"""Programs of others, against a running server. Prints a table: judge, version, outcome.

    python bench/judges.py [--model NAME] [--folder FOLDER] [--llama-cpp FOLDER] [--examples N] [--only NAME ...]
                           [--allow-missing]

Each judge has an environment of its own in FOLDER (by default in the user's cache), filled from PyPI and npm; what
cannot be had from there is said so: llama.cpp's tests are in its repository alone, so a checkout of it must be given.
Judges of form rather than content get a tiny model, which answers at once. Fails if a judge finds something, if one
could not be run (unless that is allowed), and if a server is not alive at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from judging import HERE, Bench, Outcome, UnavailableError, counted, run, serving, verdict, version_of

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
# Names that OpenAI's own tests ask for.
NAMES = ("gpt-3.5-turbo-instruct", "gpt-6-astra", "model")
OPENAI_TESTS = ("test_models.py", "test_completions.py", "chat/test_completions.py", "test_responses.py")
# Stored answers, which this server does not keep.
NOT_SERVED = r"chat/test_completions\.py\S*_(list|retrieve)|test_responses\.py\S*_retrieve"
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=no", "--show-capture=no")
TEST_TOOLS = ("pytest", "pytest-asyncio", "pytest-xdist", "respx", "inline-snapshot", "dirty-equals", "nest-asyncio")
QUESTIONS = (
    ("The capital of France is", ("Paris", "Rome", "Oslo")),
    ("Two and two is", ("four", "nine", "blue")),
    ("The opposite of hot is", ("cold", "warm", "wet")),
    ("A week has", ("seven days", "nine days", "two days")),
)


LLAMA_PORT = 8082  # fixed in its tests, as is the key
LLAMA_KEY = "sk-this-is-the-secret-key"
# Its tests, by the options of the server that they want.
LLAMA_TESTS = {(): ("test_compat_anthropic.py", "test_tokenize.py"), ("--api-key", LLAMA_KEY): ("test_security.py",)}
# Images, which are a 400 here and a 500 there; a conversation without messages; templates that are a server's option,
# and models of theirs. Paths without /v1 (/completions), the files of its page, and what it does with origins.
LLAMA_ONLY = (
    r"image|vision|empty_messages|thinking_history|reasoning_model|with_bos"
    r"|static_assets|test_correct_api_key|test_openai_library|test_cors_|test_local_media_file"
)


def sdks(bench: Bench) -> Outcome:
    """The clients of OpenAI and Anthropic, which check answers against strict models: they are part of the tests."""
    versions = ", ".join(f"{name} {version_of(sys.executable, name)}" for name in ("openai", "anthropic"))
    return verdict(run([sys.executable, "-m", "pytest", "-q", "tests/server/test_clients.py"]), versions)


def hostile(bench: Bench) -> Outcome:
    """Generated requests that no client should send, 2,000 of them with schemas, grammars and tools."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:logging"]
    found = verdict(run([*command, "tests/server/test_hostile.py", "--times", "12.5"]), "own, 5,000 and 2,000 requests")
    shaped = verdict(run([*command, "tests/server/test_hostile_schemas.py", "--times", "8"]), found.version)
    return found if not found.is_good else shaped


def schemathesis(bench: Bench) -> Outcome:
    """Requests made from /openapi.json, valid and invalid ones: no 5xx, nothing against the description."""
    python = bench.environment("schemathesis", "schemathesis>=4")
    with bench.tiny("--port", "0") as url:
        done = run(
            [python.parent / "schemathesis", "run", f"{url}/openapi.json", "--checks", CHECKS, "--mode", "all",
             "--seed", "16", "--max-examples", str(bench.examples), "--phases", "examples,coverage,fuzzing",
             "--no-color", "--request-timeout", "60"],
            cwd=bench.folder,
        )  # fmt: skip
    cases = re.search(r"(\d[\d,]*) generated", done.stdout)
    found = verdict(done, version_of(python, "schemathesis"))
    return found._replace(said=f"{found.said}: {cases[1]} requests" if cases else found.said)


def openai_tests(bench: Bench) -> Outcome:
    """The tests that OpenAI's package brings, every answer against strict models."""
    python = bench.environment("openai-tests", "openai[aiohttp]>=3", *TEST_TOOLS)
    version = version_of(python, "openai")
    source = bench.folder / f"openai-{version}"
    if not source.exists():
        download = [python, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "openai", f"openai=={version}"]
        if run([*download, "-d", bench.folder]).returncode:
            raise UnavailableError("PyPI has no sources of this version")
        with tarfile.open(next(bench.folder.glob(f"openai-{version}.tar.gz"))) as archive:
            archive.extractall(bench.folder, filter="data")
    tests = [f"tests/api_resources/{name}" for name in OPENAI_TESTS]
    done = run(
        [python, *PYTEST, "-p", "judge_responses", "-o", "addopts=",
         "-k", "(create or list or retrieve) and not all_params", *tests],
        cwd=source, env={**os.environ, "TEST_API_BASE_URL": f"{bench.url}/v1", "PYTHONPATH": str(HERE)},
    )  # fmt: skip
    return counted(done, version, NOT_SERVED, "ask for stored answers")


def llama_cpp(bench: Bench) -> Outcome:
    """The tests of llama.cpp's server that are not about its own interface or about what its models say."""
    if bench.llama_cpp is None:
        raise UnavailableError("no checkout of llama.cpp was given (--llama-cpp)")
    packages = "pytest", "requests", "openai", "wget", "numpy", "aiohttp", "prometheus-client"
    python = bench.environment("llama-cpp", *packages)
    version = run(["git", "-C", bench.llama_cpp, "rev-parse", "--short", "HEAD"]).stdout.strip() or "not known"
    found: list[Outcome] = []
    for options, names in LLAMA_TESTS.items():
        with bench.tiny("--port", str(LLAMA_PORT), "--served-model-name", "test", *options):
            done = run(
                [python, *PYTEST, *(f"unit/{name}" for name in names)], cwd=bench.llama_cpp / "tools/server/tests",
                env={**os.environ, "DEBUG_EXTERNAL": "1", "PORT": str(LLAMA_PORT)},
            )  # fmt: skip
        found.append(counted(done, version, LLAMA_ONLY, "want what only that server has"))
    return Outcome(version, "; ".join(each.said for each in found), all(each.is_good for each in found))


def node(bench: Bench) -> Outcome:
    """OpenAI's package for Node; 6.49 is the last one for Node 20."""
    modules = bench.node_modules("openai@6.49")
    script = modules.parent / "judge_client.mjs"
    shutil.copy(HERE / script.name, script)
    version = json.loads((modules / "openai" / "package.json").read_text())["version"]
    return verdict(run(["node", script, bench.url, bench.model]), version)


def client(package: str, bench: Bench) -> Outcome:
    """One of `judge_clients.py`."""
    python = bench.environment(package, package)
    done = run([python, HERE / "judge_clients.py", package, bench.url, bench.model])
    return verdict(done, version_of(python, package))


def tools(package: str, bench: Bench) -> Outcome:
    """One of `judge_tools.py`: typed answers and calls of tools, which need room in the context."""
    python = bench.environment(package, package)
    with serving(bench.model, "--port", "0", "--max-len", "1024", "--served-model-name", bench.model) as url:
        done = run([python, HERE / "judge_tools.py", package, url, bench.model])
    return verdict(done, version_of(python, package))


def lm_eval(bench: Bench) -> Outcome:
    """Choices by log-probability and generated answers, on a task of our own; twice, with equal results."""
    python = bench.environment("lm-eval", "lm-eval[api]")
    tasks = bench.folder / "tasks"
    tasks.mkdir(exist_ok=True)
    lines = [json.dumps({"question": q, "choices": c, "answer": 0, "target": c[0]}) for q, c in QUESTIONS]
    (tasks / "questions.jsonl").write_text("\n".join(lines))
    common = (
        f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {tasks / 'questions.jsonl'}\n"
        'test_split: test\ndoc_to_text: "{{question}}"\n'
    )
    (tasks / "choices.yaml").write_text(
        f'task: own_choices\n{common}output_type: multiple_choice\ndoc_to_choice: "{{{{choices}}}}"\n'
        "target_delimiter: ' '\ndoc_to_target: answer\nmetric_list:\n  - metric: acc\n"
    )
    (tasks / "answers.yaml").write_text(
        f'task: own_answers\n{common}output_type: generate_until\ndoc_to_target: "{{{{target}}}}"\n'
        'generation_kwargs:\n  until: ["\\n"]\n  max_gen_toks: 8\nmetric_list:\n  - metric: exact_match\n'
    )
    model = f"model={bench.model},base_url={bench.url}/v1/completions,tokenizer_backend=remote,num_concurrent=2"
    program = python.parent / "lm_eval"
    command = [program, "--model", "local-completions", "--model_args", model, "--include_path", tasks]
    tables = []
    for _ in range(2):
        done = run([*command, "--tasks", "own_choices,own_answers"], env={**os.environ, "HF_HUB_OFFLINE": "1"})
        tables.append([line for line in done.stdout.splitlines() if line.startswith("|")])
        if done.returncode:
            return verdict(done, version_of(python, "lm_eval"))
    print("\n".join(tables[0]))
    same = tables[0] == tables[1] and bool(tables[0])
    return Outcome(version_of(python, "lm_eval"), "passed, twice the same" if same else "failed: two runs differ", same)


def aiperf(bench: Bench) -> Outcome:
    """A load of streams. It must have its own table of drafts, from what answers say of them."""
    python = bench.environment("aiperf", "aiperf")
    tokenizer, out = bench.folder / "bytes", bench.folder / "aiperf-out"
    run([python, HERE / "judge_tokenizer.py", tokenizer])
    # Each prompt four times with the same seed, so that answers are drafted from earlier ones, whatever they say.
    shape = ["--concurrency", "4", "--request-count", "12", "--num-dataset-entries", "3", "--extra-inputs", "seed:1",
             "--isl", "60", "--osl", "24", "--ui", "none"]  # fmt: skip
    done = run(
        [python.parent / "aiperf", "profile", "--model", bench.model, "--url", bench.url, "--endpoint-type", "chat",
         "--streaming", "--tokenizer", tokenizer, "--use-server-token-count", "--output-artifact-dir", out, *shape],
        cwd=bench.folder,
    )  # fmt: skip
    errors = re.search(r"Request Error Rate \(%\) *│ *([\d.]+)", done.stdout)
    version = version_of(python, "aiperf")
    if done.returncode or errors is None:
        return verdict(done, version)._replace(is_good=False)
    if float(errors[1]):
        return Outcome(version, f"failed: {errors[1]} % of the requests", False)
    if "Spec Decode" not in done.stdout:
        return Outcome(version, "failed: no answer told of drafts", False)
    return Outcome(version, "passed: 12 streams, none failed, with its table of drafts")


def guidellm(bench: Bench) -> Outcome:
    """A load of streams in each of OpenAI's interfaces, all of which must have the tokens that were asked for."""
    python = bench.environment("guidellm", "torch>=2.11,<2.14", "guidellm>=0.8")
    tokenizer, out = bench.folder / "bytes-guidellm", bench.folder / "guidellm.json"
    run([python, HERE / "judge_tokenizer.py", tokenizer])
    version = version_of(python, "guidellm")
    for interface in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
        done = run(
            [python.parent / "guidellm", "run", "--disable-console-interactive",
             "--backend", f"kind=openai_http,target={bench.url},model={bench.model},request_format={interface}",
             "--profile", "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=12",
             "--tokenizer", f"kind=hf_auto,model={tokenizer}", "--data",
             "kind=synthetic_text,prompt_tokens=60,output_tokens=24", "--output", f"kind=json,path={out}"],
            cwd=bench.folder, env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        if done.returncode:
            return verdict(done, version)
        ended = json.loads(out.read_text())["benchmarks"][0]["requests"]
        lengths = [request["output_metrics"]["text_tokens"] for request in ended["successful"]]
        if lengths != [24] * 12:
            return Outcome(version, f"failed: {interface} gave answers of {lengths} tokens, not 12 of 24", False)
    return Outcome(version, "passed: 12 streams in each of three interfaces, none failed")


def axe(bench: Bench) -> Outcome:
    """The page, with an answer on it, light and dark, wide and narrow: nothing serious."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        raise UnavailableError("playwright is not installed") from error
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        raise UnavailableError("there is no Chromium on this machine")
    modules = bench.node_modules("axe-core")
    found: set[tuple[str, str]] = set()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            page = browser.new_page(color_scheme=scheme, bypass_csp=True)
            page.goto(bench.url)
            page.fill("#text", "abcabc abcabc abcabc")
            page.press("#text", "Enter")
            page.wait_for_selector(".proof", timeout=120_000)
            page.evaluate((modules / "axe-core" / "axe.min.js").read_text())
            for width in (1280, 390):
                page.set_viewport_size({"width": width, "height": 800})
                found |= {(v["impact"], v["id"]) for v in page.evaluate("axe.run()")["violations"]}
        browser.close()
    version = json.loads((modules / "axe-core" / "package.json").read_text())["version"]
    listed = ", ".join(f"{name} ({impact})" for impact, name in sorted(found)) or "nothing found"
    return Outcome(version, listed, not any(impact in ("serious", "critical") for impact, _ in found))


JUDGES: dict[str, Callable[[Bench], Outcome]] = {
    "SDKs": sdks,
    "openai's own tests": openai_tests,
    "openai (Node)": node,
    **{name: partial(client, name) for name in ("litellm", "langchain-openai", "openai-agents", "llm")},
    **{f"{name}, tools": partial(tools, name) for name in ("openai", "anthropic", "langchain-openai", "openai-agents")},
    "lm-eval": lm_eval,
    "aiperf": aiperf,
    "guidellm": guidellm,
    "llama.cpp's tests": llama_cpp,
    "schemathesis": schemathesis,
    "hostile requests": hostile,
    "axe-core": axe,
}


def main() -> int:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--folder", type=Path, default=cache / "verispec-judges")
    parser.add_argument("--llama-cpp", type=Path, help="a checkout of llama.cpp, for the tests of its server")
    parser.add_argument("--examples", type=int, default=30, help="requests of schemathesis per route and kind")
    parser.add_argument("--only", nargs="+", choices=JUDGES, default=list(JUDGES))
    parser.add_argument("--allow-missing", action="store_true", help="do not fail for judges that cannot be had here")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    names = [word for name in (asked.model, *NAMES) for word in ("--served-model-name", name)]
    rows: list[tuple[str, Outcome]] = []
    with serving(asked.model, "--port", "0", "--timeout", "120", "--max-len", "128", *names) as url:
        bench = Bench(url, asked)
        for name in asked.only:
            try:
                rows.append((name, JUDGES[name](bench)))
            except UnavailableError as error:
                rows.append((name, Outcome("", f"not run: {error}", asked.allow_missing)))
            print(name, *rows[-1][1][:2], sep=" | ", flush=True)
    print("\n| judge | version | outcome |\n|---|---|---|")
    for name, outcome in rows:
        print(f"| {name} | {outcome.version} | {outcome.said} |")
    return int(not all(outcome.is_good for _, outcome in rows))


if __name__ == "__main__":
    sys.exit(main())

"""`verispec serve`: the model behind HTTP."""

from __future__ import annotations

import os
import re
import sys
import threading
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from verispec.cli import options, terminal
from verispec.cli.parser import flags, option
from verispec.config import DEFAULTS
from verispec.errors import InputError
from verispec.strict_json import load_object

if TYPE_CHECKING:
    from verispec.llm import LLM

EXIT_ENGINE_DEAD = 1
_STOP_SECONDS = 8.0  # that the last step may take in any case
_MAX_KEY_FILE_NBYTES = 2**20
# vLLM's names for what the options of drafting say, and its names for drafters that have others here.
_SPECULATIVE_KEYS = {"method": "drafter", "num_speculative_tokens": "draft_len", "model": "draft_model"}
_SPECULATIVE_METHODS = {"draft_model": "model", "ngram": "suffix"}
_NO_LOOKUP_LENGTHS = "drafter suffix follows the longest match, whatever its length"
_MEANINGLESS_KEYS = {"prompt_lookup_max": _NO_LOOKUP_LENGTHS, "prompt_lookup_min": _NO_LOOKUP_LENGTHS}


@dataclass(frozen=True, kw_only=True)
class Serving:
    """Where the server listens, who may ask, and its limits."""

    title: ClassVar = "Server"
    host: str = option("127.0.0.1", metavar="ADDRESS", help="address to listen on; one that others reach needs a key")
    port: int = option(8000, bounds=(0, 65535), help="port to listen on; 0: any free one")
    served_model_name: tuple[str, ...] = option(
        (), metavar="NAME", help="name that clients use; may be given several times. Default: the model's own"
    )
    api_key: tuple[str, ...] = option(
        (), metavar="KEY", help="a key that requests must carry; several keys are several tenants, who share nothing"
    )
    share_history: bool = option(
        False, help="draft from what any key was answered, not only the same one; no answer then says what was drafted"
    )
    api_key_file: tuple[str, ...] = option((), metavar="FILE", help="a file with keys, one per line")
    cors_origin: tuple[str, ...] = option(
        (), metavar="ORIGIN", help="web pages of this origin may ask; * for all; may be given several times"
    )
    signing_key: str | None = option(
        None, metavar="FILE", help="sign receipts with this private key, made by `verispec keys new FILE`"
    )
    insecure: bool = option(False, help="serve everybody who can reach --host, without a key")
    max_running: int = option(DEFAULTS.max_running, help="samples that run at once")
    max_waiting: int = option(256, help="samples that may wait behind them; more are answered with 429")
    timeout: float = option(600.0, metavar="SECONDS", help="the most one request may take")
    drain: float = option(30.0, metavar="SECONDS", help="what running requests have left after SIGTERM")
    metrics_prefix: str = option("verispec", metavar="NAME", help="prefix of all metrics; vllm suits tools made for it")
    log_level: str = option(
        "info", metavar="LEVEL", choices=("debug", "info", "warning", "error"), help="what is logged"
    )
    log_format: str = option("text", metavar="FORMAT", choices=("text", "json"), help="text or json, to stderr")
    speculative_config: str | None = option(
        None, metavar="JSON",
        help='drafting in vLLM\'s words: {"method": ..., "num_speculative_tokens": ..., "model": ...}',
    )  # fmt: skip
    open: bool = option(False, help="open the page in a browser")


def serve(serving: Serving, loading: options.Loading, drafting: options.Drafting) -> int:
    """Serve the model over HTTP: OpenAI's interface, and a page at /.

    Prints the address once it can be reached. SIGTERM or Ctrl-C: nothing new is taken, running requests may end within
    --drain seconds, and the exit code is 0. docs/server.md describes all routes.
    """
    try:
        from verispec.receipt.signing import SigningKey
        from verispec.server import log
        from verispec.server.core import Core
        from verispec.server.ops import patience
        from verispec.server.run import serve as run
        from verispec.server.settings import Settings
    except ModuleNotFoundError as error:
        raise InputError(f"serving needs the package {error.name}: pip install 'verispec[server]'") from error
    with _naming_flags():
        settings = Settings(
            served_names=serving.served_model_name,
            api_keys=(*serving.api_key, *_keys(serving.api_key_file)),
            cors_origins=serving.cors_origin,
            is_insecure=serving.insecure,
            signing_key=None if serving.signing_key is None else SigningKey.read(serving.signing_key),
            **{
                name: getattr(serving, name)
                for name in ("host", "port", "max_running", "max_waiting", "timeout", "drain", "metrics_prefix")
            },
        )
    log.set_up(serving.log_level, serving.log_format)
    drafting = _as_configured(drafting, serving.speculative_config)
    llm = options.load_llm(loading, drafting, max_running=serving.max_running, share_history=serving.share_history)

    def on_start(url: str) -> None:
        names = ", ".join(core.names)
        arithmetic = dict(llm.calibration.profile.fingerprint)["arithmetic"]
        terminal.out(
            f"{url}  {names} (arithmetic {arithmetic}, profile {llm.profile}), drafter {drafting.method(llm)}\n"
        )
        if serving.open:
            webbrowser.open(url)

    core = Core(llm, settings)
    with _naming_flags():
        failure = run(core, on_start=on_start)
    if failure is not None:
        terminal.note(f"verispec: the engine has failed: {failure}")
        return EXIT_ENGINE_DEAD
    if not _has_stopped(llm, patience(llm.status(), least=_STOP_SECONDS)):
        terminal.note("verispec: the engine did not stop: a step hangs")
        sys.stdout.flush()
        os._exit(EXIT_ENGINE_DEAD)  # leaving as usual waits for the engine's thread once more
    llm.close()
    return 0


def _has_stopped(llm: LLM, seconds: float) -> bool:
    """Whether the engine's thread comes to its end in time; a step that hangs is waited for in vain."""
    stopping = threading.Thread(target=llm.thread.stop, kwargs={"drains": lambda request: False}, daemon=True)
    stopping.start()
    stopping.join(seconds)
    return not stopping.is_alive()


def _keys(files: tuple[str, ...]) -> list[str]:
    found = []
    for file in files:
        data = Path(file).read_bytes()[:_MAX_KEY_FILE_NBYTES]
        lines = [line.strip() for line in data.decode("utf-8", "replace").splitlines()]
        keys = [line for line in lines if line and not line.startswith("#")]
        if not keys:
            raise InputError(f"--api-key-file {file} holds no key")
        found += keys
    return found


def _as_configured(drafting: options.Drafting, config: str | None) -> options.Drafting:
    """The drafting options, with what a configuration in vLLM's words says."""
    if config is None:
        return drafting
    name = "--speculative-config"
    found = load_object(config.encode("utf-8", "surrogatepass"), name=name, example='{"method": "suffix"}')
    changes: dict[str, Any] = {}
    for key, value in found.items():
        if key in _MEANINGLESS_KEYS:
            raise InputError(f"{name}: {key} says nothing here, leave it out: {_MEANINGLESS_KEYS[key]}")
        ours = _SPECULATIVE_KEYS.get(key, key)
        if ours not in asdict(drafting):
            known = ", ".join((*_SPECULATIVE_KEYS, "tree", "accept", "force"))
            raise InputError(f"{name} has the unknown key {key[:50]!r}; known: {known}")
        kind = int if ours == "draft_len" else bool if ours == "force" else str
        if type(value) is not kind:
            raise InputError(f"{name}: {key} must be {'a whole number' if kind is int else kind.__name__}")
        if getattr(drafting, ours) not in (None, getattr(options.Drafting, ours), value):
            raise InputError(f"{name} and --{ours.replace('_', '-')} contradict each other")
        changes[ours] = _SPECULATIVE_METHODS.get(str(value), value) if ours == "drafter" else value
    return replace(drafting, **changes)


@contextmanager
def _naming_flags() -> Iterator[None]:
    """Errors from inside name the option as typed instead of the field."""
    names = {one.name: flags(one)[0] for one in fields(Serving)}
    try:
        yield
    except InputError as error:
        raise InputError(re.sub(r"^\w+", lambda match: names.get(match[0], match[0]), str(error))) from error

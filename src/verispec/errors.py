"""The typed errors of verispec. Each carries one sentence that a user can act on.

`InputError` means the caller's argument is wrong, `ModelFileError` that a file is; the command line turns both into
one line and exit code 2. Everything else is a state of the engine.
"""


class VerispecError(Exception):
    """Base of every error verispec raises on purpose."""


class InputError(VerispecError, ValueError):
    """An argument, a parameter or a request is invalid; the message names it."""


class ConstraintError(InputError):
    """A schema, regex or grammar cannot be followed. `field` is which of them; `path` is the place inside a schema, as
    a JSON pointer ("" is the whole)."""

    def __init__(self, field: str, reason: str, path: str = "") -> None:
        super().__init__(f"{field}{' at #' + path if path else ''}: {reason}")
        self.field, self.path, self.reason = field, path, reason


class ModelFileError(VerispecError):
    """A model file is missing, truncated, corrupt or unsupported; the message names the file and the place."""


class UnsupportedModelError(ModelFileError):
    """A model file is well formed but holds something verispec cannot run; the message says what is supported."""


class FetchError(VerispecError):
    """A model could not be downloaded or did not match its checksum."""


class QueueFullError(VerispecError):
    """The bounded queue of waiting requests is full; try again later."""


class DeterminismError(VerispecError):
    """No canonical shape exists on this backend, so a deterministic request is refused; carries the audit's table."""


class BackendDeadError(VerispecError):
    """The backend cannot run any further pass: all requests end, and no other is taken."""


class DeviceMemoryError(VerispecError):
    """A pass found no room in the GPU's memory; it alone is lost."""


class NumericError(VerispecError):
    """The model produced NaN logits for a request; that request alone ends."""

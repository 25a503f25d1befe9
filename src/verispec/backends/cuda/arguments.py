"""Kernel arguments: structures passed by value, filled from tensors and numbers."""

from __future__ import annotations

import ctypes

import torch

from verispec.backends.cuda.quantize import Quantized


def struct(name: str, *fields: tuple[str, type]) -> type[ctypes.Structure]:
    """A structure laid out as the kernel's, field by field."""
    return type(name, (ctypes.Structure,), {"_fields_": list(fields)})


def pointers(*names: str) -> list[tuple[str, type]]:
    """Fields that hold addresses."""
    return [(name, ctypes.c_void_p) for name in names]


def filled(args: ctypes.Structure, **values: torch.Tensor | Quantized | float | None) -> ctypes.Structure:
    """The structure with these fields set; tensors give their address, None is a null pointer."""
    for name, value in values.items():
        setattr(args, name, value.data_ptr() if isinstance(value, torch.Tensor | Quantized) else value)
    return args


def current_stream() -> int:
    """Torch's current stream, as the driver wants it."""
    return int(torch.cuda.current_stream().cuda_stream)

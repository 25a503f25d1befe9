"""Backends: the only place that knows tensors. A backend loads weights, owns K/V stores and runs passes."""

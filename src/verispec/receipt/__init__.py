"""Receipts: an answer with everything it is a function of, in a form that anybody with the model can check.

>>> from verispec.receipt import parse, replay
>>> replay(llm, parse(text)).reproduced
"""

from verispec.receipt.reading import parse
from verispec.receipt.rerun import ReplayResult, replay
from verispec.receipt.values import Receipt, make_receipt

__all__ = ["Receipt", "ReplayResult", "make_receipt", "parse", "replay"]

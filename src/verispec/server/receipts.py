"""Receipts that the server keeps for whoever asked for them: bounded, and read only by the key that made them."""

from __future__ import annotations

from collections import OrderedDict

from verispec.receipt import Receipt
from verispec.server.errors import ApiError

_ID_DIGITS = 32


class ReceiptStore:
    """The newest receipts, by tenant and id. An id is of the receipt's digest, so equal answers have equal ids."""

    def __init__(self, max_receipts: int) -> None:
        self._max_receipts = max_receipts
        self._kept: OrderedDict[tuple[str, str], Receipt] = OrderedDict()

    def keep(self, receipt: Receipt, tenant: str) -> str:
        """Keep it, and forget the oldest if there are too many; returns its id."""
        receipt_id = f"rcpt-{receipt.digest[:_ID_DIGITS]}"
        self._kept[tenant, receipt_id] = receipt
        self._kept.move_to_end((tenant, receipt_id))
        while len(self._kept) > self._max_receipts:
            self._kept.popitem(last=False)
        return receipt_id

    def find(self, receipt_id: str, tenant: str) -> Receipt:
        """The receipt with this id, if this tenant made it and it is not forgotten."""
        receipt = self._kept.get((tenant, receipt_id))
        if receipt is None:
            raise ApiError(404, "there is no such receipt: it was never made with this key, or is forgotten by now")
        return receipt

"""What the passes of a step take, by measured T(M, context): rows of both kinds, apart or in one canonical pass."""

from collections.abc import Sequence

from verispec.backends.cost import CostTable


class StepCosts:
    """Of canonical passes in the shapes of `family`, which may be empty, and of fast ones in any."""

    def __init__(self, family: Sequence[int], cost: CostTable, *, row_budget: int) -> None:
        self.family = tuple(family)
        self._cost = cost
        self._row_budget = min((row_budget, *self.family[-1:]))  # of passes that rows of both kinds join
        self._shapes: dict[int, int] = {}
        self._version = cost.version

    def canonical_shape(self, num_rows: int) -> int:
        """The cheapest canonical shape for a number of rows."""
        if self._version != self._cost.version:
            self._version = self._cost.version
            self._shapes.clear()
        found = self._shapes.get(num_rows)
        if found is None:
            fitting = [m for m in self.family if m >= num_rows]
            assert fitting, f"{num_rows} rows in a canonical pass: the policy went over its budget, {self._row_budget}"
            found = self._shapes[num_rows] = self._cost.cheapest(fitting)
        return found

    def fast_shape(self, num_rows: int) -> int:
        """The shape of a fast pass of so many rows."""
        return self._cost.fast_shape(num_rows)

    def joins(self, num_canonical: int, num_fast: int) -> bool:
        """Whether one canonical pass for all rows is cheaper than a canonical and a fast one."""
        if not self.family or not num_canonical or num_canonical + num_fast > self._row_budget:
            return False
        return self._joined_seconds(num_canonical, num_fast, 0) < self._apart_seconds(num_canonical, num_fast, 0)

    def seconds(self, num_canonical: int, num_fast: int, context_len: int) -> float:
        """Of a step with so many rows of each kind."""
        if not num_fast:
            return self.canonical_seconds(num_canonical, context_len)
        apart = self._apart_seconds(num_canonical, num_fast, context_len)
        if not num_canonical or num_canonical + num_fast > self._row_budget:
            return apart
        return min(apart, self._joined_seconds(num_canonical, num_fast, context_len))

    def _apart_seconds(self, num_canonical: int, num_fast: int, context_len: int) -> float:
        return self.canonical_seconds(num_canonical, context_len) + self.fast_seconds(num_fast, context_len)

    def _joined_seconds(self, num_canonical: int, num_fast: int, context_len: int) -> float:
        return self.canonical_seconds(num_canonical + num_fast, context_len)

    def canonical_seconds(self, num_rows: int, context_len: int) -> float:
        if not num_rows:
            return 0.0
        if num_rows > self.family[-1]:
            return self._cost.seconds(num_rows, num_rows * context_len)
        return self._cost.seconds(self.canonical_shape(num_rows), num_rows * context_len)

    def fast_seconds(self, num_rows: int, context_len: int) -> float:
        return self.pass_seconds(num_rows, context_len) if num_rows else 0.0

    def pass_seconds(self, num_rows: int, context_len: int) -> float:
        """Of a pass of any kind, in the cheapest shape."""
        return self._cost.seconds(self._cost.fast_shape(num_rows), num_rows * context_len)

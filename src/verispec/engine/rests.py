"""Who rests: it decodes as if it had no drafters, without the host, until it is time to look for drafts again."""

from verispec.engine.sequence import Sequence


class Rests:
    """The sequences that rest, each until so many rounds were planned."""

    def __init__(self) -> None:
        self.num_planned = 0  # rounds so far
        self._until: dict[Sequence, int] = {}
        self._first_due = 0

    def __len__(self) -> int:
        return len(self._until)

    def lie_down(self, sequence: Sequence, num_rounds: int) -> None:
        """Rest for so many rounds from now on."""
        due = self.num_planned + num_rounds
        self._first_due = min(self._first_due, due) if self._until else due
        self._until[sequence] = due
        sequence.rest(is_resting=True)

    def get_up(self, sequence: Sequence) -> None:
        del self._until[sequence]
        sequence.rest(is_resting=False)

    def due(self, *, together: bool = False) -> list[Sequence]:
        """Those whose rest is over, or all `together` if one's is; who does not run any more is forgotten."""
        if not self._until or self._first_due > self.num_planned:
            return []
        for sequence in [s for s in self._until if not s.is_running]:
            self.get_up(sequence)
        self._first_due = min(self._until.values(), default=0)
        found = [s for s, due in self._until.items() if due <= self.num_planned]
        return list(self._until) if found and together else found

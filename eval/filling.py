"""Whether it pays to fill the places that Graft's gates free. Ours: the published method always fills them."""

from dataclasses import dataclass, replace

WINDOW = 96  # rounds of a trial: at T = 1 most win nothing, so that fewer say little of the mean
WORTH = 0.1  # tokens a row and round: what a filled round takes longer, 72 us of 1,232 at T = 1 (H200, SmolLM2)
SHORTEST, LONGEST = 32, 512  # rounds of a rest


@dataclass(frozen=True)
class Filling:
    """An account of the rounds in which a gate stopped a row. It begins with a trial of WINDOW rounds that are filled;
    where they accepted too few retrieved tokens, the places stay empty for SHORTEST rounds, for twice as many after
    each further trial that fails, and then it tries again. Half of a trial counts in the next. It depends on no clock.

    It goes where its matrix goes, so that a run is repeated by starting from a copy of that.
    """

    rounds: int = 0  # of this trial
    rows: float = 0.0  # that decoded in them, and half of those before
    retrieved: float = 0.0
    rest: int = 0  # rounds left
    next_rest: int = SHORTEST

    @property
    def pays(self) -> bool:
        """So far as is known: the next round is filled."""
        return self.rest == 0

    def after(self, rows: float, retrieved: float) -> "Filling":
        """One round more, of so many rows, which accepted so many retrieved tokens together."""
        if self.rest:
            return replace(self, rest=self.rest - 1)
        rounds, rows, retrieved = self.rounds + 1, self.rows + rows, self.retrieved + retrieved
        if rounds < WINDOW:
            return replace(self, rounds=rounds, rows=rows, retrieved=retrieved)
        pays = retrieved >= WORTH * rows
        return Filling(
            rows=rows / 2,
            retrieved=retrieved / 2,
            rest=0 if pays else self.next_rest,
            next_rest=SHORTEST if pays else min(2 * self.next_rest, LONGEST),
        )

"""Whether it pays to fill the places that Graft's gates free. Ours: the published method always fills them."""

from dataclasses import dataclass, replace

WINDOW = 32  # rounds of a trial: some 100 tokens at T = 0, 55 at T = 1; shorter ones often miss what filling wins
WORTH = 0.06  # the least share of a trial's tokens; filling costs about 8 % of a round (SmolLM2, H200: 0.13 of 1.6 ms)
LONGEST = 512  # rounds of a rest


@dataclass(frozen=True)
class Filling:
    """An account of the rounds in which a gate stopped a row. It begins with a trial of WINDOW rounds that are filled;
    where too few of the tokens that they said were retrieved, the places stay empty for as many rounds, for twice as
    many after each further trial that fails, and then it tries again. It depends on no clock.

    It goes where its matrix goes, so that a run is repeated by starting from a copy of that.
    """

    rounds: int = 0  # of this trial
    said: int = 0
    retrieved: int = 0
    rest: int = 0  # rounds left
    next_rest: int = WINDOW

    @property
    def pays(self) -> bool:
        """So far as is known: the next round is filled."""
        return self.rest == 0

    def after(self, said: int, retrieved: int) -> "Filling":
        """One round more, of so many tokens, of which so many were retrieved and accepted: all rows together."""
        if self.rest:
            return replace(self, rest=self.rest - 1)
        rounds, said, retrieved = self.rounds + 1, self.said + said, self.retrieved + retrieved
        if rounds < WINDOW:
            return replace(self, rounds=rounds, said=said, retrieved=retrieved)
        if retrieved >= WORTH * said:
            return Filling()
        return Filling(rest=self.next_rest, next_rest=min(2 * self.next_rest, LONGEST))

"""What became of the rows of a source: how many were read, mended by which rule, and refused for which reason."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

SHOWN = 3  # rows named for each reason; all are counted


class Refused(Exception):
    """A row that cannot be used: `reason` is what it is counted under, the message says what is wrong in this one."""

    def __init__(self, reason: str, why: str = "") -> None:
        super().__init__(why or reason)
        self.reason = reason


@dataclass
class Tally:
    """Counts, and where the first rows of each reason stand."""

    read: int = 0
    schemas: Counter[str] = field(default_factory=Counter)
    repaired: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[tuple[str, str]]] = field(default_factory=dict)  # reason -> (where, why)
    places: dict[str, str] = field(default_factory=dict)  # id of a record that was read -> where it stands

    def repair(self, rule: str, where: str) -> None:
        self.repaired[rule] += 1
        self._example(rule, where, "")

    def refuse(self, refusal: Refused, where: str) -> None:
        self.refused[refusal.reason] += 1
        self._example(refusal.reason, where, str(refusal).removeprefix(refusal.reason))

    def report(self) -> dict[str, Any]:
        """For JSON."""
        counts = {"schemas": self.schemas, "repaired": self.repaired, "refused": self.refused}
        return {"read": self.read, **{k: dict(v) for k, v in counts.items()}, "examples": self.examples}

    def lines(self) -> list[str]:
        """The summary as a person reads it."""
        schemas = ", ".join(f"{count:,} {name}" for name, count in self.schemas.most_common())
        out = [f"{self.read:,} rows read" + (f" ({schemas})" if schemas else "")]
        for title, counts in (("mended", self.repaired), ("refused", self.refused)):
            for reason, count in counts.most_common():
                named = self.examples[reason]
                first = f"{named[0][0]}{f': {named[0][1]}' if named[0][1] else ''}"
                others = [where for where, _ in named[1:]] + ["..."] * (count > SHOWN)
                out.append(f"{title} {count:,}: {reason} ({', '.join([first, *others])})")
        return out

    def _example(self, reason: str, where: str, why: str) -> None:
        shown = self.examples.setdefault(reason, [])
        if len(shown) < SHOWN:
            shown.append((where, why))

"""One fault of a drafter's folder."""

from collections.abc import Sequence
from dataclasses import dataclass

VLLM, SGLANG, BOTH = ("vLLM",), ("SGLang",), ("vLLM", "SGLang")


@dataclass(frozen=True)
class Finding:
    """`fatal`: every engine of `engines` refuses the folder (those of `stops`), or drafts wrongly and says nothing.
    `loud`: it may well do so, and the folder alone can't tell; more than a note."""

    fatal: bool
    engines: tuple[str, ...]
    what: str
    cure: str = ""
    stops: tuple[str, ...] = ()
    loud: bool = False


def listed(values: Sequence[object], most: int = 8) -> str:
    """Some of them, and how many there are where that is more."""
    shown = ", ".join(map(str, values[:most]))
    return f"{shown}, ... ({len(values)} in all)" if len(values) > most else shown

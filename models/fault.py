"""One fault of a drafter's folder."""

from dataclasses import dataclass

VLLM, SGLANG, BOTH = ("vLLM",), ("SGLang",), ("vLLM", "SGLang")


@dataclass(frozen=True)
class Finding:
    """`fatal`: every engine of `engines` refuses the folder (those of `stops`), or drafts wrongly and says nothing."""

    fatal: bool
    engines: tuple[str, ...]
    what: str
    cure: str = ""
    stops: tuple[str, ...] = ()

"""How to decode: the settings that every decoder shares, and what follows from them."""

from dataclasses import dataclass

from recipes.schema import DRAFTED

LINES = ("chain", "flex", "lookup", "suffix")  # what they propose has no branches, but for several sampled paths
CALIBRATED = ("graft", "prune")  # whose gates `eval.calibrate` finds
GATED = (*CALIBRATED, "splice")  # drafting stops where the drafter is unsure
BLOCKED = ("chain", "flex", "prune", "graft")  # what a drafter of lines can serve
PARALLEL = ("flex", "graft")  # of these, what may draft the next line while this one is verified
GROWN = tuple(name for name in DRAFTED if name != "flex")  # what one of trees can
PUBLISHED_GATES = (0.15, 0.14, 0.50)  # Graft's own, for Qwen3-8B


@dataclass(frozen=True)
class Settings:
    """For `chain`, `lookup` and `suffix`, depth is the draft length and nodes and branch do not count.

    `chain` drafts greedily at a draft temperature of 0; above it, it samples `paths` of them, and `verifier` is one of
    eval.rules. All that is greedy is verified by `match`.
    """

    decoder: str = "ar"
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    depth: int = 8
    branch: int = 10
    nodes: int = 60
    gates: tuple[float, ...] = PUBLISHED_GATES
    verifier: str = "match"
    paths: int = 1
    draft_temperature: float = 0.0
    draft_top_p: float = 1.0
    graft_fill: str = "auto"  # of `graft` and `splice`: freed places are filled where that pays (eval.filling) | always
    parallel: bool = False  # of a drafter of lines: the next block is drafted while this one is verified

    @property
    def drafts(self) -> bool:
        """A drafter is asked."""
        return self.decoder in DRAFTED

    @property
    def samples(self) -> bool:
        """Drafts are drawn, and have laws that a verifier can ask for."""
        return self.decoder == "chain" and self.draft_temperature > 0

    @property
    def remembers(self) -> bool:
        """A successor matrix is read and taught."""
        return self.decoder in ("recycle", "graft", "splice")

    @property
    def most(self) -> int:
        """Drafts of one round, at most."""
        if self.decoder == "ar":
            return 0
        return self.depth * self.paths if self.decoder in LINES else self.nodes

    @property
    def room(self) -> int:
        """Slots of the target's cache that a round may write past the committed ones."""
        layers = 0 if self.decoder == "talon" else self.depth * max(self.branch, self.paths)
        return max(self.nodes, layers) + self.depth + 16

    @property
    def draft_room(self) -> int:
        """The same of the drafter's cache."""
        return self.room if self.decoder != "talon" else self.nodes * self.depth + 16

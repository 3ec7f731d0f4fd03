"""The acceptance rules by name, what each of them asks for, and the refusal of drafts that none can judge.

`verify` is what a decoder calls: drafts and uniforms in, the accepted path and the token after it out, on the device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eval.rules_chain import block, greedy_block, multipath, token
from eval.rules_gbv import spectr_gbv
from eval.rules_traversal import promoted, traversal
from eval.rules_tree import k_sequential, tree
from eval.verify import Drafts, Stops, settle
from recipes.schema import UserError

TOLERANCE = 1e-4  # of the sum of a law


@dataclass(frozen=True)
class Rule:
    """`stops` is the rule; it judges several paths or one, needs the law of every draft or none."""

    name: str
    stops: Callable[[Drafts], Stops]
    several: bool = True
    laws: bool = True
    lossless: bool = True


TABLE = (
    Rule("tree", tree, laws=False),
    Rule("token", token, several=False),
    Rule("block", block, several=False),
    Rule("greedy_block", greedy_block, several=False),
    Rule("spectr", k_sequential),
    Rule("multipath", multipath),
    Rule("traversal", traversal),
    Rule("promoted", promoted),
    Rule("spectr_gbv", spectr_gbv, lossless=False),
)
RULES = {rule.name: rule for rule in TABLE}

FAULTS = (
    "a law of the target holds NaN, a negative number or infinity",
    f"a law of the target does not sum to 1 (within {TOLERANCE:g})",
    "a law of the drafter holds NaN, a negative number or infinity",
    f"a law of the drafter does not sum to 1 (within {TOLERANCE:g})",
    "a drafted token has probability 0 under the law that it is said to be drawn from",
)


def verify(rule: Rule, drafts: Drafts, uniforms_B2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The accepted path [B, L + 1] of nodes, how many drafts that is [B], and the token after them [B]."""
    return settle(drafts, rule.stops(drafts), uniforms_B2)


def faults(drafts: Drafts) -> Tensor:
    """Which of FAULTS hold [B, 5] bool, found on the device; a decoder hands them to `refuse` when it next looks."""
    inner = drafts.nodes[..., :-1].flatten(1)
    found = []
    for laws, nodes in ((drafts.target, drafts.nodes.flatten(1)), (drafts.draft, inner)):
        total = laws.sum(2, dtype=torch.float64).gather(1, nodes)
        least = laws.amin(2).gather(1, nodes)
        broken = ~(least >= 0) | ~total.isfinite()
        found += [broken.any(1), (~broken & ((total - 1).abs() > TOLERANCE)).any(1)]
    found.append((drafts.p == 0).flatten(1).any(1))
    return torch.stack(found, 1)


def refuse(found: Sequence[Sequence[bool]]) -> None:
    """Raise UserError for the first row that has a fault."""
    for row, marks in enumerate(found):
        names = [name for name, holds in zip(FAULTS, marks, strict=True) if holds]
        if names:
            raise UserError(f"verification, row {row}: {'; '.join(names)}. No rule is defined on such drafts")


def stack_paths(rows: Sequence[Sequence[Sequence[int]]]) -> Tensor:
    """Drafted paths as a tensor [B, K, L]; refuses what is not K paths of L tokens in every row."""
    shapes = {(len(paths), tuple(sorted({len(path) for path in paths}))) for paths in rows}
    for row, paths in enumerate(rows):
        if not paths or not all(paths):
            raise UserError(f"verification, row {row}: no drafted path, or an empty one. A rule needs K >= 1 paths")
        if len({len(path) for path in paths}) > 1:
            lengths = ", ".join(str(len(path)) for path in paths)
            raise UserError(f"verification, row {row}: its paths have unequal lengths, {lengths}")
    if len(shapes) > 1:
        raise UserError(f"verification: rows differ in paths or lengths ({sorted(shapes)}). Judge them apart")
    return torch.tensor(rows, dtype=torch.int64)


def check(rule: Rule, drafts: Drafts) -> None:
    """Refuse drafts of the wrong shape for a rule, by what is wrong. Needs no look at the device."""
    if drafts.tokens.dim() != 3 or min(drafts.tokens.shape[1:]) < 1:
        raise UserError(
            f"verifier={rule.name}: {[*drafts.tokens.shape]} drafts, where K >= 1 paths of L >= 1 are judged"
        )
    B, K, L = drafts.tokens.shape
    if K > 1 and not rule.several:
        raise UserError(f"verifier={rule.name} judges one path, and {K} were drafted. Use paths=1 or another rule")
    if rule.laws and drafts.draft.shape[1] == 0:
        raise UserError(f"verifier={rule.name} needs the law of every draft, and this drafter hands over none")
    wanted = {"target": (drafts.target, 1 + L * K), "draft": (drafts.draft, 1 + (L - 1) * K)}
    for name, (laws, nodes) in wanted.items():
        short = laws.shape[1] < nodes and (name == "target" or rule.laws)
        if short or laws.shape[0] != B or laws.shape[2] != drafts.target.shape[2]:
            shape = f"[{B}, {nodes}, {drafts.target.shape[2]}]"
            raise UserError(f"verifier={rule.name}: {name} laws have the shape {[*laws.shape]}; {shape} was expected")

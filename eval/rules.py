"""The acceptance rules by name, what each of them asks for, and the refusal of drafts that none can judge.

`verify` is what a decoder calls: drafts and uniforms in, the accepted path and the token after it out, on the device.
`rule_of` and `guard` refuse what a decoder cannot offer a rule, before anything is decoded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eval.rules_chain import block, greedy_block, multipath, token
from eval.rules_gbv import spectr_gbv
from eval.rules_traversal import promoted, traversal
from eval.rules_tree import k_sequential, tree
from eval.settings import GATED, Settings
from eval.verify import Drafts, Stops, settle
from recipes.schema import UserError

TOLERANCE = 1e-4  # of the sum of a law


@dataclass(frozen=True)
class Rule:
    """`stops` is the rule; it judges several paths or one, needs the law of every draft or none. `text_alone`: it holds
    only where the drafter's law is a function of the text alone."""

    name: str
    stops: Callable[[Drafts], Stops]
    several: bool = True
    laws: bool = True
    lossless: bool = True
    text_alone: bool = False


TABLE = (
    Rule("tree", tree, laws=False),
    Rule("token", token, several=False),
    Rule("block", block, several=False),
    Rule("greedy_block", greedy_block, several=False, text_alone=True),
    Rule("spectr", k_sequential),
    Rule("multipath", multipath),
    Rule("traversal", traversal),
    Rule("promoted", promoted),
    Rule("spectr_gbv", spectr_gbv, lossless=False),
)
RULES = {rule.name: rule for rule in TABLE}
BEST_OF_ONE, BEST_OF_SEVERAL = "block", "traversal"  # the highest tau, the fastest by laws (docs/verification.md)

FAULTS = (
    "a law of the target holds NaN, a negative number or infinity",
    f"a law of the target does not sum to 1 (within {TOLERANCE:g})",
    "a law of the drafter holds NaN, a negative number or infinity",
    f"a law of the drafter does not sum to 1 (within {TOLERANCE:g})",
    "a drafted token has probability 0 under the law that it is said to be drawn from",
)


def rule_of(settings: Settings) -> Rule | None:
    """The rule that a decoder's drafts are judged by; None for sample-and-match, which has no use for laws. Raises
    UserError where the two do not go together."""
    s = settings
    if s.paths < 1:
        raise UserError(f"eval.paths={s.paths}: a rule judges K >= 1 paths. Use eval.paths=1 or more")
    if s.verifier == "match" or (s.verifier == "tree" and not s.samples):  # of the same law on a tree that is fixed
        if s.paths > 1 and not s.samples:
            raise UserError(
                f"eval.paths={s.paths}: greedy drafts are the same on every path. "
                "Give eval.draft_temperature above 0, or eval.paths=1"
            )
        return None
    rule = RULES.get(s.verifier)
    if rule is None:
        raise UserError(f"verifier={s.verifier}: no such rule. Known: match, {', '.join(RULES)}")
    if rule.laws and not s.samples:
        raise UserError(no_laws(rule, s))
    if s.paths > 1 and not rule.several:
        raise UserError(f"verifier={rule.name} judges one path, and eval.paths={s.paths} are drafted. Use eval.paths=1")
    if rule.text_alone:
        raise UserError(
            f"verifier={rule.name} is exact only if the drafter's law depends on nothing but the text: it owes later "
            "rounds what the old round's draft would have said. An EAGLE drafter's law also depends on which of its "
            "inputs are its own guesses. Use verifier=block"
        )
    return rule


def no_laws(rule: Rule, s: Settings) -> str:
    """Why a rule that accepts by q/p cannot judge drafts that were not sampled."""
    if s.decoder in GATED:
        return (
            f"verifier={rule.name} accepts with q/p, and decoder={s.decoder} lets the confidence of the very tokens "
            "that it drafted decide which are verified: that would bias the output (docs/verification.md, truncation). "
            "Use verifier=match"
        )
    how = f"decoder={s.decoder} drafts greedily" if s.decoder != "chain" else "drafts at temperature 0 are greedy"
    return (
        f"verifier={rule.name} needs the law of every draft, and {how}, so that there is none. Use decoder=chain with "
        "eval.draft_temperature (or eval.temperature) above 0, or verifier=match"
    )


def guard(rule: Rule | None, peeks: bool) -> None:
    """Refuse p/q acceptance behind a cut that looks at the sampled tokens, as `Proposer.peeks` says."""
    if rule is not None and rule.laws and peeks:
        raise UserError(
            f"verifier={rule.name} accepts with q/p, and this decoder decides by the sampled tokens themselves which "
            "of them are verified: one that is cut when it looks unsure is said less often than the target says it. "
            "Cut by what was known before the token was drawn, or use verifier=match"
        )


def words(settings: Settings) -> str:
    """How drafts are proposed and judged, for reports."""
    s = settings
    if s.decoder == "ar":
        return "nothing drafted"
    if not s.samples:
        return "drafts fixed before the target draws, sample-and-match (in law EAGLE's tree rule): lossless"
    policy = f"{s.paths} path{'s' if s.paths > 1 else ''} sampled at temperature {s.draft_temperature:g}"
    if s.draft_top_p < 1:
        policy += f", top_p {s.draft_top_p:g}"
    rule = rule_of(s)
    name = "sample-and-match" if rule is None else f"verifier {rule.name}"
    return f"{policy}, {name}: {'lossless' if rule is None or rule.lossless else '**NOT lossless**'}"


def verify(rule: Rule, drafts: Drafts, uniforms_B2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The accepted path [B, L + 1] of nodes, how many drafts that is [B], and the token after them [B]. Drafts of the
    wrong shape are refused; `faults` looks at what is in them."""
    check(rule, drafts)
    return settle(drafts, rule.stops(drafts), uniforms_B2)


def faults(drafts: Drafts) -> Tensor:
    """Which of FAULTS hold [B, 5] bool, found on the device; a decoder hands them to `refuse` when it next looks."""
    if drafts.tokens.is_cuda:
        from eval import kernels

        return kernels.faults(drafts.target, drafts.draft, drafts.nodes, drafts.p, TOLERANCE)
    inner = drafts.nodes[..., :-1].flatten(1)
    found = []
    pairs = [(drafts.target, drafts.nodes.flatten(1)), (drafts.draft, inner)]
    for laws, nodes in pairs if drafts.draft.shape[1] else pairs[:1]:
        total = laws.sum(2, dtype=torch.float64).gather(1, nodes)
        least = laws.amin(2).gather(1, nodes)
        broken = ~(least >= 0) | ~total.isfinite()
        found += [broken.any(1), (~broken & ((total - 1).abs() > TOLERANCE)).any(1)]
    if not drafts.draft.shape[1]:  # a rule that asks for no laws
        return torch.stack([*found, *[torch.zeros_like(found[0])] * 3], 1)
    found.append((drafts.p == 0).flatten(1).any(1))
    return torch.stack(found, 1)


def refuse(found: Sequence[Sequence[bool]]) -> None:
    """Raise UserError for the first row that has a fault; rows that were not looked at have no marks."""
    for row, marks in enumerate(found):
        names = [name for name, holds in zip(FAULTS, marks, strict=False) if holds]
        if names:
            hint = (
                ". A model whose numbers overflow makes such laws: try eval.dtype=float32"
                if marks[0] or marks[2]
                else ""
            )
            raise UserError(f"verification, row {row}: {'; '.join(names)}. No rule is defined on such drafts{hint}")


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

"""Expected accepted drafts of every rule on random toy laws, by enumeration, beside what no rule can pass.

    python scripts/toy_rules.py [laws=10]

Three tokens, laws that depend on the whole context (Dirichlet 0.7); "near" drafts are half the target. `ceiling` is a
linear programme over all couplings of drafts and text, `with change` lets the rule change the target for the rest of
the block; `claimed` is the sum of SpecTr-GBV's masses. docs/verification.md holds the table.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from eval.rules import RULES
from tests.eval.ceiling import ceiling, meant
from tests.eval.test_rules import found, pair

SIZES = ((1, 1), (1, 2), (1, 3), (2, 1), (3, 1), (2, 2), (3, 2))  # (paths, length) that the programmes take seconds for
NAMES = ("token", "block", "spectr", "multipath", "traversal", "promoted")


def main(argv: list[str]) -> None:
    laws = int(dict(a.split("=", 1) for a in argv).get("laws", "10"))
    print("| drafts | K | L | " + " | ".join(NAMES) + " | ceiling | ceiling with change | claimed by SpecTr-GBV |")
    print("|---" * (6 + len(NAMES)) + "|")
    for kind in (0, 1):
        for paths, length in SIZES:
            pairs = [pair(seed, length) for seed in range(kind, 2 * laws, 2)]
            cells = []
            for name in NAMES:
                rule = RULES[name]
                accepted = (
                    [found(rule, *law, paths, length).accepted for law in pairs] if rule.several or paths == 1 else []
                )
                cells.append(f"{sum(accepted) / laws:.3f}" if accepted else "-")
            for changed in (False, True):
                most = [ceiling(*law, paths, length, changed) for law in pairs] if length < 3 or not changed else []
                cells.append(f"{sum(most) / laws:.3f}" if most else "-")
            claimed = [sum(mass for word, mass in meant(*law, paths, length).items() if word) for law in pairs]
            cells.append(f"{sum(claimed) / laws:.3f}")
            print(f"| {'near' if kind else 'apart'} | {paths} | {length} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

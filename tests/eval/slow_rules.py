"""The rules by plain loops over one draft, as their papers and codes tell them: what the batched ones are held to.

A law is a function from a context (the tokens so far) to probabilities. Each rule returns {tokens said: probability},
the accepted drafts and the token after them.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable

Path = tuple[int, ...]
Law = Callable[[Path], list[float]]
Said = dict[Path, float]
Shares = Callable[[Path, int], list[float]]  # p(x) a(x) of every token x after a context that so many paths have


def plus(x: float) -> float:
    return max(x, 0.0)


def spread(said: defaultdict[Path, float], chance: float, context: Path, weights: list[float]) -> None:
    """End the round after `context`, the next token by `weights`."""
    total = sum(weights)
    for token, weight in enumerate(weights):
        if chance > 0 and weight > 0:
            said[(*context, token)] += chance * weight / total


def token(paths: list[Path], p: Law, q: Law) -> Said:
    said, alive, path = defaultdict[Path, float](float), 1.0, paths[0]
    for i, x in enumerate(path):
        pl, ql = p(path[:i]), q(path[:i])
        accept = min(1.0, ql[x] / pl[x])
        spread(said, alive * (1 - accept), path[:i], [plus(b - a) for a, b in zip(pl, ql, strict=True)])
        alive *= accept
    spread(said, alive, path, q(path))
    return said


def block_of(path: Path, p: Law, q: Law, capped: bool) -> Said:
    """Block verification of one path, greedy where the ratio is not capped."""
    L, r = len(path), [1.0]
    for i, x in enumerate(path):
        r.append(r[-1] * q(path[:i])[x] / p(path[:i])[x])
        if capped:
            r[-1] = min(1.0, r[-1])
    left = [[plus(r[i] * b - a) for a, b in zip(p(path[:i]), q(path[:i]), strict=True)] for i in range(L)]
    said, alive = defaultdict[Path, float](float), 1.0
    for i in range(L, -1, -1):
        h = min(1.0, r[L]) if i == L else 1.0 if r[i] >= 1 else sum(left[i]) / (sum(left[i]) + 1 - r[i])
        spread(said, alive * h, path[:i], q(path) if i == L else left[i])
        alive *= 1 - h
    return said


def block(paths: list[Path], p: Law, q: Law) -> Said:
    return block_of(paths[0], p, q, capped=True)


def greedy_block(paths: list[Path], p: Law, q: Law) -> Said:
    return block_of(paths[0], p, q, capped=False)


def tree(paths: list[Path], p: Law, q: Law) -> Said:
    said = defaultdict[Path, float](float)

    def visit(node: Path, alive: float) -> None:
        left = list(q(node))
        for child in dict.fromkeys(path[len(node)] for path in paths if path[: len(node)] == node and path != node):
            visit((*node, child), alive * left[child])
            alive *= 1 - left[child]
            left[child] = 0.0
            if sum(left) <= 0 or alive <= 0:
                return
            left = [x / sum(left) for x in left]
        spread(said, alive, node, left)

    visit((), 1.0)
    return said


def spectr(paths: list[Path], p: Law, q: Law) -> Said:
    said = defaultdict[Path, float](float)

    def visit(node: Path, alive: float, left: list[Path]) -> None:
        if len(node) == len(paths[0]):
            spread(said, alive, node, q(node))
            return
        pl, ql, m = p(node), q(node), len(left)

        def beta(rho: float) -> float:
            return sum(min(b / rho, a) for a, b in zip(pl, ql, strict=True))

        low, high = 1.0, float(m)
        for _ in range(100):
            rho = (low + high) / 2
            low, high = (low, rho) if 1 - (1 - beta(rho)) ** m <= rho * beta(rho) else (rho, high)
        kappa = (1 - (1 - beta(high)) ** m) / beta(high)
        for path in left:
            x = path[len(node)]
            accept = min(1.0, ql[x] / (high * pl[x]))
            visit((*node, x), alive * accept, [other for other in left if other[len(node)] == x])
            alive *= 1 - accept
        spread(said, alive, node, [plus(b - kappa * min(b / high, a)) for a, b in zip(pl, ql, strict=True)])

    visit((), 1.0, paths)
    return said


def multipath(paths: list[Path], p: Law, q: Law) -> Said:
    """The law of the kept path is counted out over all K-tuples of paths."""
    V, L, K = len(q(())), len(paths[0]), len(paths)

    def rank(path: Path) -> list[tuple[float, int]]:
        return [(q(path[:i])[x] / p(path[:i])[x] if p(path[:i])[x] else 0.0, x) for i, x in enumerate(path)]

    words = list(itertools.product(range(V), repeat=L))
    chance = dict.fromkeys(words, 1.0)
    for word in words:
        for i, x in enumerate(word):
            chance[word] *= p(word[:i])[x]
    kept, under = defaultdict[Path, float](float), 0.0
    for word in sorted((w for w in words if chance[w] > 0), key=rank):
        mass = (under + chance[word]) ** K - under**K
        under += chance[word]
        for i in range(L + 1):
            kept[word[:i]] += mass

    def law(context: Path) -> list[float]:
        return [kept[(*context, x)] / kept[context] for x in range(V)]

    return block_of(max(paths, key=rank), law, q, capped=True)


def traversal(paths: list[Path], p: Law, q: Law) -> Said:
    """Steps 1 to 4 of the paper on a tree of its own, children in the order of first appearance."""
    nodes = list(dict.fromkeys(path[:i] for path in paths for i in range(len(paths[0]) + 1)))
    children = {n: [m for m in nodes if len(m) == len(n) + 1 and m[: len(n)] == n] for n in nodes}
    draft, target = {n: list(p(n)) for n in nodes}, {n: list(q(n)) for n in nodes}
    weight: dict[Path, float] = {(): 1.0}

    def weigh(node: Path) -> None:
        for child in children[node]:
            x = child[-1]
            weight[child] = min(1.0, weight[node] * target[node][x] / draft[node][x]) if draft[node][x] else 0.0
            weigh(child)

    weigh(())
    said, alive = defaultdict[Path, float](float), 1.0
    while alive > 0:
        node: Path = ()
        while children[node]:
            node = children[node][0]
        accept = 1.0 if node == () else weight[node]
        spread(said, alive * accept, node, target[node])
        alive *= 1 - accept
        if node == ():
            break
        up, x = node[:-1], node[-1]
        children[up].remove(node)
        left = [plus(weight[up] * b - a) for a, b in zip(draft[up], target[up], strict=True)]
        total = sum(left)
        target[up] = [r / total if total else 0.0 for r in left]
        weight[up] = total / (total + 1 - weight[up]) if total > 1e-15 else 0.0  # else only rounding is left
        draft[up][x] = 0.0
        draft[up] = [a / sum(draft[up]) if sum(draft[up]) else 0.0 for a in draft[up]]
        weigh(up)
    return said


def spectr_gbv(paths: list[Path], p: Law, q: Law) -> Said:
    """The released loop, coin by coin."""
    V, L, K = len(q(())), len(paths[0]), len(paths)

    def mass(law: Law, path: Path) -> float:
        total = 1.0
        for i, x in enumerate(path):
            total *= law(path[:i])[x]
        return total

    def rho(path: Path) -> float:
        return min(1.0, mass(p, path) / mass(q, path)) if mass(q, path) > 0 else 1.0

    def meant(path: Path) -> float:
        return mass(q, path) * (1 - (1 - rho(path)) ** K)

    def passes(path: Path) -> float:
        drafted = 1 - (1 - mass(p, path)) ** K
        onward = 0.0 if len(path) == L else sum(meant((*path, x)) for x in range(V))
        return min(1.0, plus((meant(path) - onward) / (drafted - onward))) if drafted != onward else 0.0

    said = defaultdict[Path, float](float)

    def draft(k: int, best: Path, rejected: frozenset[Path], alive: float) -> None:
        if alive <= 0:
            return
        if k == K or len(best) == L:
            after = [q(best)[x] * (1 - rho((*best, x)) ** K) for x in range(V)] if len(best) < L else q(best)
            spread(said, alive, best, after if sum(after) > 0 else q(best))
            return
        tests = [paths[k][:i] for i in range(len(best) + 1, L + 1) if i == L or paths[k][:i] not in rejected]
        for coins in itertools.product((True, False), repeat=len(tests)):
            chance = alive
            for node, coin in zip(tests, coins, strict=True):
                chance *= passes(node) if coin else 1 - passes(node)
            won = [node for node, coin in zip(tests, coins, strict=True) if coin]
            lost = {node for node, coin in zip(tests, coins, strict=True) if not coin}
            draft(k + 1, max([best, *won], key=len), rejected | lost, chance)

    draft(0, (), frozenset(), 1.0)
    return said


def first_law(drafted: list[tuple[int | None, bool | None]], up: list[float], pl: list[float]) -> list[float]:
    """The law of the first promoted token, or of the first token where none is, counted out over what is not known:
    `drafted` gives the token and the coin of each path, None where it is not known. Tokens that are known come last."""
    options = []
    for token, flag in drafted:
        if token is not None:
            continue
        flags = (True, False) if flag is None else (flag,)
        known = {t for t, _ in drafted if t is not None}
        options.append([(x, f, up[x] if f else pl[x] - up[x]) for x in range(len(pl)) if x not in known for f in flags])
    law = [0.0] * len(pl)
    for fall in itertools.product(*options):
        chance = 1.0
        for _, _, weight in fall:
            chance *= weight
        first = next((x for x, flag, _ in fall if flag), fall[0][0])
        law[first] += chance
    return [x / sum(law) for x in law]


def promoted(paths: list[Path], flags: list[list[bool]], up: Shares, p: Law, q: Law) -> Said:
    """Promoted traversal, with the coins as they fell."""
    said, L = defaultdict[Path, float](float), len(paths[0])

    def visit(node: Path, members: list[int], weight: float, alive: float) -> float:
        """Walk a subtree; returns the chance that all of it was rejected."""
        i, due, seen = len(node), list(q(node)), dict[int, int]()
        while i < L and len(seen) < len(members):
            left = [k for k in members if k not in seen]
            drafted = [(seen.get(k), flags[k][i] if seen else None) for k in members]
            law = first_law(drafted, up(node, len(members)), p(node))
            x = paths[next((k for k in left if flags[k][i]), left[0])][i]
            inside = [k for k in left if paths[k][i] == x]
            alive = visit((*node, x), inside, min(1.0, weight * due[x] / law[x]), alive)
            if alive <= 0:
                return 0.0
            rest = [plus(weight * b - a) for a, b in zip(law, due, strict=True)]
            total = sum(rest)
            due = [r / total if total else 0.0 for r in rest]
            weight = total / (total + 1 - weight) if total > 1e-15 else 0.0  # else only rounding is left
            seen |= dict.fromkeys(inside, x)
        accept = 1.0 if node == () else weight
        spread(said, alive * accept, node, due)
        return alive * (1 - accept)

    visit((), list(range(len(paths))), 1.0, 1.0)
    return said

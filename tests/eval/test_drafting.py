"""The dynamic tree against a slow one that recomputes the drafter for every node; rerank by brute force; the gates."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from eval.drafting import UNGATED, Candidates, EagleDrafting, draft_budgets, rerank
from eval.engine import Engines
from eval.settings import Settings
from eval.tree import DraftTree
from models.eagle3 import Eagle3
from models.target import Target
from tests.eval.trees import Path, node_paths, path_set
from tests.models import naive_eagle
from tests.models.test_eagle3 import shape_of
from tests.tiny import tiny_drafter

LENGTHS = (7, 4, 10)


class Scene:
    """A random drafter behind three ragged prompts whose next token is known."""

    def __init__(self, target: Target, seed: int, kept: list[int] | None) -> None:
        self.target, self.drafter = target, tiny_drafter(target, kept, noise=0.15, seed=seed)
        source = torch.Generator().manual_seed(seed)
        self.texts = [torch.randint(2, 320, (n + 1,), generator=source).tolist() for n in LENGTHS]
        self.roots = torch.tensor([text[-1] for text in self.texts])

    def drafting(self, rows: list[int]) -> EagleDrafting:
        drafting = EagleDrafting(self.drafter, self.target, len(rows), 256)
        lengths = [LENGTHS[row] for row in rows]
        ids = torch.zeros(len(rows), max(lengths) + 1, dtype=torch.int64)
        for i, row in enumerate(rows):
            ids[i, : lengths[i] + 1] = torch.tensor(self.texts[row])
        taps = self.target.features(ids[:, :-1]).taps_BTC
        drafting.extend(taps, ids[:, 1:], torch.tensor(lengths), lengths)
        return drafting

    def tree(self, depth: int, branch: int, nodes: int, rows: list[int] | None = None) -> DraftTree:
        rows = list(range(3)) if rows is None else rows
        found = self.drafting(rows).draft(depth, branch).candidates()
        return rerank(found, self.roots[rows], torch.full((len(rows),), nodes), nodes)

    def log_law(self, row: int, path: Path) -> Tensor:
        """The drafter's log-probabilities over its vocabulary after a path, from nothing."""
        committed = torch.tensor([self.texts[row]])
        weights, shape = self.drafter.state_dict(), shape_of(self.drafter.config)
        taps = self.target.features(committed[:, :-1]).taps_BTC[0]
        embeds = self.target.embed(committed[0, 1:])
        drafted = self.target.embed(torch.tensor(path, dtype=torch.int64))
        state = naive_eagle.chain(weights, shape, taps, embeds, drafted)[-1]
        return naive_eagle.logits(weights, shape, state).log_softmax(-1)

    def slow_tree(self, row: int, depth: int, branch: int, nodes: int) -> dict[Path, float]:
        """EAGLE-2's tree with a dict: score of each kept path."""
        kept_ids = self.drafter.vocab.kept_ids.tolist()
        found: dict[Path, float] = {}
        frontier: dict[Path, float] = {(): 0.0}
        for _ in range(depth):
            grown: dict[Path, float] = {}
            for path, score in frontier.items():
                best = self.log_law(row, path).topk(branch)
                for value, index in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                    grown[(*path, kept_ids[index])] = score + value
            found |= grown
            frontier = dict(sorted(grown.items(), key=lambda item: -item[1])[:branch])
        return dict(sorted(found.items(), key=lambda item: -item[1])[:nodes])


def scored(tree: DraftTree, row: int) -> dict[Path, float]:
    return {path: float(tree.scores[row, node]) for node, path in enumerate(node_paths(tree, row)) if path}


@pytest.fixture(scope="module", params=["full", "reduced"])
def scene(request: pytest.FixtureRequest, tiny_target: Callable[..., Any]) -> Scene:
    kept = None if request.param == "full" else [i for i in range(320) if i % 3]
    return Scene(tiny_target("llama"), 3, kept)


@pytest.mark.parametrize(("depth", "branch", "nodes"), [(1, 4, 4), (3, 3, 7), (5, 4, 20), (4, 1, 4), (3, 4, 500)])
def test_the_dynamic_tree_equals_one_without_any_cache(scene: Scene, depth: int, branch: int, nodes: int) -> None:
    tree = scene.tree(depth, branch, nodes)
    for row in range(3):
        expected, ours = scene.slow_tree(row, depth, branch, nodes), scored(tree, row)
        assert ours.keys() == expected.keys()
        for path, score in expected.items():
            assert abs(ours[path] - score) < 1e-4


def test_rows_of_a_batch_equal_single_rows(scene: Scene) -> None:
    together = scene.tree(6, 5, 30)
    for row in range(3):
        alone, ours = scored(scene.tree(6, 5, 30, [row]), 0), scored(together, row)
        assert alone.keys() == ours.keys() and all(abs(alone[p] - ours[p]) < 1e-4 for p in alone)


def test_drafting_leaves_the_committed_slots_as_they_were(scene: Scene) -> None:
    drafting = scene.drafting([0, 1, 2])
    first = drafting.draft(5, 4).candidates()
    again = drafting.draft(5, 4).candidates()
    assert drafting.cache.host == list(LENGTHS)
    assert torch.equal(first.tokens, again.tokens) and torch.equal(first.scores, again.scores)


def test_committed_slots_may_come_in_parts(scene: Scene) -> None:
    """What a round of decoding does: extend again by what was accepted, a finished row by nothing."""
    drafting = EagleDrafting(scene.drafter, scene.target, 2, 256)
    ids = torch.tensor([scene.texts[0][:8], scene.texts[2][:8]])
    taps = scene.target.features(ids).taps_BTC
    drafting.extend(taps[:, :3], ids[:, 1:4], torch.tensor([3, 3]), [3, 3])
    stopped = drafting.state_B1H[1].clone()
    drafting.extend(taps[:, 3:6], ids[:, 4:7], torch.tensor([2, 0]), [2, 0])
    assert drafting.cache.host == [5, 3] and torch.equal(drafting.state_B1H[1], stopped)
    whole = EagleDrafting(scene.drafter, scene.target, 2, 256)
    whole.extend(taps[:, :5], ids[:, 1:6], torch.tensor([5, 3]), [5, 3])
    torch.testing.assert_close(drafting.state_B1H, whole.state_B1H, atol=1e-5, rtol=1e-5)
    assert torch.equal(drafting.draft(3, 3).candidates().tokens, whole.draft(3, 3).candidates().tokens)


def random_candidates(draw: random.Random, ties: bool) -> Candidates:
    """Two rows of layers whose children never outscore their parents, with many equal scores if wanted."""
    rows = []
    for _ in range(2):
        tokens: list[int] = []
        parents: list[int] = []
        scores: list[float] = []
        for i in range(25):
            parent = draw.randint(0, i) if i >= 4 else 0
            step = draw.choice([0.0, 1.0]) if ties else draw.random()
            tokens.append(draw.randrange(50))
            parents.append(parent)
            scores.append((scores[parent - 1] if parent else 0.0) - step)
        rows.append((tokens, parents, scores))
    columns = [torch.tensor([row[i] for row in rows]) for i in range(3)]
    return Candidates(columns[0], columns[1], columns[2], torch.full((2,), UNGATED), 25)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_rerank_keeps_the_best_and_is_closed_under_parents(seed: int, ties: bool) -> None:
    draw = random.Random(seed)
    found = random_candidates(draw, ties)
    budgets = [draw.randint(0, 12), draw.randint(0, 12)]
    tree = rerank(found, torch.tensor([90, 91]), torch.tensor(budgets), 12)
    for row in range(2):
        scores = found.scores[row].tolist()
        best = sorted(sorted(range(25), key=lambda i: (-scores[i], i))[: budgets[row]])
        nodes = [n for n in range(1, tree.size) if tree.valid[row, n]]
        assert [int(tree.tokens[row, n]) for n in nodes] == found.tokens[row, best].tolist()
        assert [float(tree.scores[row, n]) for n in nodes] == [scores[i] for i in best]
        for node, i in zip(nodes, best, strict=True):
            parent = int(found.parents[row, i])
            assert parent == 0 or parent - 1 in best
            assert int(tree.parents[row, node]) == (nodes[best.index(parent - 1)] if parent else 0)


def test_budgets_of_the_stages() -> None:
    assert draft_budgets(60) == [8, 24, 40, 60]
    assert draft_budgets(30) == [4, 12, 20, 30]


@pytest.fixture
def counted(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Drafter forwards made while drafting: one entry each."""
    calls: list[int] = []
    real = Eagle3.step

    def step(self: Eagle3, *args: Any, **options: Any) -> Tensor:
        calls.append(1)
        return real(self, *args, **options)

    monkeypatch.setattr(Eagle3, "step", step)
    return calls


@pytest.mark.parametrize(
    ("gates", "stage", "layers"),
    [
        ((1.0, 1.0, 1.0), 0, 1),
        ((0.0, 1.0, 1.0), 1, 2),
        ((0.0, 0.0, 1.0), 2, 6),
        ((0.0, 0.0, 0.0), UNGATED, 8),
        ((), UNGATED, 8),
    ],
)
def test_a_gate_really_stops_drafting(
    scene: Scene, counted: list[int], gates: tuple[float, ...], stage: int, layers: int
) -> None:
    """The failing layer is kept (late break): `layers` drafted, by layers - 1 forwards beside the committed slots'."""
    drafting = scene.drafting([0, 1, 2])
    counted.clear()
    found = drafting.draft(8, 10, gates).candidates()
    assert found.stage.tolist() == [stage] * 3 and found.depth == layers
    assert len(counted) == layers - 1
    assert found.tokens.shape[1] == 10 + (layers - 1) * 100


def test_gates_at_0_draft_eagles_tree_exactly(scene: Scene) -> None:
    plain = scene.drafting([0, 1, 2]).draft(8, 10).candidates()
    gated = scene.drafting([0, 1, 2]).draft(8, 10, (0.0, 0.0, 0.0)).candidates()
    for one, other in (
        (plain.tokens, gated.tokens),
        (plain.parents, gated.parents),
        (plain.scores, gated.scores),
        (plain.stage, gated.stage),
    ):
        assert torch.equal(one, other)


def test_each_row_stops_at_its_own_gate(scene: Scene) -> None:
    """Gates between the rows' confidences: a stopped row drafts what it would alone, whatever the others do."""
    free = scene.drafting([0, 1, 2]).draft(8, 10).candidates()
    confidence = [free.scores[row, :10].max().exp().item() for row in range(3)]
    low, middle, _ = sorted(confidence)
    gates = ((low + middle) / 2, 0.0, 1.0)
    found = scene.drafting([0, 1, 2]).draft(8, 10, gates).candidates()
    assert found.stage.tolist() == [0 if c == low else 2 for c in confidence]
    budgets = torch.tensor(draft_budgets(60))[found.stage]
    tree = rerank(found, scene.roots, budgets, 60)
    for row in range(3):
        alone = scene.drafting([row]).draft(8, 10, gates).candidates()
        single = rerank(alone, scene.roots[[row]], budgets[[row]], 60)
        assert int(alone.stage) == int(found.stage[row])
        assert scored(single, 0).keys() == scored(tree, row).keys() == path_set(tree, row)
        assert len(path_set(tree, row)) <= int(budgets[row])
        if int(found.stage[row]) == 0:
            assert all(len(path) == 1 for path in path_set(tree, row)) and len(path_set(tree, row)) == 8


def test_a_row_that_has_ended_holds_no_other(scene: Scene, counted: list[int]) -> None:
    """However sure it was: the others' gates alone decide, and nothing of their drafts changes."""
    every = scene.drafting([0, 1, 2])
    first = every.draft(1, 10).candidates().scores.amax(1).exp()
    sure, gate = int(first.argmax()), float(first.sort().values[1:].mean())
    ended = torch.arange(3) == sure
    expected = every.draft(8, 10, (gate, 0.0, 0.0)).candidates()
    assert expected.depth == 8 and expected.stage.tolist() == [UNGATED if i == sure else 0 for i in range(3)]
    every.alive_B.copy_(~ended)
    counted.clear()
    found = every.draft(8, 10, (gate, 0.0, 0.0)).candidates()
    assert found.depth == 1 and not counted
    assert torch.equal(found.tokens[~ended], expected.tokens[~ended, :10])
    engine = Engines(fixed=False).get(scene.target, scene.drafter, Settings("prune", gates=(gate, 0.0, 0.0)), 3, 16)
    engine.prefill(scene.texts, [0, 1, 2], None)
    engine.finish(ended.tolist())
    assert isinstance(engine.drafting, EagleDrafting) and torch.equal(engine.drafting.alive_B, ~ended)
    engine.prefill(scene.texts, [0, 1, 2], None)
    assert bool(engine.drafting.alive_B.all())


def test_a_confidence_that_equals_the_gate_stops(tiny_target: Callable[..., Any]) -> None:
    """A drafter of one word is sure of it: c = 1 exactly, and drafting goes on only where c is above the gate."""
    scene = Scene(tiny_target("llama"), 5, [9])
    assert scene.drafting([0]).draft(4, 10, (1.0, 0.5, 0.5)).candidates().stage.tolist() == [0]
    assert scene.drafting([0]).draft(4, 10, (0.999, 1.0, 0.5)).candidates().stage.tolist() == [1]
    assert scene.drafting([0]).draft(4, 10, (0.999, 0.999, 0.5)).candidates().stage.tolist() == [UNGATED]


def test_more_branches_than_the_vocabulary(tiny_target: Callable[..., Any]) -> None:
    scene = Scene(tiny_target("llama"), 5, [4, 9, 200])
    tree = scene.tree(3, 10, 60)
    for row in range(3):
        assert path_set(tree, row) == set(scene.slow_tree(row, 3, 3, 60))

"""What the proposers offer, against slow ones: retrieval by a dict, copies by plain loops, TALON by its words."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from eval.drafting import UNGATED, draft_budgets
from eval.engine import Clock
from eval.matrix import WIDTH, SuccessorMatrix, template
from eval.proposing import Proposal, Recycled, proposer
from eval.settings import Settings
from eval.talon import RATIO
from eval.tree import RETRIEVAL
from models.capture import Steps
from tests.eval.test_copying import slow
from tests.eval.test_drafting import Scene, scored
from tests.eval.trees import Path, node_paths, path_set

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def scene(tiny_target: Callable[..., Any]) -> Scene:
    return Scene(tiny_target("llama"), 3, [i for i in range(320) if i % 3])


def proposed(scene: Scene, settings: Settings, fixed: bool = False, rows: list[int] | None = None) -> Proposal:
    rows = [0, 1, 2] if rows is None else rows
    made = proposer(settings, scene.roots[rows], fixed, scene.drafting(rows), 320)
    return made.propose(Steps(CPU, captures=False), Clock(CPU))


def slow_talon(scene: Scene, row: int, depth: int, branch: int, nodes: int) -> dict[Path, float]:
    """Ten children of the root, then layer by layer what is within the ratio of the layer's best, until the budget."""
    kept_ids = scene.drafter.vocab.kept_ids.tolist()
    found: dict[Path, float] = {}
    frontier: dict[Path, float] = {(): 0.0}
    for level in range(depth):
        grown: dict[Path, float] = {}
        for path, score in frontier.items():
            best = scene.log_law(row, path).topk(branch)
            for value, index in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                grown[(*path, kept_ids[index])] = score + value
        bar = max(grown.values()) + math.log(RATIO) if level else -math.inf
        ranked = sorted(grown.items(), key=lambda item: -item[1])
        frontier = dict([(path, score) for path, score in ranked if score >= bar][: nodes - len(found)])
        found |= frontier
        if len(found) == nodes:
            break
    return found


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize(("depth", "branch", "nodes"), [(16, 4, 40), (3, 3, 30), (1, 10, 60), (6, 2, 9), (4, 10, 7)])
def test_talon_grows_the_tree_of_its_description(
    scene: Scene, depth: int, branch: int, nodes: int, fixed: bool
) -> None:
    tree = proposed(scene, Settings("talon", depth=depth, branch=branch, nodes=nodes), fixed).tree
    for row in range(3):
        expected, ours = slow_talon(scene, row, depth, branch, nodes), scored(tree, row)
        assert ours.keys() == expected.keys()
        assert all(abs(ours[path] - score) < 1e-4 for path, score in expected.items())


def test_a_sure_drafter_gets_a_deep_talon_tree(tiny_target: Callable[..., Any]) -> None:
    """One of two words, of which it is sure of neither: wide; one of a single word: a line to the cap."""
    wide = proposed(Scene(tiny_target("llama"), 5, [4, 9]), Settings("talon", depth=16)).tree
    line = proposed(Scene(tiny_target("llama"), 5, [9]), Settings("talon", depth=16)).tree
    assert path_set(line, 0) == {(9,) * n for n in range(1, 17)}
    assert len(path_set(wide, 0)) == 60 and max(map(len, path_set(wide, 0))) < 16


@pytest.mark.parametrize("gates", [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (0.0, 0.0, 0.0)])
def test_pruned_trees_are_eagles_best_nodes_of_the_layers_drafted(scene: Scene, gates: tuple[float, ...]) -> None:
    settings = Settings("prune", depth=8, branch=4, nodes=60, gates=gates)
    found = proposed(scene, settings)
    stage = next((i for i, gate in enumerate(gates) if gate), UNGATED)
    kept, layers = draft_budgets(60)[stage], (1, 2, 6, 8)[stage]
    assert found.stage.tolist() == [stage] * 3 and found.merged.tolist() == [0] * 3
    eagle = proposed(scene, Settings("eagle", depth=layers, branch=4, nodes=kept)).tree
    for row in range(3):
        assert scored(found.tree, row) == scored(eagle, row)
    assert found.tree.size == 1 + min(kept, 4 + 16 * (layers - 1))


def test_rows_that_stop_at_different_gates_are_pruned_as_they_would_be_alone(scene: Scene) -> None:
    sure = scene.drafting([0, 1, 2]).draft(1, 4).candidates().scores.amax(1).exp()
    settings = Settings("prune", branch=4, gates=(float(sure.median()), 0.0, 0.0))
    together = proposed(scene, settings)
    assert sorted(together.stage.tolist()) == [0, 0, UNGATED]
    for row in range(3):
        alone = proposed(scene, settings, rows=[row])
        assert int(alone.stage) == int(together.stage[row])
        assert path_set(alone.tree, 0) == path_set(together.tree, row)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("nodes", [1, 7, 60])
def test_recycled_trees_follow_the_matrix(nodes: int, fixed: bool) -> None:
    source = torch.Generator().manual_seed(nodes)
    roots = torch.tensor([3, 11, 0])
    made = proposer(Settings("recycle", nodes=nodes), roots, fixed, None, 12)
    assert isinstance(made, Recycled)
    rows = torch.stack([torch.randperm(12, generator=source)[:WIDTH] for _ in range(9)])
    made.matrix.update(torch.arange(9), rows)  # 9 to 11 are cold
    found = made.propose(Steps(CPU, captures=False), Clock(CPU))
    for row, root in enumerate(roots.tolist()):
        expected: set[Path] = set()
        for ranks in template(nodes, published=False).paths:
            path, token = [], root
            for rank in ranks:
                token = int(made.matrix.rows[token, rank]) if token >= 0 else -1
                path.append(token)
            if min(path) >= 0:
                expected.add(tuple(path))
        assert path_set(found.tree, row) == expected
        assert all(s == RETRIEVAL for s in found.tree.source[row, 1:][found.tree.valid[row, 1:]].tolist())
    assert found.tree.size == 1 + (nodes if fixed else max(len(path_set(found.tree, row)) for row in range(3)))


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize(("decoder", "longest"), [("lookup", 3), ("suffix", 100)])
def test_copies_are_lines_of_each_rows_own_text(decoder: str, longest: int, fixed: bool) -> None:
    texts = [[1, 2, 3, 4, 1, 2], [7, 8, 9], [5, 5, 5, 5, 6, 5, 5]]
    said = [[3], [7, 8], []]
    made = proposer(Settings(decoder, depth=5), torch.tensor([3, 8, 5]), fixed, None, 12)
    made.start([[9, 9, 9]] * 3)
    made.start(texts)  # forgets the rows before
    made.hear(said)
    tree = made.propose(Steps(CPU, captures=False), Clock(CPU)).tree
    drafts = []
    for row, text in enumerate(a + b for a, b in zip(texts, said, strict=True)):
        length, end = slow(text, longest)
        most = 5 if decoder == "lookup" else min(5, 4 * length)
        drafts.append(text[end:][:most] if length else [])
        paths = [path for path in node_paths(tree, row) if path is not None]
        assert paths == [tuple(drafts[-1][:n]) for n in range(len(drafts[-1]) + 1)]
    assert tree.size == 1 + (5 if fixed else max(map(len, drafts)))
    assert made.line


def test_what_a_decoder_holds() -> None:
    """A drafter is asked for by those that need one and by no other."""
    for name, drafts, remembers in (
        ("ar", False, False),
        ("recycle", False, True),
        ("lookup", False, False),
        ("suffix", False, False),
        ("prune", True, False),
        ("talon", True, False),
        ("graft", True, True),
    ):
        settings = replace(Settings(), decoder=name)
        assert (settings.drafts, settings.remembers) == (drafts, remembers)
        if not drafts:
            made = proposer(settings, torch.tensor([1]), False, None, 12)
            assert isinstance(made.matrix, SuccessorMatrix) == remembers and made.drafting is None

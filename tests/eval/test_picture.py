"""The picture of a draft tree: it shows the tree that was verified, the grafts in it, and the accepted path."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval import picture
from eval.decode import decode
from eval.harness import Bench, measure
from eval.picture import Sketch, layout, shown, sketch
from eval.plan import Entry
from eval.settings import Settings
from models.target import Target
from recipes.schema import EvalConfig, Recipe
from tests.eval.fakes import fake_prompts
from tests.tiny import tiny_drafter


@pytest.fixture(scope="module")
def bench(tiny_target: Callable[..., Any]) -> Bench:
    target: Target = tiny_target("llama", initializer_range=0.1)
    settings = Settings("graft", 24, depth=4, branch=4, nodes=20, gates=(0.3, 0.1, 0.5))
    entries = [Entry("ar", Settings("ar", 24)), Entry("graft", settings, matrix="cold")]
    drafter = tiny_drafter(target, noise=0.0)
    found = Bench(Recipe(eval=EvalConfig(max_new_tokens=24)), target, drafter, entries, decode)
    measure(found, fake_prompts(1))
    return found


def test_the_sketch_is_a_round_of_the_measured_answer(bench: Bench) -> None:
    found = sketch(bench)
    assert found is not None
    assert found.parents[0] == 0 and all(parent < node for node, parent in enumerate(found.parents) if node)
    assert found.accepted[0] == 0
    assert all(found.parents[b] == a for a, b in zip(found.accepted, found.accepted[1:], strict=False))
    assert not found.grafted[0] and any(found.grafted)
    said = bench.target.tokenizer.decode(bench.outcomes["graft"][0].outputs[0])
    pieces = [found.texts[node] for node in found.accepted] + [found.bonus]
    assert "".join(pieces) in said or any("\ufffd" in piece for piece in pieces)


def test_without_a_tree_there_is_nothing_to_draw(bench: Bench) -> None:
    only_ar = Bench(bench.recipe, bench.target, None, bench.entries[:1], decode)
    measure(only_ar, fake_prompts(1))
    assert sketch(only_ar) is None


@given(st.data())
def test_siblings_lie_in_order_and_parents_between_their_children(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 20))
    parents = [0] + [data.draw(st.integers(0, node - 1)) for node in range(1, size)]
    places = layout(parents)
    assert len(set(places)) == size
    for node, parent in enumerate(parents[1:], 1):
        assert places[node][0] == places[parent][0] + 1
        siblings = [places[k][1] for k, p in enumerate(parents[1:], 1) if p == parent]
        assert siblings == sorted(siblings)
        assert siblings[0] <= places[parent][1] <= siblings[-1]


def test_it_is_drawn_whole(tmp_path: Path) -> None:
    found = Sketch(
        "graft, p0, round 2", ["a", " $x$", "\n", "c"], [0, 0, 1, 0], [False, True, True, False], [0, 1, 2], "!"
    )
    picture.draw(found, tmp_path / "tree.png")
    assert [path.name for path in tmp_path.iterdir()] == ["tree.png"]
    assert (tmp_path / "tree.png").read_bytes().startswith(b"\x89PNG")
    picture.draw(Sketch("root alone", ["a"], [0], [False], [0], "b"), tmp_path / "tree.png")
    assert shown(" a\n$") == "\u2423a\\n\\$"

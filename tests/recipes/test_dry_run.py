"""Every recipe's data part is checked and priced without a network, a GPU or any weight."""

import pytest

from data_prep.run import main
from recipes.loading import load, recipe_names


@pytest.mark.parametrize("name", recipe_names())
def test_dry_run_prints_the_resolved_recipe_and_its_cost(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(load([f"recipe={name}", "dry_run=true"]))
    shown = capsys.readouterr().out
    assert f"recipe: {name}" in shown
    assert "tokens" in shown

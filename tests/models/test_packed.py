"""models.packed: rows that are filled up to a size say what they say as they are."""

from pathlib import Path

import pytest
import torch

from models.attention import Documents
from models.packed import PackedForward
from models.target import load_target
from recipes.schema import TargetConfig
from tests.tiny import tiny_model_folder

ROWS = [[26, 1, 2, 14], [9], [1, 1, 40], [1030, 3]]


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3_text"])
def test_a_row_that_is_filled_up_says_the_same_and_keeps_it(tmp_path: Path, family: str) -> None:
    """Also when the next row of the same size has been read."""
    target = load_target(TargetConfig(path=str(tiny_model_folder(tmp_path, family))), "cpu", torch.float64)
    plain, filled, source = PackedForward(target, 1), PackedForward(target, 1, fills=True), torch.Generator()
    found = []
    for lengths in ROWS:
        documents = Documents(lengths, target.device)
        ids = torch.randint(2, 320, (sum(lengths),), generator=source)
        found.append((plain.read(ids, documents), filled.read(ids, documents)))
    assert len(filled.places) == 2
    for (states, keys), (states_filled, keys_filled) in found:
        torch.testing.assert_close(states_filled.taps_BTC, states.taps_BTC)
        torch.testing.assert_close(states_filled.final_BTH, states.final_BTH)
        assert [*keys] == [*keys_filled] == [*range(1, target.n_layers)]
        for index, pair in keys.items():
            torch.testing.assert_close(keys_filled[index], pair)

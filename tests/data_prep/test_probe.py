"""The dry run's expectations: what is counted, that no weights are loaded, and that the time is of the right size."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep import probe
from data_prep.dialogue import Dialogue, Terms
from data_prep.local import Local
from data_prep.prompts import Prompt
from data_prep.run import main
from models.target import Target
from recipes.schema import Recipe, ServerConfig, SourceConfig, TargetConfig
from tests.tiny import tiny_config, tiny_model_folder

Maker = Callable[..., Recipe]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_one_layer_and_head_of_the_shape_are_timed(make_recipe: Maker, family: str) -> None:
    config = tiny_config(family, num_hidden_layers=6)
    found = probe.probe(make_recipe(), config, context=64)
    assert 0 < found.token < found.step < 1 and 0 < found.layer_token < found.token
    assert found.spent < probe.SECONDS + 5
    deeper = probe.probe(make_recipe(), tiny_config(family, num_hidden_layers=600), context=64)
    assert 20 < deeper.token / found.token < 500


def test_dry_run_counts_and_loads_no_weights(
    make_recipe: Maker, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = probe.probe

    def at_a_known_speed(*asked: Any) -> probe.Probe:
        """What is printed must not hang on how busy this machine is."""
        return replace(timed(*asked), step=1e-4, draw=1e-5, token=1e-6)

    monkeypatch.setattr(probe, "probe", at_a_known_speed)
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)
    recipe = replace(make_recipe(), dry_run=True)
    main(recipe)
    out = capsys.readouterr().out
    assert "12 rows, at most" in out and "% of them answers" in out
    assert "  answers: 0 s, " in out and "  training: " in out and "tokens/s" in out and "MB" in out
    main(replace(recipe, data=replace(recipe.data, server=ServerConfig(url="http://localhost:1/v1"))))
    assert "as fast as the server is" in capsys.readouterr().out
    main(replace(recipe, target=TargetConfig(path="no/such-model")))
    assert "the time is not known before the target's config can be read" in capsys.readouterr().out


def test_kept_answers_are_counted_and_not_generated(make_recipe: Maker, tmp_path: Path) -> None:
    from data_prep.sources import check_sources

    path = tmp_path / "traffic.jsonl"
    path.write_text(json.dumps({"turns": ["how are you"]}) + "\n")
    [cost] = check_sources(make_recipe(sources={"mine": SourceConfig(path=str(path), answers="keep")}))
    assert cost.answer_tokens == 0 and cost.asked_tokens > 0


@pytest.mark.slow
def test_the_expected_time_of_answers_is_of_the_right_size(tmp_path: Path) -> None:
    """A target of a real shape, though a small one, whose answers never end: within a factor of two."""
    shape: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 12, "head_dim": 32}
    shape |= {"vocab_size": 8192, "num_attention_heads": 8, "num_key_value_heads": 4}
    folder = tiny_model_folder(tmp_path / "model", **shape)
    recipe: Any = Recipe(device="cpu", target=TargetConfig(path=str(folder)))
    recipe = replace(recipe, data=replace(recipe.data, slots=32, max_length=192, answer_tokens=96, dtype="float32"))
    load = probe.Load(rows=96, written=0, asked=96 * 20, answered=96 * 96, kept=0)
    found = probe.probe(recipe, probe.target_config(recipe.target), context=68)
    expected = load.answered * (found.step + found.draw) / 32 + load.asked * found.token
    from models.target import load_target

    target: Target = load_target(recipe.target, "cpu", torch.float32)
    local = Local(lambda dtype: target, torch.device("cpu"), "float32", 32)
    terms = Terms(target.tokenizer, {}, frozenset(), 192, 96)
    dialogues = [Dialogue(terms, "s", Prompt(str(i), ["x y z " * 3]).conversation(), 1.0) for i in range(96)]
    began = time.perf_counter()
    local.answer({0: range(96)}, lambda span: dialogues, 0, lambda *done: None)
    spent = time.perf_counter() - began
    assert 0.5 < expected / spent < 2

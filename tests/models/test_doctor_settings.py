"""Keys of a config.json that an engine would stop at, read otherwise or leave out: each has its finding."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from models.doctor import examine
from models.layout_tables import OLD_NORMS
from models.target import Target
from recipes.schema import TargetConfig
from tests.models.test_doctor import H, config, export, rename, to_eagle31, to_norm_before_fc, to_speculators, weights

YARN = {"rope_type": "yarn", "rope_theta": 10000.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0}
BOTH, FATAL, LOUD = "vLLM SGLang", "fatal", "loud"


@pytest.fixture(scope="module")
def target(tiny_target: Callable[..., Any]) -> Target:
    found: Target = tiny_target("llama")
    return found


KEYS: dict[str, tuple[dict[str, Any], str, str, str]] = {
    # what is written, how bad, for which engines, words
    "quantised": ({"quantization_config": {"quant_method": "fp8"}}, FATAL, BOTH, "weights are plain floats"),
    "scale": ({"logit_scale": 0.5}, LOUD, BOTH, "logit_scale=0.5"),
    "scale of nothing": ({"logit_scale": 0}, FATAL, BOTH, "logit_scale=0 is no number above 0"),
    "scale of text": ({"logit_scale": "1"}, FATAL, BOTH, "logit_scale='1'"),
    "partly rotated": ({"partial_rotary_factor": 0.5}, LOUD, BOTH, "partial_rotary_factor=0.5"),
    "rotated too far": ({"partial_rotary_factor": 2}, FATAL, BOTH, "not in (0, 1]"),
    "a window": ({"sliding_window": 512, "use_sliding_window": True}, LOUD, BOTH, "without layer_types"),
    "a window, unsaid": ({"sliding_window": 512}, LOUD, BOTH, "without layer_types"),
    "a sliding layer": ({"sliding_window": 512, "layer_types": ["sliding_attention"]}, LOUD, "SGLang", "512 tokens"),
    "a layer that can't slide": ({"layer_types": ["sliding_attention"]}, FATAL, BOTH, "sliding_window is None"),
    "a layer of no kind": ({"layer_types": ["linear"]}, FATAL, BOTH, "must name full_attention"),
    "too few kinds": ({"layer_types": []}, FATAL, BOTH, "for each of 1 layers"),
    "nested in nothing": ({"eagle_config": [1]}, FATAL, BOTH, "eagle_config=[1] is no mapping"),
    "two words for one": ({"use_aux_norm": True, "fc_norm": False}, FATAL, BOTH, "which is read differs by engine"),
    "two scalings": ({"rope_scaling": {"rope_type": "llama3"}}, FATAL, BOTH, "disagree (rope_type)"),
    "no type": ({"model_type": None}, FATAL, BOTH, "model_type is not written"),
    "a type of no kind": ({"model_type": 3}, FATAL, BOTH, "model_type is 3"),
    "a type nobody knows": ({"model_type": "lama"}, LOUD, BOTH, "model_type is 'lama'"),
    "theta as text": ({"rope_theta": "1e6", "rope_parameters": None}, FATAL, BOTH, "rope_theta='1e6'"),
    "theta as a list": ({"rope_theta": [1e6], "rope_parameters": None}, FATAL, BOTH, "rope_theta=[1000000.0]"),
    "yarn of nothing": ({"rope_parameters": YARN}, FATAL, BOTH, "yarn without factor, original_max"),
    "llama3 by half": ({"rope_parameters": LLAMA3}, FATAL, BOTH, "llama3 without low_freq_factor, high_freq_factor"),
    "a scaling of no kind": ({"rope_parameters": {"rope_type": "spiral"}}, FATAL, BOTH, "rope_type='spiral'"),
    "RoPE of text": ({"rope_parameters": "yarn"}, FATAL, BOTH, "rope_parameters='yarn' is no mapping"),
    "a layer and a bit": ({"num_hidden_layers": 1.0}, FATAL, BOTH, "num_hidden_layers=1.0"),
    "a flag of text": ({"norm_output": "false"}, FATAL, BOTH, "norm_output='false'"),
    "no length": ({"max_position_embeddings": None}, LOUD, BOTH, "is not written, and read as 2048"),
}  # fmt: skip


@pytest.mark.parametrize("name", KEYS)
def test_a_key_has_its_finding(target: Target, tmp_path: Path, name: str) -> None:
    changes, weight, engines, words = KEYS[name]
    folder = export(target, tmp_path / "d")
    config(folder, **changes)
    found = [f for f in examine(folder).findings if f.fatal or f.loud]
    assert len(found) == 1, found
    assert words in found[0].what and " ".join(found[0].engines) == engines
    assert (found[0].fatal, found[0].loud) == (weight == FATAL, weight == LOUD)


def test_a_window_that_is_off_and_a_key_of_null_are_nothing(target: Target, tmp_path: Path) -> None:
    folder = export(target, tmp_path / "d")
    before = examine(folder).findings
    config(folder, sliding_window=512, use_sliding_window=False, logit_scale=1.0, partial_rotary_factor=1.0)
    config(folder, rope_scaling={}, quantization_config={}, layer_types=["full_attention"])
    assert examine(folder).findings == before


def test_a_length_that_is_not_written_is_too_short_for_a_longer_target(
    tiny_target: Callable[..., Any], tmp_path: Path
) -> None:
    target: Target = tiny_target("llama", max_position_embeddings=4096)
    folder = export(target, tmp_path / "d")
    config(folder, max_position_embeddings=None)
    (fatal,) = [f for f in examine(folder, TargetConfig(path=str(target.folder))).findings if f.fatal]
    assert "is not written, and read as 2048, the target has 4096" in fatal.what and fatal.engines == ("SGLang",)


def test_both_norms_before_fc_are_a_warning(target: Target, tmp_path: Path) -> None:
    folder = export(target, tmp_path / "d", kept=None)
    to_norm_before_fc(folder)
    to_eagle31(folder)
    (found,) = [f for f in examine(folder).findings if f.fatal or f.loud]
    assert found.loud and "fc_norm and norm_before_fc are both on" in found.what


def test_flags_of_the_block_alone_are_a_fault_of_the_speculators_layout(target: Target, tmp_path: Path) -> None:
    folder = export(target, tmp_path / "d")
    to_eagle31(folder)
    to_speculators(folder, norm_before_residual=True)
    assert not examine(folder).fatal
    block = {"norm_output": True, "norm_before_residual": True}
    inner = json.loads((folder / "config.json").read_text())["transformer_layer_config"]
    config(folder, norm_output=None, transformer_layer_config=inner | block)
    (fatal,) = [f for f in examine(folder).findings if f.fatal]
    assert fatal.what.startswith("norm_output only inside transformer_layer_config") and fatal.engines == ("vLLM",)


def test_a_fourth_tap_must_be_told_where_vllm_looks(tiny_target: Callable[..., Any], tmp_path: Path) -> None:
    folder = export(tiny_target("llama", taps=[1, 2, 4, 7]), tmp_path / "d")
    to_speculators(folder, norm_before_residual=True)
    inside = json.loads((folder / "config.json").read_text())
    assert not examine(folder).fatal
    block = inside["transformer_layer_config"]
    config(folder, num_aux_hidden_states=block.pop("num_aux_hidden_states"), transformer_layer_config=block)
    (fatal,) = [f for f in examine(folder).findings if f.fatal]
    assert fatal.what.startswith("num_aux_hidden_states=4 only at the top level") and fatal.stops == ("vLLM",)


def test_names_of_old_are_sglangs(target: Target, tmp_path: Path) -> None:
    folder = export(target, tmp_path / "d")
    to_eagle31(folder)
    config(folder, fc_norm=None, use_aux_norm=True)
    for old, new in OLD_NORMS.items():
        rename(folder, new, old)
    report = examine(folder)
    (fatal,) = [f for f in report.findings if f.fatal]
    assert "aux_norm_low.weight, aux_norm_mid.weight" in fatal.what and "use_aux_norm" in fatal.what
    assert [(r.engine, r.verdict) for r in report.readings] == [("vLLM", "refuses"), ("SGLang", "serves")]
    assert not examine(folder, engines=("SGLang",)).fatal
    weights(folder, lambda t: t.update({"aux_norm_low.weight": torch.ones(H + 1)}))
    assert any("fc_norm.0.weight is [33]" in f.what for f in examine(folder).findings)

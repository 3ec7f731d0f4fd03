"""The checkpoints of FlexDraft's authors: names and config as theirs, written out here, are read as their drafter."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.doctor import examine
from models.flex_layout import check_flexdraft, is_flexdraft, load_flexdraft, save_flexdraft
from models.flexdraft import FlexDraft, FlexDraftConfig
from models.target import Target, load_target
from recipes.files import read_json, write_json
from recipes.schema import TargetConfig, UserError
from tests.tiny import tiny_model_folder

LAYERS, TARGET_LAYERS, SIZE, RANK = 3, 8, 4, 2


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tiny_model_folder(tmp_path_factory.mktemp("qwen3"), "qwen3")
    return load_target(TargetConfig(path=str(folder)))


def theirs() -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A config and random tensors as the released checkpoint has them, the unused ones too."""
    H, wide, narrow, V, draw = 32, 32, 16, 320, torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"mask_embedding": (H,), "norm.weight": (H,)}
    shapes |= {"anchor_bias_mlp.0.weight": (RANK, 2 * H), "anchor_bias_mlp.0.bias": (RANK,)}
    shapes |= {"anchor_bias_mlp.2.weight": (V, RANK), "anchor_bias_mlp.2.bias": (V,)}
    for i in range(LAYERS):
        parts: dict[str, tuple[int, ...]] = {"q_proj": (wide, H), "o_proj": (H, wide)}
        parts |= {"k_proj": (narrow, H), "v_proj": (narrow, H)}
        parts |= {"q_norm": (8,), "k_norm": (8,)}
        shapes |= {f"layers.{i}.self_attn.{name}.weight": shape for name, shape in parts.items()}
        shapes |= {f"layers.{i}.mlp.up_proj.weight": (64, H), f"layers.{i}.input_layernorm.weight": (H,)}
    config = {
        "model_type": "qwen3",
        "architectures": ["FlexDraftBiasModel"],
        "hidden_size": H,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": V,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "num_hidden_layers": LAYERS,
        "num_target_layers": TARGET_LAYERS,
        "block_size": SIZE,
        "dflash_config": {
            "target_layer_ids": [5, 6, 7],
            "enable_anchor_bias_logits": True,
            "anchor_bias_rank": RANK,
        },
    }
    return config, {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def written(folder: Path, change: dict[str, Any] | None = None, without: str = "") -> Path:
    config, tensors = theirs()
    folder.mkdir()
    write_json(folder / "config.json", config | (change or {}))
    save_file({name: t for name, t in tensors.items() if name != without}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("key", ["dflash_config", "flexdraft_config"])
def test_it_is_the_drafter_of_these_tensors(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    config, tensors = theirs()
    folder = written(
        tmp_path / "out", {"architectures": ["Qwen3Model"], "dflash_config": None, key: config["dflash_config"]}
    )
    assert is_flexdraft(folder)
    assert examine(folder).kind == "FlexDraft"
    check_flexdraft(folder, target)
    drafter = load_flexdraft(folder, target)
    assert capsys.readouterr().err.count("carries no target fingerprint") == 1
    assert drafter.config.split_layer == 5 and drafter.config.block_size == SIZE
    wanted = FlexDraft(FlexDraftConfig.from_target(target, LAYERS, SIZE, RANK))
    wanted.mask.data.copy_(tensors["mask_embedding"])
    for i, layer in enumerate(wanted.layers):
        for name, parameter in layer.named_parameters():
            own = tensors[f"layers.{i}.self_attn.{name.removesuffix('.weight')}.weight"]
            parameter.data.copy_(own)
    assert wanted.calibrator is not None
    for part, number in ((wanted.calibrator.inner, 0), (wanted.calibrator.outer, 2)):
        part.weight.data.copy_(tensors[f"anchor_bias_mlp.{number}.weight"])
        part.bias.data.copy_(tensors[f"anchor_bias_mlp.{number}.bias"])
    assert all(torch.equal(drafter.state_dict()[name], t) for name, t in wanted.state_dict().items())
    cache = target.new_cache(1, 64)
    target.prefill(torch.arange(3, 12).unsqueeze(0), [9], cache)
    assert drafter.block(target, cache).isfinite().all()


def test_it_is_written_again_as_ours(target: Target, tmp_path: Path) -> None:
    drafter = load_flexdraft(written(tmp_path / "out"), target)
    save_flexdraft(drafter, tmp_path / "ours", {"fingerprint": target.fingerprint})
    again = load_flexdraft(tmp_path / "ours", target)
    assert all(torch.equal(again.state_dict()[name], t) for name, t in drafter.state_dict().items())


@pytest.mark.parametrize(
    ("change", "without", "words"),
    [
        ({"dflash_config": {"target_layer_ids": [1, 4, 7]}}, "", "target_layer_ids must be the last 3 of 8 layers"),
        ({"dflash_config": {}}, "", "they are None"),
        ({"block_size": 1}, "", "block_size is 1: must be a whole number from 2 to 64"),
        ({"block_size": "16"}, "", "block_size is no number above 0"),
        ({"num_attention_heads": 8, "head_dim": 4}, "", "its num_attention_heads is 8, the target's 4"),
        ({"rms_norm_eps": 1e-5}, "", "its rms_norm_eps is 1e-05, the target's 1e-06"),
        ({"num_hidden_layers": 5000, "num_target_layers": 5008}, "", "target_layer_ids must be"),
        ({"vocab_size": 330}, "", "its vocab_size is 330, the target's 320"),
        ({}, "layers.1.self_attn.v_proj.weight", r"layers\.1\.self_attn\.v_proj\.weight is missing"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    target: Target, tmp_path: Path, change: dict[str, Any], without: str, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        check_flexdraft(written(tmp_path / "out", change, without), target)


def test_a_tensor_that_nobody_knows_and_a_drafter_of_dflash_are_told_apart(target: Target, tmp_path: Path) -> None:
    folder = written(tmp_path / "out")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"layers.0.other.weight": torch.ones(2)}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"layers\.0\.other\.weight is no tensor of a published FlexDraft"):
        check_flexdraft(folder, target)
    assert not is_flexdraft(written(tmp_path / "dflash", without="mask_embedding"))
    assert read_json(folder / "config.json", "x")["num_target_layers"] == TARGET_LAYERS

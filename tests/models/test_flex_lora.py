"""FlexDraft's low-rank form: PEFT reads what is written, merged and not it says the same, what is odd is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from models.flex_layout import check_flexdraft, load_flexdraft, save_flexdraft
from models.flexdraft import FlexDraft, FlexDraftConfig
from models.target import Target, load_target
from recipes.files import read_json, write_json
from recipes.schema import TargetConfig, UserError
from tests.tiny import tiny_model_folder

RANK, SPLIT = 3, 5


@pytest.fixture(scope="module", params=["qwen2", "qwen3"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, FlexDraft]:
    """One family has biases, the other norms of q and k."""
    folder = tiny_model_folder(tmp_path_factory.mktemp(request.param), request.param)
    target = load_target(TargetConfig(path=str(folder)))
    drafter = FlexDraft(FlexDraftConfig.from_target(target, 3, 4, 2, lora_rank=RANK))
    drafter.init_from_target(target, [torch.arange(20)])
    return target, drafter


@pytest.fixture(scope="module")
def learned(pair: tuple[Target, FlexDraft]) -> FlexDraft:
    torch.manual_seed(0)
    for parameter in pair[1].parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.randn_like(parameter) * 0.2)
    return pair[1]


def states(target: Target, drafter: FlexDraft) -> torch.Tensor:
    cache = target.new_cache(1, 64)
    target.prefill(torch.arange(3, 12).unsqueeze(0), [9], cache)
    return drafter.block(target, cache)


def test_the_adapters_alone_are_trained_and_start_from_the_targets_projections(pair: tuple[Target, FlexDraft]) -> None:
    target, _ = pair
    full = FlexDraft(FlexDraftConfig.from_target(target, 3, 4))
    full.init_from_target(target, [torch.arange(20)])
    low = FlexDraft(FlexDraftConfig.from_target(target, 3, 4, lora_rank=RANK))
    low.init_from_target(target, [torch.arange(20)])
    assert torch.equal(states(target, low), states(target, full))
    trained = {name.split(".")[-1] for name, p in low.named_parameters() if p.requires_grad and "lora" not in name}
    assert trained == {"mask"} | ({"q_norm", "k_norm"} if full.config.qk_norm else set())


def test_what_is_written_comes_back_and_says_the_same_merged(
    pair: tuple[Target, FlexDraft], learned: FlexDraft, tmp_path: Path
) -> None:
    target = pair[0]
    save_flexdraft(learned, tmp_path / "out", {"fingerprint": target.fingerprint})
    again, merged = (load_flexdraft(tmp_path / "out", target, adapters) for adapters in (True, False))
    assert all(torch.equal(again.state_dict()[name], t) for name, t in learned.state_dict().items())
    assert merged.config.lora_rank == 0 and merged.calibrator is not None
    torch.testing.assert_close(states(target, merged), states(target, learned), atol=1e-5, rtol=1e-5)


def test_peft_reads_it_onto_the_target(pair: tuple[Target, FlexDraft], learned: FlexDraft, tmp_path: Path) -> None:
    target = pair[0]
    papers = {"fingerprint": target.fingerprint, "target": {"path": str(target.folder)}}
    save_flexdraft(learned, tmp_path / "out", papers)
    model: Any = AutoModelForCausalLM.from_pretrained(target.folder, dtype=torch.float32)
    tuned = PeftModel.from_pretrained(model, str(tmp_path / "out")).merge_and_unload()
    own = learned.merged()
    for number, layer in enumerate(own.layers):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            theirs = getattr(tuned.model.layers[SPLIT + number].self_attn, name).weight
            torch.testing.assert_close(theirs, layer.get_submodule(name).weight, atol=1e-6, rtol=1e-6)
    for number in range(SPLIT):  # the layers that are not tuned are the target's
        before = target.model.model.layers[number].self_attn.q_proj.weight
        assert torch.equal(tuned.model.layers[number].self_attn.q_proj.weight, before)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"target_modules": ["q_proj", "k_proj", "v_proj", "out_proj"]}, "it lacks o_proj and has no use for out_proj"),
        ({"target_modules": [["q_proj"]]}, "has no use for"),
        ({"r": 5}, "r=5, not 3"),
        ({"layers_to_transform": [0, 1, 2]}, r"layers_to_transform is \[0, 1, 2\], but the tuned layers .* are 5 to 7"),
        ({"layers_to_transform": None}, "layers_to_transform is None"),
        ({"exclude_modules": ["q_proj"]}, "exclude_modules is given"),
        ({"use_dora": True}, "use_dora=True, not False"),
        ({"rank_pattern": {"q_proj": 1}}, "rank_pattern is given"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_by_name(
    pair: tuple[Target, FlexDraft], learned: FlexDraft, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    save_flexdraft(learned, tmp_path / "out", {"fingerprint": pair[0].fingerprint})
    path = tmp_path / "out" / "adapter_config.json"
    write_json(path, read_json(path, "x") | change)
    with pytest.raises(UserError, match=words):
        check_flexdraft(tmp_path / "out", pair[0])


def test_another_drafters_adapter_is_not_its_calibrators(
    pair: tuple[Target, FlexDraft], learned: FlexDraft, tmp_path: Path
) -> None:
    target = pair[0]
    for name in ("one", "other"):
        save_flexdraft(learned, tmp_path / name, {"fingerprint": target.fingerprint})
        learned.get_parameter("layers.0.q_proj.lora_B.default.weight").data.add_(1)
    there, other = (tmp_path / name / "adapter_model.safetensors" for name in ("one", "other"))
    there.write_bytes(other.read_bytes())
    with pytest.raises(UserError, match=r"calibrator\.safetensors was fitted for another drafter"):
        check_flexdraft(tmp_path / "one", target)
    path = tmp_path / "one" / "config.json"
    config = read_json(path, "x")
    write_json(path, config | {"flexdraft_config": config["flexdraft_config"] | {"lora_rank": 0}})
    with pytest.raises(UserError, match=r"adapter_model\.safetensors is there, but config\.json's lora_rank is 0"):
        check_flexdraft(tmp_path / "one", target)
    write_json(path, config)
    there.unlink()
    with pytest.raises(UserError, match=r"adapter_model\.safetensors is missing"):
        check_flexdraft(tmp_path / "one", target)

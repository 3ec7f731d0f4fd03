"""The exported folder: what is in it, that an engine's reader gives the training logits, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models import layouts
from models.eagle3 import Eagle3
from models.layout_tables import LAYOUTS
from models.layouts import default_layout, load_drafter, save_drafter
from models.target import Target
from recipes.schema import UserError
from tests.models.test_golden import verifier
from tests.tiny import tiny_drafter

KEPT = [i for i in range(320) if i % 3]
SHAPES = {  # H 32, heads 4 x 8, key-value heads 2 x 8, intermediate 64, three taps
    "fc.weight": (32, 96),
    "midlayer.input_layernorm.weight": (32,),
    "midlayer.hidden_norm.weight": (32,),
    "midlayer.post_attention_layernorm.weight": (32,),
    "midlayer.self_attn.q_proj.weight": (32, 64),
    "midlayer.self_attn.k_proj.weight": (16, 64),
    "midlayer.self_attn.v_proj.weight": (16, 64),
    "midlayer.self_attn.o_proj.weight": (32, 32),
    "midlayer.mlp.gate_proj.weight": (64, 32),
    "midlayer.mlp.up_proj.weight": (64, 32),
    "midlayer.mlp.down_proj.weight": (32, 64),
    "norm.weight": (32,),
}


@pytest.fixture(scope="module")
def target(tiny_target: Callable[..., Any]) -> Target:
    found: Target = tiny_target("llama")
    return found


@pytest.fixture
def folder(target: Target, tmp_path: Path) -> Path:
    save_drafter(tiny_drafter(target, KEPT), tmp_path / "drafter", {"fingerprint": target.fingerprint})
    return tmp_path / "drafter"


@pytest.mark.parametrize("kept", [KEPT, None], ids=["reduced", "full"])
@pytest.mark.parametrize("taps", [None, [1, 3, 6]], ids=["default", "custom"])
def test_round_trip(
    tiny_target: Callable[..., Any], tmp_path: Path, taps: list[int] | None, kept: list[int] | None
) -> None:
    target: Target = tiny_target("llama", taps=taps)
    drafter: Eagle3 = tiny_drafter(target, kept)
    save_drafter(drafter, tmp_path / "d", {"fingerprint": target.fingerprint, "seed": 3})
    again = load_drafter(tmp_path / "d", target)
    assert again.config == drafter.config and again.vocab.hash() == drafter.vocab.hash() and not again.training
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    provenance = json.loads((tmp_path / "d" / "provenance.json").read_text())
    assert provenance["fingerprint"] == target.fingerprint and provenance["seed"] == 3
    assert provenance["target_layers"] == 8


def test_names_and_shapes_are_those_that_both_engines_read(target: Target, folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    reduced = SHAPES | {"lm_head.weight": (len(KEPT), 32), "d2t": (len(KEPT),), "t2d": (320,)}
    assert {n: tuple(t.shape) for n, t in tensors.items()} == reduced
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    assert (tensors["d2t"] + torch.arange(len(KEPT))).tolist() == KEPT
    assert tensors["t2d"].nonzero().flatten().tolist() == KEPT
    save_drafter(tiny_drafter(target), tmp_path / "full", {"fingerprint": target.fingerprint})
    full = load_file(tmp_path / "full" / "model.safetensors")
    assert {n: tuple(t.shape) for n, t in full.items()} == SHAPES | {"lm_head.weight": (320, 32)}


def test_the_config_says_what_engines_ask(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": 32,
        "target_hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 320,
        "draft_vocab_size": len(KEPT),
        "num_aux_hidden_states": 3,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "norm_before_residual": False,
        "torch_dtype": "float32",
    }
    assert expected.items() <= config.items()
    # default taps: no ids at all, since engines number them differently
    assert "eagle_aux_hidden_state_layer_ids" not in config and "eagle_config" not in config


def test_custom_taps_are_written_in_both_numberings(tiny_target: Callable[..., Any], tmp_path: Path) -> None:
    target: Target = tiny_target("llama", taps=[1, 3, 6])
    save_drafter(tiny_drafter(target), tmp_path / "d", {"fingerprint": target.fingerprint})
    config = json.loads((tmp_path / "d" / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 6]  # h[L]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 5]  # outputs of layers


ALL = {"norm_before_residual": True, "fc_norm": True, "norm_output": True, "qk_norm": True}
QK = {"midlayer.self_attn.q_norm.weight": (8,), "midlayer.self_attn.k_norm.weight": (8,)}
TAPS = {f"fc_norm.{i}.weight": (32,) for i in range(3)}
REDUCED = {"lm_head.weight": (len(KEPT), 32), "d2t": (len(KEPT),), "t2d": (320,)}
FROZEN = {
    ("portable", "fc_norm"): SHAPES | REDUCED | TAPS,
    ("sglang", "fc_norm"): SHAPES | REDUCED | TAPS,
    ("sglang", "norm_before_fc"): SHAPES | REDUCED | {"input_norm.weight": (96,)},
    ("vllm", "all"): SHAPES | REDUCED | TAPS | QK,
    ("speculators", "all"): {
        name.replace("midlayer.", "layers.0."): shape for name, shape in (SHAPES | REDUCED | TAPS | QK).items()
    }
    | {"embed_tokens.weight": (320, 32)},
}


@pytest.mark.parametrize(("layout", "flags"), FROZEN, ids="-".join)
def test_names_and_shapes_of_each_layout(target: Target, tmp_path: Path, layout: str, flags: str) -> None:
    drafter = tiny_drafter(target, KEPT, **(ALL if flags == "all" else {flags: True}))
    save_drafter(drafter, tmp_path / "d", {"fingerprint": "x"}, layout=layout, verifier=verifier(target))
    tensors = load_file(tmp_path / "d" / "model.safetensors")
    assert {n: tuple(t.shape) for n, t in tensors.items()} == FROZEN[layout, flags]


def test_layer_ids_are_written_in_each_engines_numbering(tiny_target: Callable[..., Any], tmp_path: Path) -> None:
    target: Target = tiny_target("llama", taps=[1, 3, 6])
    key, found = "eagle_aux_hidden_state_layer_ids", {}
    for layout in LAYOUTS:
        save_drafter(
            tiny_drafter(target), tmp_path / layout, {"fingerprint": "x"}, layout=layout, verifier=verifier(target)
        )
        config = json.loads((tmp_path / layout / "config.json").read_text())
        found[layout] = (config.get(key), config.get("eagle_config", {}).get(key))
    above, nested = [1, 3, 6], [0, 2, 5]
    assert found == {
        "portable": (above, nested),
        "vllm": (above, None),
        "sglang": (None, nested),
        "speculators": (above, None),
    }


def test_speculators_config_holds_the_block_the_flags_and_the_verifier(target: Target, tmp_path: Path) -> None:
    drafter = tiny_drafter(target, KEPT, qk_norm=True, norm_output=True)
    save_drafter(drafter, tmp_path / "d", {"fingerprint": "x"}, layout="speculators", verifier=verifier(target))
    config = json.loads((tmp_path / "d" / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3" and config["transformer_layer_config"]["model_type"] == "qwen3"
    assert config["transformer_layer_config"]["num_aux_hidden_states"] == 3  # where vLLM looks for it
    assert config["norm_before_residual"] is False and config["norm_output"] is True  # the first is true where absent
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert config["speculators_config"]["verifier"]["name_or_path"] == "some/target"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] > 0


REFUSED = [
    ({"norm_before_residual": True}, None, "norm_before_residual: SGLang"),
    ({"qk_norm": True}, None, "qk_norm: SGLang"),
    ({}, [0, 3, 6], r"embedding output h\[0\], which SGLang"),
    ({}, [4], "single tap: SGLang"),
]


@pytest.mark.parametrize("layout", ["sglang", "portable"])
@pytest.mark.parametrize(("flags", "taps", "reason"), REFUSED)
def test_what_sglang_cannot_express_is_refused_and_written_for_vllm_by_default(
    tiny_target: Callable[..., Any],
    tmp_path: Path,
    flags: dict[str, bool],
    taps: list[int] | None,
    reason: str,
    layout: str,
) -> None:
    target: Target = tiny_target("llama", taps=taps)
    drafter, papers = tiny_drafter(target, None, **flags), {"fingerprint": target.fingerprint}
    with pytest.raises(UserError, match=reason):
        save_drafter(drafter, tmp_path / "d", papers, layout=layout)
    assert list(tmp_path.iterdir()) == []
    chosen, line = default_layout(drafter.config)
    assert chosen == "vllm" and "for vLLM alone" in line and len(line.splitlines()) == 1
    save_drafter(drafter, tmp_path / "d", papers)
    assert load_drafter(tmp_path / "d", target).config == drafter.config


def test_half_precision_export(target: Target, tmp_path: Path) -> None:
    drafter = tiny_drafter(target, KEPT)
    save_drafter(drafter, tmp_path / "d", {"fingerprint": target.fingerprint}, torch.bfloat16)
    tensors = load_file(tmp_path / "d" / "model.safetensors")
    assert tensors["fc.weight"].dtype == torch.bfloat16 and tensors["d2t"].dtype == torch.int64
    assert json.loads((tmp_path / "d" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    again = load_drafter(tmp_path / "d", target)
    torch.testing.assert_close(again.fc.weight, drafter.fc.weight, atol=1e-2, rtol=1e-2)
    assert again.fc.weight.dtype == torch.float32


def test_an_interrupted_save_leaves_nothing(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(layouts, "write_json", full_disk)
    with pytest.raises(OSError, match="no space"):
        save_drafter(tiny_drafter(target), tmp_path / "d", {"fingerprint": target.fingerprint})
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_save_leaves_the_old_drafter(
    target: Target, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*_: Any) -> None:
        raise OSError("no space left on device")

    before = (folder / "model.safetensors").read_bytes()
    monkeypatch.setattr(layouts, "write_json", full_disk)
    with pytest.raises(OSError, match="no space"):
        save_drafter(tiny_drafter(target, seed=1), folder, {"fingerprint": target.fingerprint})
    assert (folder / "model.safetensors").read_bytes() == before and load_drafter(folder, target)
    assert [p.name for p in folder.parent.iterdir()] == ["drafter"]


def refused(folder: Path, target: Target, *words: str) -> None:
    with pytest.raises(UserError) as caught:
        load_drafter(folder, target)
    for word in (str(folder), *words):
        assert word in str(caught.value), f"{word!r} not in {caught.value}"


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_another_target_is_refused(tiny_target: Callable[..., Any], folder: Path) -> None:
    other: Target = tiny_target("llama", seed=1)
    refused(folder, other, "another target", other.fingerprint)


def test_a_drafter_without_fingerprint_warns(target: Target, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "provenance.json").unlink()
    assert load_drafter(folder, target)
    assert "fingerprint" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_or_broken_file_is_refused(target: Target, folder: Path, name: str) -> None:
    (folder / name).write_text("{")
    refused(folder, target)
    (folder / name).unlink()
    refused(folder, target, name)


def test_a_config_that_is_no_mapping_is_refused(target: Target, folder: Path) -> None:
    (folder / "config.json").write_text("[]")
    refused(folder, target)


def test_a_number_written_as_a_word_is_refused(target: Target, folder: Path) -> None:
    edit_config(folder, num_attention_heads="nine")
    refused(folder, target, "num_attention_heads='nine'", "whole number")


def test_a_broken_provenance_is_refused(target: Target, folder: Path) -> None:
    (folder / "provenance.json").write_text("{")
    refused(folder, target)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"fc_norm": True, "norm_output": True}, "missing ['fc_norm.0.weight', "),
        ({"norm_before_fc": True}, "missing ['input_norm.weight']"),
        ({"architectures": ["Eagle3Qwen3ForCausalLM"]}, "config.json sets qk_norm"),
        ({"fc_norm": True, "norm_before_fc": True}, "both set"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"attention_bias": True}, "attention_bias"),
        ({"logit_scale": 0.5}, "logit_scale=0.5"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"target_hidden_size": 64}, "target_hidden_size=64"),
        ({"architectures": ["DFlashDraftModel"]}, "DFlashDraftModel"),
        ({"norm_output": "yes"}, "norm_output='yes'"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope_type='spiral'"),
        ({"speculators_model_type": "dflash"}, "only eagle3"),
        ({"speculators_model_type": "eagle3"}, "transformer_layer_config"),
        ({"num_aux_hidden_states": 4}, "wrong shape ['fc.weight']"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 8]}}, "must lie in 0..7"),
        ({"eagle_aux_hidden_state_layer_ids": [4, 2, 5]}, "out of order"),
        ({"eagle_aux_hidden_state_layer_ids": ["2"]}, "whole numbers"),
        (
            {
                "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]},
            },
            "different layers",
        ),
        ({"num_hidden_layers": 2}, "one-layer"),
        ({"hidden_size": 64}, "hidden size 64"),
        ({"vocab_size": 640}, "vocabulary 640"),
        ({"draft_vocab_size": 320}, "d2t"),
        ({"draft_vocab_size": 100}, "d2t"),
        ({"intermediate_size": None}, "no intermediate_size"),
        ({"head_dim": 7}, "head_dim even"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, "9"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, "fc.weight"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}, "give target.taps=[1,3,5]"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    target: Target, folder: Path, change: dict[str, Any], words: str
) -> None:
    edit_config(folder, **change)
    refused(folder, target, words)


def absolute_ids(tensors: dict[str, Tensor]) -> None:
    tensors["d2t"] += torch.arange(len(tensors["d2t"]))


def not_a_number(tensors: dict[str, Tensor]) -> None:
    tensors["fc.weight"][3, 4] = float("nan")


def other_mask(tensors: dict[str, Tensor]) -> None:
    tensors["t2d"] = ~tensors["t2d"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("midlayer.hidden_norm.weight"), "missing ['midlayer.hidden_norm.weight']"),
        (lambda t: t.pop("lm_head.weight"), "random logits"),
        (lambda t: t.pop("d2t"), "d2t"),
        (lambda t: t.update({"model.norm.weight": torch.ones(32)}), "stored twice"),
        (lambda t: t.update({"model.model.norm.weight": torch.ones(32)}), "unknown ['model.model.norm.weight']"),
        (lambda t: t.update({"mask_hidden": torch.ones(96)}), "unknown ['mask_hidden']"),
        (lambda t: t.update({"fc.weight": torch.ones(32, 96, dtype=torch.int8)}), "dtype"),
        (lambda t: t.update({"embed_tokens.weight": torch.ones(320, 32)}), "is not the target's"),
        (lambda t: t.update({"norm.weight": torch.ones(16)}), "wrong shape ['norm.weight']"),
        (not_a_number, "fc.weight"),
        (absolute_ids, "absolute ids"),
        (other_mask, "t2d"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    target: Target, folder: Path, change: Callable[[dict[str, Tensor]], Any], words: str
) -> None:
    edit_tensors(folder, change)
    refused(folder, target, words)

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
from models.attention import Documents
from models.eagle3 import Eagle3
from models.layouts import load_drafter, save_drafter
from models.target import Target
from recipes.schema import UserError
from tests.models.engine_reader import EngineReader
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
@pytest.mark.parametrize("taps", [None, [1, 3, 6], [1, 2, 4, 7]], ids=["default", "custom", "four"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_an_engine_reads_the_logits_of_training(
    tiny_target: Callable[..., Any], tmp_path: Path, family: str, taps: list[int] | None, kept: list[int] | None
) -> None:
    target: Target = tiny_target(family, taps=taps)
    drafter: Eagle3 = tiny_drafter(target, kept)
    save_drafter(drafter, tmp_path / "d", {"fingerprint": target.fingerprint})
    T, k = 6, 4
    ids = torch.randint(2, 320, (1, T + k + 1), generator=torch.Generator().manual_seed(5))
    features, row = target.features(ids[:, :T]).taps_BTC[0], Documents([T], target.device)
    states = drafter.unroll(features, lambda i: target.embed(ids[0, 1 + i : 1 + i + T]), k, row)
    trained = [drafter.logits(state) for state in states]
    reader = EngineReader(tmp_path / "d", target.model.get_input_embeddings().weight)
    with torch.no_grad():
        hidden = target.model(ids[:, :T], output_hidden_states=True).hidden_states
        aux = torch.cat([hidden[layer][0] for layer in reader.captured(target.n_layers)], -1)
        for slot in (0, 2, T - 1):
            served = reader.draft(
                aux[: slot + 1], ids[0, 1 : slot + 2].tolist(), ids[0, slot + 2 : slot + 1 + k].tolist()
            )
            for i in range(k):
                expected = torch.full((320,), float("-inf"))
                expected[drafter.vocab.kept_ids] = trained[i][slot].detach()
                torch.testing.assert_close(served[i], expected, atol=1e-5, rtol=1e-5)


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


def test_names_and_shapes_are_those_that_engines_read(target: Target, folder: Path, tmp_path: Path) -> None:
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


def test_the_embedding_output_cannot_be_exported(tiny_target: Callable[..., Any], tmp_path: Path) -> None:
    target: Target = tiny_target("llama", taps=[0, 3, 6])
    with pytest.raises(UserError, match="SGLang"):
        save_drafter(tiny_drafter(target), tmp_path / "d", {"fingerprint": target.fingerprint})
    assert list(tmp_path.iterdir()) == []


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
        ({"norm_before_residual": True}, "norm_before_residual"),
        ({"fc_norm": True, "norm_output": True}, "fc_norm, norm_output"),
        ({"num_hidden_layers": 2}, "one-layer"),
        ({"hidden_size": 64}, "hidden size 64"),
        ({"vocab_size": 640}, "vocabulary 640"),
        ({"draft_vocab_size": 320}, "d2t"),
        ({"draft_vocab_size": 100}, "d2t"),
        ({"head_dim": None}, "head_dim"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, "9"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, "fc.weight"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    target: Target, folder: Path, change: dict[str, Any], words: str
) -> None:
    edit_config(folder, **change)
    with pytest.raises(UserError, match=words.replace(".", r"\.")):
        load_drafter(folder, target)


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
        (lambda t: t.pop("lm_head.weight"), "lm_head.weight"),
        (lambda t: t.pop("d2t"), "d2t"),
        (lambda t: t.update({"model.norm.weight": torch.ones(32)}), "unknown ['model.norm.weight']"),
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

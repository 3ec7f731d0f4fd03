"""Drafters that others wrote: read as engines would, or refused by name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.eagle3 import Eagle3
from models.layout_tables import LAYOUTS, why_not
from models.layouts import find_drafter, load_drafter, save_drafter
from models.target import Target
from models.vocab import VocabMap
from recipes.schema import UserError
from tests.models.test_golden import SETS, verifier
from tests.tiny import tiny_drafter

KEPT = [i for i in range(320) if i % 3]


@pytest.fixture(scope="module")
def target(tiny_target: Callable[..., Any]) -> Target:
    found: Target = tiny_target("llama")
    return found


def written(drafter: Eagle3, folder: Path, target: Target, layout: str) -> Path:
    papers = {"fingerprint": target.fingerprint}
    save_drafter(drafter, folder, papers, layout=layout, verifier=verifier(target))
    return folder


def same(one: Eagle3, other: Eagle3) -> None:
    assert one.config == other.config
    assert torch.equal(one.vocab.kept_ids, other.vocab.kept_ids)
    assert one.state_dict().keys() == other.state_dict().keys()
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


def edit(folder: Path, config: dict[str, Any] | None = None, rename: Callable[[str], str] = str) -> None:
    """Change the folder as another trainer would have written it: keys set to None go."""
    said = json.loads((folder / "config.json").read_text()) | (config or {})
    (folder / "config.json").write_text(json.dumps({k: v for k, v in said.items() if v is not None}))
    tensors = {rename(name): t for name, t in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("number", range(50))
def test_round_trips_between_layouts_are_lossless(tiny_target: Callable[..., Any], tmp_path: Path, number: int) -> None:
    """Through every layout that can express it, one after the other: equal flags, bit-equal tensors."""
    draw = torch.Generator().manual_seed(number)

    def pick(n: int) -> int:
        return int(torch.randint(n, (1,), generator=draw))

    taps = [None, [1, 3, 6], [0, 3, 6], [1, 2, 4, 7], [4]][pick(5)]
    kept = [None, sorted(torch.randperm(320, generator=draw)[: 20 + pick(200)].tolist())][pick(2)]
    target: Target = tiny_target("llama", taps=taps)
    drafter: Eagle3 = tiny_drafter(target, kept, seed=number, **SETS[pick(len(SETS))])
    layouts = [layout for layout in LAYOUTS if not why_not(drafter.config, layout)]
    assert {"vllm", "speculators"} <= set(layouts)
    now = drafter
    for layout in [*layouts, *reversed(layouts)]:
        now = load_drafter(written(now, tmp_path / "d", target, layout), target)
        same(now, drafter)


@pytest.mark.parametrize(
    "rename",
    [
        lambda n: n if n in ("d2t", "t2d", "lm_head.weight") else f"model.{n}",
        lambda n: n.replace("midlayer.", "layers.0."),
        lambda n: f"model.{n.replace('midlayer.', 'layers.0.')}" if "midlayer" in n else n,
    ],
    ids=["model.", "layers.0.", "model.layers.0."],
)
def test_other_names_are_the_same_tensors(target: Target, tmp_path: Path, rename: Callable[[str], str]) -> None:
    drafter = tiny_drafter(target, KEPT)
    edit(written(drafter, tmp_path / "d", target, "vllm"), rename=rename)
    same(load_drafter(tmp_path / "d", target), drafter)


def test_old_names_of_the_tap_norms(target: Target, tmp_path: Path) -> None:
    drafter = tiny_drafter(target, KEPT, fc_norm=True)
    old = {f"fc_norm.{i}.weight": f"aux_norm_{part}.weight" for i, part in enumerate(("low", "mid", "high"))}
    written(drafter, tmp_path / "d", target, "vllm")
    edit(tmp_path / "d", {"fc_norm": None, "use_aux_norm": True}, lambda n: old.get(n, n))
    same(load_drafter(tmp_path / "d", target), drafter)


def test_speculators_mean_a_normed_residual_where_they_say_nothing(target: Target, tmp_path: Path) -> None:
    drafter = tiny_drafter(target, KEPT, norm_before_residual=True, norm_output=True)
    written(drafter, tmp_path / "d", target, "speculators")
    edit(tmp_path / "d", {"norm_before_residual": None, "eagle_aux_hidden_state_layer_ids": None})
    same(load_drafter(tmp_path / "d", target), drafter)
    edit(tmp_path / "d", {"norm_before_residual": False})
    assert not load_drafter(tmp_path / "d", target).config.norm_before_residual


@pytest.mark.parametrize("kind", ["bin", "safetensors"])
def test_a_checkpoint_of_safe_ai_lab(
    target: Target, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Llama's own architecture, no head size, no rotary settings, half precision, maybe pickled, and no provenance."""
    drafter = tiny_drafter(target, KEPT)
    folder = written(drafter, tmp_path / "d", target, "vllm")
    keys = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps")
    said = json.loads((folder / "config.json").read_text())
    plain = {key: said[key] for key in (*keys, "vocab_size", "draft_vocab_size", "num_hidden_layers")}
    (folder / "config.json").write_text(json.dumps({**plain, "architectures": ["LlamaForCausalLM"]}))
    tensors = load_file(folder / "model.safetensors")
    half = {n: t.half() if t.is_floating_point() else t for n, t in tensors.items()}
    (folder / "provenance.json").unlink()
    if kind == "bin":
        (folder / "model.safetensors").unlink()
        torch.save(half, folder / "pytorch_model.bin")
    else:
        save_file(half, folder / "model.safetensors")
    read = load_drafter(folder, target)
    assert (read.config.head_dim, read.config.rope_parameters["rope_theta"], read.config.taps) == (
        8,
        10000.0,
        (2, 4, 5),
    )
    assert read.config.max_position_embeddings == 2048 and "no target fingerprint" in capsys.readouterr().err
    for name, tensor in read.state_dict().items():
        assert torch.equal(tensor, drafter.state_dict()[name].half().float()), name


def test_a_pickle_that_would_run_code_is_refused_unrun(target: Target, tmp_path: Path) -> None:
    folder = written(tiny_drafter(target), tmp_path / "d", target, "vllm")
    (folder / "model.safetensors").unlink()

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"fc.weight": Bomb()}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model\.bin is a pickle that asks for getattr"):
        load_drafter(folder, target)
    assert not (tmp_path / "ran").exists()
    for content in (b"", b"PK\x03\x04 no zip", b"\x80\x02}q\x00."):
        (folder / "pytorch_model.bin").write_bytes(content)
        with pytest.raises(UserError, match=r"pytorch_model\.bin|tensors missing"):
            load_drafter(folder, target)


def test_a_checkpoint_of_specforge(target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An identity map at full vocabulary, ids only nested (outputs of layers), and `norm_output` of another meaning."""
    drafter = tiny_drafter(target, norm_output=True)
    folder = written(drafter, tmp_path / "d", target, "vllm")
    edit(folder, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}})
    whole = VocabMap.identity(320)
    tensors = {**load_file(folder / "model.safetensors"), "d2t": whole.d2t, "t2d": whole.t2d}
    save_file(tensors, folder / "model.safetensors")
    (folder / "provenance.json").unlink()
    same(load_drafter(folder, target), drafter)
    assert "SpecForge means something else" in capsys.readouterr().err


def test_weights_in_several_files(target: Target, tmp_path: Path) -> None:
    drafter = tiny_drafter(target, KEPT)
    folder = written(drafter, tmp_path / "d", target, "vllm")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    parts = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(parts.values()):
        save_file({n: t for n, t in tensors.items() if parts[n] == file}, folder / file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": parts}))
    same(load_drafter(folder, target), drafter)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(parts, "../../elsewhere.safetensors")}))
    with pytest.raises(UserError, match="names no files of this folder"):
        load_drafter(folder, target)


def test_a_full_vocabulary_without_a_head_takes_the_targets(target: Target, tmp_path: Path) -> None:
    folder = written(tiny_drafter(target), tmp_path / "d", target, "vllm")
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    assert torch.equal(load_drafter(folder, target).lm_head.weight, target.head_weight)


def test_an_embedding_rounded_to_bfloat16_is_still_the_targets(target: Target, tmp_path: Path) -> None:
    drafter = tiny_drafter(target, KEPT)
    papers = {"fingerprint": target.fingerprint}
    save_drafter(drafter, tmp_path / "d", papers, torch.bfloat16, "speculators", verifier(target))
    assert load_drafter(tmp_path / "d", target).config == drafter.config


def test_a_sliding_window_and_a_short_limit_are_told(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = written(tiny_drafter(target), tmp_path / "d", target, "vllm")
    edit(folder, {"layer_types": ["sliding_attention"], "sliding_window": 64, "max_position_embeddings": 256})
    load_drafter(folder, target)
    told = capsys.readouterr().err
    assert "window of 64 tokens" in told and "knows 256 positions" in told


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (
            lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-100]),
            "cannot be read",
        ),
        (lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 64), "cannot be read"),
        (lambda f: (f / "config.json").write_bytes(b"\xff\xfe{"), "JSON"),
        (lambda f: ((f / "config.json").unlink(), (f / "config.json").symlink_to("config.json")), "no config.json"),
        (lambda f: shutil.move(f / "model.safetensors", f / "weights.safetensors"), "no model.safetensors"),
    ],
    ids=["truncated", "corrupted", "bytes", "symlink loop", "another name"],
)
def test_damage_is_refused_in_one_line_before_weights_load(
    target: Target, tmp_path: Path, damage: Callable[[Path], Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(_: Path) -> dict[str, Tensor]:
        raise AssertionError

    monkeypatch.setattr("models.layouts.read_tensors", never)
    folder = written(tiny_drafter(target), tmp_path / "d", target, "vllm")
    damage(folder)
    with pytest.raises(UserError, match=words) as caught:
        load_drafter(folder, target)
    assert len(str(caught.value).splitlines()) == 1 and str(folder) in str(caught.value)


def test_an_eagle_2_head_is_named(target: Target, tmp_path: Path) -> None:
    folder = written(tiny_drafter(target), tmp_path / "d", target, "vllm")
    tensors = {f"layers.0.{n}": torch.zeros(32, 32) for n in ("self_attn.q_proj.weight", "self_attn.o_proj.weight")}
    save_file({**tensors, "fc.weight": torch.zeros(32, 64)}, folder / "model.safetensors")
    with pytest.raises(UserError, match="EAGLE-1 or EAGLE-2"):
        load_drafter(folder, target)


def test_a_hub_id_is_fetched_and_a_missing_one_is_told(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = written(tiny_drafter(target), tmp_path / "snapshot", target, "vllm")
    asked: list[list[str]] = []

    def snapshot(_: str, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(made)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert find_drafter("someone/eagle3") == made
    assert not any("bin" in pattern for pattern in asked[0]), "pickles are fetched only where there is nothing else"
    (made / "model.safetensors").unlink()
    find_drafter("someone/eagle3")
    assert asked[-1] == ["*.json", "pytorch_model*.bin"]

    def nothing(*_: Any, **__: Any) -> str:
        raise OSError("no network here")

    monkeypatch.setattr("huggingface_hub.snapshot_download", nothing)
    with pytest.raises(UserError, match=r"someone/eagle3 \(no such folder here\).*no network here"):
        find_drafter("someone/eagle3")
    with pytest.raises(UserError, match="no such folder, nor a hub id"):
        find_drafter("runs/nothing/drafter")

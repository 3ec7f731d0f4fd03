"""Where a target comes from: its taps, its fingerprint, and every way in which it can be refused."""

import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from models import source
from models.device import choose_device, choose_dtype
from models.source import look_up, resolve
from models.target import load_target
from recipes.schema import TargetConfig, UserError
from tests.tiny import tiny_model_folder


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("good"), "llama")


@pytest.fixture
def folder(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to be spoilt, and a cache of its own."""
    monkeypatch.setenv("ESPALIER_CACHE", str(tmp_path / "cache"))
    shutil.copytree(good, tmp_path / "model")
    return tmp_path / "model"


def edit(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def refused(path: Path | str, *words: str, taps: list[int] | None = None) -> None:
    with pytest.raises(UserError) as caught:
        load_target(TargetConfig(path=str(path), taps=taps or []))
    for word in words:
        assert word in str(caught.value), f"{word!r} not in {caught.value}"


def test_colliding_taps_are_refused_by_name_and_explicit_ones_taken(tmp_path: Path) -> None:
    shallow = tiny_model_folder(tmp_path / "shallow", "llama", num_hidden_layers=6)
    refused(shallow, "6 layers", "[2, 3, 3]", "target.taps=")
    assert load_target(TargetConfig(path=str(shallow), taps=[1, 3, 5])).taps == (1, 3, 5)
    refused(shallow, "collide", taps=[3, 1, 2])
    refused(shallow, "0..5", taps=[1, 2, 6])
    refused(shallow, "0..5", taps=[-1, 2, 3])


def test_default_taps_are_low_middle_high(good: Path) -> None:
    assert load_target(TargetConfig(path=str(good))).taps == (2, 4, 5)


def test_no_path(tmp_path: Path) -> None:
    refused("", "target.path")


def test_missing_folder(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "nowhere", "neither a folder")
    refused("./nowhere", "nowhere", "Check target.path")
    (tmp_path / "my-model").mkdir()
    refused(tmp_path / "my-modle", "Did you mean 'my-model'?")


def test_missing_gguf_file_and_package(tmp_path: Path) -> None:
    refused(tmp_path / "model.gguf", "model.gguf", "target.path")
    (tmp_path / "model.Q4.gguf").write_bytes(b"GGUF")
    refused(tmp_path / "model.Q4_1.gguf", "Did you mean 'model.Q4.gguf'?")
    refused("package:no_such_package/model.gguf", "no_such_package", "pip install")


def test_wrong_gguf_hash(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"target\.sha256 says 0+\. Fetch the file again"):
        resolve(TargetConfig(path=str(tmp_path / "model.gguf"), sha256="0" * 64))


def test_folder_without_config(tmp_path: Path) -> None:
    refused(tmp_path, str(tmp_path), "config.json", "Give target.path the folder that has one")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "config.json").write_text("{}")
    refused(tmp_path, "It has models inside: inner")


def test_a_dry_run_neither_fetches_nor_converts_nor_writes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", None)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for path in ("someone/some-model", str(tmp_path / "model.gguf")):
        assert look_up(TargetConfig(path=path), dry_run=True) is None
    assert not (tmp_path / "cache").exists()
    found = look_up(TargetConfig(path=str(folder)), dry_run=True)
    assert not (tmp_path / "cache").exists()
    assert found == resolve(TargetConfig(path=str(folder)))


def test_what_is_known_before_the_weights_load_is_what_the_target_has(good: Path) -> None:
    source, target = resolve(TargetConfig(path=str(good))), load_target(TargetConfig(path=str(good)))
    for name in ("fingerprint", "n_layers", "hidden_size", "vocab_size", "max_positions"):
        assert getattr(source, name) == getattr(target, name)


def test_config_that_is_no_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    refused(folder, "config.json", "JSON")


def test_not_causal(folder: Path) -> None:
    edit(folder / "config.json", architectures=["LlamaForSequenceClassification"])
    refused(folder, "causal", "LlamaForSequenceClassification")


def test_unsupported_type(folder: Path) -> None:
    edit(folder / "config.json", model_type="falcon", architectures=["FalconForCausalLM"])
    refused(folder, "falcon", "llama, mistral")


def test_no_chat_template(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", chat_template=None)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    refused(folder, "chat template")


def test_no_end_token(folder: Path) -> None:
    edit(folder / "config.json", eos_token_id=None)
    edit(folder / "generation_config.json", eos_token_id=None)
    edit(folder / "tokenizer_config.json", eos_token=None)
    refused(folder, "end token")


def test_no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    refused(folder, str(folder))


def test_no_safetensors(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    refused(folder, "safetensors", str(folder))


def test_broken_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"not weights")
    refused(folder, str(folder))


def test_weights_that_were_fetched_in_part_are_refused_without_loading(folder: Path) -> None:
    weights = folder / "model.safetensors"
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model.safetensors", "b": "more.bin"}}')
    with pytest.raises(UserError, match=r"lacks more\.bin of 2 files\. Fetch the model again"):
        look_up(TargetConfig(path=str(folder)), dry_run=True)
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"model\.safetensors cannot be read: .*\. Fetch it again"):
        look_up(TargetConfig(path=str(folder)), dry_run=True)


def test_hub_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*_: Any, **__: Any) -> str:
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr("huggingface_hub.snapshot_download", no_network)
    refused("someone/some-model", "someone/some-model", "no route to the hub", "local folder")


def fingerprint(folder: Path) -> str:
    return resolve(TargetConfig(path=str(folder))).fingerprint


def test_fingerprint_is_stable_and_forgets_the_transformers_version(folder: Path) -> None:
    first = fingerprint(folder)
    assert fingerprint(folder) == first
    edit(folder / "config.json", transformers_version="99.0", _name_or_path="elsewhere", dtype="bfloat16")
    assert fingerprint(folder) == first
    moved = folder.with_name("moved")
    folder.rename(moved)
    assert fingerprint(moved) == first


def test_fingerprint_changes_with_one_weight_and_with_the_config(folder: Path) -> None:
    first = fingerprint(folder)
    edit(folder / "config.json", rms_norm_eps=1e-4)
    second = fingerprint(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.3.mlp.down_proj.weight"][0, 0] += 1e-3
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert len({first, second, fingerprint(folder)}) == 3


def test_end_tokens_of_every_file_count(folder: Path) -> None:
    edit(folder / "generation_config.json", eos_token_id=[5, 9])
    assert resolve(TargetConfig(path=str(folder))).eos_ids == {1, 5, 9}


def test_device_and_dtype_names() -> None:
    with pytest.raises(UserError, match="float16"):
        choose_dtype("int8", choose_device("cpu"))


@pytest.mark.parametrize("content", ["", "{", "[]", "{}"])
def test_a_remembered_hash_that_a_crash_cut_short_is_made_again(folder: Path, content: str) -> None:
    first = resolve(TargetConfig(path=str(folder))).fingerprint
    (memory,) = (folder.parent / "cache" / "fingerprints").iterdir()
    memory.write_text(content)
    assert resolve(TargetConfig(path=str(folder))).fingerprint == first
    assert json.loads(memory.read_text())["sha256"]


def test_a_file_is_not_said_to_be_meant_for_itself(folder: Path) -> None:
    (folder / "notes").write_text("")
    with pytest.raises(UserError) as caught:
        resolve(TargetConfig(path=str(folder / "notes")))
    assert "neither a folder" in str(caught.value) and "Did you mean" not in str(caught.value)


def test_a_cache_that_cannot_be_written_to_costs_no_more_than_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = resolve(TargetConfig(path=str(folder))).fingerprint
    (folder.parent / "file").write_text("")
    monkeypatch.setenv("ESPALIER_CACHE", str(folder.parent / "file"))
    assert resolve(TargetConfig(path=str(folder))).fingerprint == first


def test_of_two_processes_one_converts_and_the_other_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Slow:
        @classmethod
        def from_pretrained(cls, *args: object, **named: object) -> "Slow":
            time.sleep(0.2)
            return cls()

        def save_pretrained(self, folder: Path) -> None:
            (folder / "config.json").write_text("{}")

    monkeypatch.setattr("transformers.AutoModelForCausalLM", Slow)
    monkeypatch.setattr("transformers.AutoTokenizer", Slow)
    with ThreadPoolExecutor() as pool:
        folders = [*pool.map(lambda _: source._convert(tmp_path / "a.gguf", tmp_path / "made" / "it"), range(3))]
    assert {(folder / "config.json").read_text() for folder in folders} == {"{}"}
    said = capsys.readouterr().out
    assert said.count("converting") == 1 and said.count("waiting for another process") == 2
    assert [p.name for p in (tmp_path / "made").iterdir()] == ["it"]

"""What the doctor reads from the weights themselves: pickled ones, tensors nobody filled, tables of another model."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from models import doctor
from models.doctor import examine
from models.fault import listed
from models.simulate import Simulated
from models.target import Target
from recipes.schema import TargetConfig, UserError
from tests.models.test_doctor import Edit, config, export, run, weights


@pytest.fixture(scope="module")
def target(tiny_target: Callable[..., Any]) -> Target:
    found: Target = tiny_target("llama")
    return found


def pickled(folder: Path, change: Callable[[dict[str, Tensor]], Any] = lambda tensors: None, **options: Any) -> Path:
    """The folder's weights as SpecForge and SafeAILab/EAGLE save them."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin", **options)
    return folder / "pytorch_model.bin"


@pytest.mark.parametrize("new_form", [True, False], ids=["zip", "old"])
def test_a_bin_is_read_and_decoded(target: Target, tmp_path: Path, new_form: bool) -> None:
    folder = export(target, tmp_path / "d")
    pickled(folder, _use_new_zipfile_serialization=new_form)
    report = examine(folder, TargetConfig(path=str(target.folder)))
    assert [r.verdict for r in report.readings] == ["serves", "serves"] and report.tau is not None
    assert any("pickled (pytorch_model.bin)" in f.what and not f.fatal for f in report.findings)
    config(folder, architectures=["LlamaForCausalLM"])
    assert examine(folder).kind == "EAGLE-3 of SafeAILab/EAGLE"


def test_a_bin_in_parts(target: Target, tmp_path: Path) -> None:
    folder = export(target, tmp_path / "d")
    file = pickled(folder)
    tensors = torch.load(file, weights_only=True)
    file.unlink()
    names = {name: f"pytorch_model-{i % 2}.bin" for i, name in enumerate(tensors)}
    for part in set(names.values()):
        torch.save({n: t for n, t in tensors.items() if names[n] == part}, folder / part)
    (folder / "pytorch_model.bin.index.json").write_text(f'{{"weight_map": {str(names).replace(chr(39), chr(34))}}}')
    assert examine(folder, TargetConfig(path=str(target.folder))).tau is not None
    (folder / "pytorch_model-1.bin").unlink()
    assert "pytorch_model-1.bin, which is not there" in examine(folder).findings[0].what


def swap(name: str, value: Tensor) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.update({name: value})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("lm_head.weight"), "lm_head.weight is missing"),
        (swap("fc.weight", torch.ones(32, 128)), "fc.weight is [32, 128]"),
        (lambda t: t["midlayer.mlp.up_proj.weight"].fill_(torch.nan), "NaN or infinity in midlayer.mlp.up_proj.weight"),
        (lambda t: t["d2t"].add_(torch.arange(len(t["d2t"]))), "absolute ids"),
    ],
)
def test_a_bin_has_the_faults_that_safetensors_have(
    target: Target, tmp_path: Path, change: Callable[[dict[str, Tensor]], Any], words: str
) -> None:
    folder = export(target, tmp_path / "d")
    pickled(folder, change)
    fatal = [f.what for f in examine(folder).findings if f.fatal]
    assert len(fatal) == 1 and words in fatal[0]


class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-200])


def with_code(file: Path) -> None:
    torch.save({"fc.weight": Evil(file.parent / "ran")}, file)


def bare_pickle(file: Path) -> None:
    file.write_bytes(pickle.dumps(Evil(file.parent / "ran")))


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def huge(file: Path) -> None:
    """4 bytes that claim to be 4 TB."""
    torch.save({"fc.weight": torch.zeros(1).expand(1 << 20, 1 << 20)}, file)


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (cut_short, "cannot be read"),
    "code": (with_code, "asks for posix.mkdir"),
    "a pickle alone": (bare_pickle, "a pickle of more than tensors, which was not run"),
    "text": (lambda file: file.write_text("version https://git-lfs.github.com/spec/v1"), "cannot be read"),
    "a list": (lambda file: torch.save([torch.ones(2)], file), "holds no table of tensors"),
    "empty": (lambda file: file.write_bytes(b""), "cannot be read"),
    "a pipe": (pipe, "is no file"),
    "a view": (huge, "not stored in full: fc.weight"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_bin_is_one_line(target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    folder, (spoil, words) = export(target, tmp_path / "d"), BAD[name]
    spoil(pickled(folder))
    code, out, err = run(str(folder), capsys=capsys)
    assert code == 1 and out.startswith("fatal") and words in out and len(out.splitlines()) == 1 and not err
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("name", ["fc.weight", "lm_head.weight", "norm.weight", "midlayer.mlp.down_proj.weight"])
def test_a_tensor_that_nobody_filled_is_fatal(target: Target, tmp_path: Path, name: str) -> None:
    folder = export(target, tmp_path / "d")
    weights(folder, lambda t: t[name].zero_())
    assert [f.what for f in examine(folder).findings if f.fatal] == [
        f"all zeros: {name}: nobody filled it, or training never reached it"
    ]


def own(table: Tensor) -> Edit:
    return lambda folder: weights(folder, lambda t: t.update({"embed_tokens.weight": table.detach().clone()}))


def test_an_embedding_is_compared_with_the_targets(target: Target, tmp_path: Path) -> None:
    folder, against = export(target, tmp_path / "d"), TargetConfig(path=str(target.folder))
    table = target.embed_weight

    def fatal(edit: Edit) -> list[tuple[str, tuple[str, ...]]]:
        edit(folder)
        return [(f.what, f.engines) for f in examine(folder, against).findings if f.fatal]

    assert fatal(own(table)) == [] == fatal(own(table.bfloat16()))
    assert fatal(own(torch.zeros_like(table)))[0][0].startswith("all zeros: embed_tokens.weight")
    (foreign,) = fatal(own(table.roll(1, 0)))
    assert "320 of 320 rows" in foreign[0] and "another model's" in foreign[0] and foreign[1] == ("vLLM", "SGLang")
    trained = table.detach().clone()
    trained[10:17] *= 1.1
    (tuned,) = fatal(own(trained))
    assert "7 of 320 rows (mean cosine 1.00)" in tuned[0] and tuned[1] == ("SGLang",)
    report = examine(folder, against, ("vLLM",))
    assert not report.fatal and "its embed_tokens.weight is not the target's" in report.no_tau


def test_drafts_that_are_never_accepted_are_a_warning_and_no_small_print(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    folder = export(target, tmp_path / "d")
    monkeypatch.setattr(doctor, "simulate", lambda *_: Simulated(1.004, 900, 10, 7, 64, [0.004] + [0.0] * 6))
    code, out, _ = run(str(folder), f"target={target.folder}", capsys=capsys)
    assert code == 0 and out.startswith("doubtful") and "warning" in out
    told = json.loads(run(str(folder), f"target={target.folder}", "--json", capsys=capsys)[1])
    assert told["findings"][0]["loud"] and told["findings"][0]["what"].startswith("simulated tau 1.00: of 7 drafts")


def test_why_there_is_no_tau_is_said(target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, against = export(target, tmp_path / "d"), f"target={target.folder}"
    assert "tau not simulated: no target= was given" in run(str(folder), capsys=capsys)[1]
    config(folder, tie_word_embeddings=True)
    out = run(str(folder), against, capsys=capsys)[1]
    assert "comes first (tie_word_embeddings is true" in out and "engine= leaves the faults of the other" in out
    monkey = run(str(folder), against, "engine=vllm", capsys=capsys)[1]
    assert "tau not simulated: drafter=" in monkey and "tie_word_embeddings is true" in monkey


def test_five_thousand_taps_are_not_printed(target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = export(target, tmp_path / "d")
    ids = list(range(5000))
    config(folder, eagle_aux_hidden_state_layer_ids=ids, eagle_config={"eagle_aux_hidden_state_layer_ids": ids})
    config(folder, architectures=["LlamaForCausalLMEagle3"] * 5000, hidden_act="x" * 10**6)
    code, out, _ = run(str(folder), against := f"target={target.folder}", capsys=capsys)
    assert code == 1 and len(out.splitlines()) < 120 and "(5000 in all)" in out
    assert len(run(str(folder), against, "--json", capsys=capsys)[1].splitlines()) < 700
    assert listed([1, 2, 3]) == "1, 2, 3"


def test_an_import_of_a_bad_bin_is_a_users_mistake(target: Target, tmp_path: Path) -> None:
    from models.layouts import check_drafter

    folder = export(target, tmp_path / "d")
    with_code(pickled(folder))
    with pytest.raises(UserError, match=r"asks for posix.mkdir, .*Export or copy it again"):
        check_drafter(folder, target)

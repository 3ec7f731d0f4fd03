"""`python -m models.export`: a drafter of any layout becomes one of an engine's, or is refused with the reason."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.export import main
from models.layouts import load_drafter, save_drafter
from models.target import Target
from recipes.schema import UserError
from tests.models.test_golden import verifier
from tests.models.test_imports import edit, same
from tests.tiny import tiny_drafter

ROOT = Path(__file__).resolve().parents[2]
KEPT = [i for i in range(320) if i % 3]


@pytest.fixture(scope="module")
def target(tiny_target: Callable[..., Any]) -> Target:
    found: Target = tiny_target("llama")
    return found


def made(target: Target, folder: Path, kept: list[int] | None = None, **flags: bool) -> Path:
    papers = {"fingerprint": target.fingerprint, "target": {"path": str(target.folder)}, "seed": 7}
    save_drafter(tiny_drafter(target, kept or KEPT, **flags), folder, papers)
    return folder


def export(folder: Path, layout: str, out: Path, *more: str) -> None:
    main([f"drafter={folder}", f"layout={layout}", f"out={out}", *more])


def refusal(folder: Path, layout: str, out: Path, *more: str) -> str:
    with pytest.raises(UserError) as caught:
        export(folder, layout, out, *more)
    assert not out.exists() and len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_every_layout_from_every_layout(target: Target, tmp_path: Path) -> None:
    first = made(target, tmp_path / "first", fc_norm=True, norm_output=True)
    before = load_drafter(first, target)
    now = first
    for i, layout in enumerate(("vllm", "speculators", "sglang", "speculators", "portable", "vllm")):
        export(now, layout, tmp_path / f"{i}", f"target={target.folder}")
        now = tmp_path / f"{i}"
        same(load_drafter(now, target), before)
    papers = json.loads((now / "provenance.json").read_text())
    assert papers["fingerprint"] == target.fingerprint and papers["seed"] == 7
    assert papers["exported"] == {"from": "4", "layout": "vllm"}
    assert "give target=" in refusal(now, "speculators", tmp_path / "no")  # papers hold the target's name alone


def test_the_speculators_layout_takes_embedding_and_name_from_the_target(target: Target, tmp_path: Path) -> None:
    export(made(target, tmp_path / "d", norm_before_residual=True), "speculators", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    said = config["speculators_config"]["verifier"]
    assert said == {"name_or_path": target.folder.name, "architectures": ["LlamaForCausalLM"]}
    for file in ("config.json", "provenance.json", "README.md"):
        text = (tmp_path / "out" / file).read_text()
        assert str(tmp_path) not in text and str(target.folder) not in text, file
    assert target.fingerprint in (tmp_path / "out" / "provenance.json").read_text()
    assert config["norm_before_residual"] is True
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(tensors["embed_tokens.weight"], target.embed_weight)


def test_the_stored_precision_is_kept(target: Target, tmp_path: Path) -> None:
    papers = {"fingerprint": target.fingerprint}
    save_drafter(tiny_drafter(target, KEPT), tmp_path / "d", papers, torch.bfloat16)
    export(tmp_path / "d", "sglang", tmp_path / "out")
    one, other = (load_file(tmp_path / f / "model.safetensors") for f in ("d", "out"))
    assert one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"norm_before_residual": True}, "norm_before_residual: SGLang's residual stream"),
        ({"qk_norm": True}, "qk_norm: SGLang's drafter has no norms"),
    ],
)
def test_what_sglang_has_not_is_refused(target: Target, tmp_path: Path, flags: dict[str, bool], reason: str) -> None:
    assert reason in refusal(made(target, tmp_path / "d", None, **flags), "sglang", tmp_path / "out")


def test_taps_and_layers_that_sglang_has_not_are_refused(tiny_target: Callable[..., Any], tmp_path: Path) -> None:
    low: Target = tiny_target("llama", taps=[0, 3, 6])
    folder = made(low, tmp_path / "d")
    assert "h[0], which SGLang cannot capture" in refusal(folder, "sglang", tmp_path / "out")
    export(folder, "vllm", tmp_path / "vllm")
    edit(folder, {"num_hidden_layers": 2})
    assert "2 layers; only one-layer drafters are portable" in refusal(folder, "sglang", tmp_path / "out")
    edit(folder, {"num_hidden_layers": 1, "eagle_aux_hidden_state_layer_ids": [2, 4, 8]})
    assert "must lie in 0..7" in refusal(folder, "vllm", tmp_path / "out")
    edit(folder, {"tie_word_embeddings": True})
    assert "SGLang would take the embedding for the head" in refusal(folder, "sglang", tmp_path / "out")


def test_a_head_missing_from_a_reduced_vocabulary_is_refused(target: Target, tmp_path: Path) -> None:
    folder = made(target, tmp_path / "d")
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    assert "random logits" in refusal(folder, "sglang", tmp_path / "out")


def test_a_drafter_shorter_than_what_is_served_is_refused(target: Target, tmp_path: Path) -> None:
    folder = made(target, tmp_path / "d")
    given = f"target={target.folder}"
    assert "512, below the 8192" in refusal(folder, "vllm", tmp_path / "out", "serving_length=8192")
    edit(folder, {"max_position_embeddings": 256})
    assert "256, below the 512" in refusal(folder, "vllm", tmp_path / "out", given)
    export(folder, "vllm", tmp_path / "out", given, "serving_length=256")


def test_a_sliding_window_is_refused_rather_than_dropped(target: Target, tmp_path: Path) -> None:
    folder = made(target, tmp_path / "d")
    edit(folder, {"layer_types": ["sliding_attention"], "sliding_window": 64})
    assert "sliding window of 64" in refusal(folder, "vllm", tmp_path / "out")


def test_a_drafter_of_no_known_target_asks_for_it(target: Target, tmp_path: Path) -> None:
    folder = made(target, tmp_path / "d")
    (folder / "provenance.json").unlink()
    assert "give target=" in refusal(folder, "vllm", tmp_path / "out")
    assert "give target=" in refusal(folder, "speculators", tmp_path / "out")
    export(folder, "vllm", tmp_path / "out", f"target={target.folder}")
    papers = json.loads((tmp_path / "out" / "provenance.json").read_text())
    assert papers["fingerprint"] == target.fingerprint and papers["target_layers"] == 8


def test_another_target_and_its_own_embedding_are_refused(
    tiny_target: Callable[..., Any], target: Target, tmp_path: Path
) -> None:
    folder = made(target, tmp_path / "d")
    other: Target = tiny_target("llama", seed=1)
    assert "another target" in refusal(folder, "vllm", tmp_path / "out", f"target={other.folder}")
    papers = {"fingerprint": target.fingerprint, "target": {"path": str(target.folder)}}
    save_drafter(tiny_drafter(target), tmp_path / "s", papers, layout="speculators", verifier=verifier(other))
    assert "is not the target's" in refusal(tmp_path / "s", "vllm", tmp_path / "out")


def test_a_dry_run_writes_nothing(target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export(made(target, tmp_path / "d"), "sglang", tmp_path / "out", "dry_run=true")
    assert "dry_run: true" in capsys.readouterr().out and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give drafter= layout= out="),
        (["drafter=a", "layout=tgi", "out=b"], "layout=tgi is not one of portable, vllm, sglang, speculators"),
        (["drafer=a"], "unknown key 'drafer'. Did you mean 'drafter'?"),
        (["a"], "not of the form key=value"),
        (["drafter=./nothing", "layout=vllm", "out=b"], "no such folder"),
        (["drafter=a", "layout=vllm", "out=b", "serving_length=long"], "serving_length='long'"),
        (["drafter=a", "layout=vllm", "out=b", "serving_length=²"], "must be a whole number"),
        (["drafter=a", "layout=vllm", "out=b", "serving_length=" + "9" * 5000], "must be a whole number"),
        (["drafter=a", "layout=vllm", "out=b", "dry_run=maybe"], "dry_run=maybe"),
        (["drafter=~no-such-user/a", "layout=vllm", "out=b"], "cannot be used: Could not determine home directory"),
        (["drafter=" + "a" * 300, "layout=vllm", "out=b"], "cannot be used: File name too long"),
    ],
)
def test_a_mistake_is_told_in_one_line(arguments: list[str], words: str) -> None:
    with pytest.raises(UserError) as caught:
        main(arguments)
    assert words in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_a_mistake_on_the_command_line_ends_in_exit_code_2(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "models.export", "drafter=./nothing", "layout=vllm", f"out={tmp_path / 'out'}"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2 and done.stderr.startswith("error: drafter=./nothing: no such folder")
    assert len(done.stderr.splitlines()) == 1 and list(tmp_path.iterdir()) == []


def test_the_drafter_is_not_overwritten_by_its_export(target: Target, tmp_path: Path) -> None:
    folder = made(target, tmp_path / "d")
    with pytest.raises(UserError, match="is the drafter itself"):
        export(folder, "vllm", folder)


def test_what_is_no_export_is_not_replaced(target: Target, tmp_path: Path) -> None:
    folder, out = made(target, tmp_path / "d"), tmp_path / "mine"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="no export, which would be lost"):
        export(folder, "vllm", out)
    assert (out / "thesis.txt").read_text() == "years of work"
    for layout in ("vllm", "sglang"):  # an export gives way to the next
        export(folder, layout, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "provenance.json").read_text())["exported"]["layout"] == "sglang"


def test_the_card_goes_with_the_export(target: Target, tmp_path: Path) -> None:
    papers = {"fingerprint": target.fingerprint, "target": {"path": "org/model"}, "versions": {"torch": "2"}, "step": 9}
    save_drafter(tiny_drafter(target, KEPT), tmp_path / "d", papers)
    export(tmp_path / "d", "sglang", tmp_path / "g")
    assert "org/model: see https://huggingface.co/org/model" in (tmp_path / "g" / "README.md").read_text()
    export(tmp_path / "d", "speculators", tmp_path / "s", f"target={target.folder}")
    page = (tmp_path / "s" / "README.md").read_text()
    assert "trained with Espalier" in page and "step 9" in page and f"{len(KEPT)} of 320 tokens" in page
    assert "sglang.launch_server" not in page and "for `speculators` from `d`" in page
    assert str(tmp_path) not in page


def test_the_card_of_another_tools_drafter_claims_no_more_than_is_known(target: Target, tmp_path: Path) -> None:
    folder = made(target, tmp_path / "d")
    (folder / "provenance.json").unlink()
    export(folder, "portable", tmp_path / "out", f"target={target.folder}")
    page = (tmp_path / "out" / "README.md").read_text()
    assert "trained with another tool and exported by Espalier" in page and target.folder.name in page
    assert "Not measured" in page and "None" not in page and "vllm serve" in page and "sglang.launch_server" in page


@pytest.mark.parametrize(("layout", "engine"), [("vllm", "vllm serve"), ("sglang", "sglang.launch_server")])
def test_the_card_names_the_engine_that_finds_the_taps(
    tiny_target: Callable[..., Any], tmp_path: Path, layout: str, engine: str
) -> None:
    export(made(tiny_target("llama", taps=[1, 3, 6]), tmp_path / "d"), layout, tmp_path / "out")
    page = (tmp_path / "out" / "README.md").read_text()
    assert [word for word in ("vllm serve", "sglang.launch_server") if word in page] == [engine]


def test_damaged_papers_are_told(target: Target, tmp_path: Path) -> None:
    folder = made(target, tmp_path / "d")
    (folder / "provenance.json").write_text('{"fingerprint": 3, "target": [1]}')
    assert "target is no mapping" in refusal(folder, "vllm", tmp_path / "out")


@pytest.mark.parametrize("below", ["", "new"])
def test_a_loop_of_links_is_no_place_for_an_export(target: Target, tmp_path: Path, below: str) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(UserError, match="a loop of links"):
        export(made(target, tmp_path / "d"), "vllm", tmp_path / "loop" / below)


@pytest.mark.parametrize("name", ["config.json", "provenance.json"])
def test_json_nested_beyond_reading_is_told(target: Target, tmp_path: Path, name: str) -> None:
    folder = made(target, tmp_path / "d")
    (folder / name).write_text("[" * 100_000)
    assert f"{name} cannot be read as JSON" in refusal(folder, "vllm", tmp_path / "out")


def test_an_index_of_odd_values_is_told(target: Target, tmp_path: Path) -> None:
    folder = made(target, tmp_path / "d")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"fc.weight": ["x"]}}')
    assert "names no files of this folder" in refusal(folder, "vllm", tmp_path / "out")


def test_what_lies_beside_an_export_is_not_lost(target: Target, tmp_path: Path) -> None:
    folder = made(target, tmp_path / "d")
    export(folder, "vllm", tmp_path / "out")
    (tmp_path / "out" / "tuned.json").write_text("{}")
    with pytest.raises(UserError, match=r"holds tuned\.json beside an export"):
        export(folder, "sglang", tmp_path / "out")
    assert (tmp_path / "out" / "tuned.json").exists()


@pytest.mark.parametrize(
    ("papers", "words"),
    [
        ({"measured": [{"decoder": "x"}]}, "no card can be made of it"),
        ({"sources": [3]}, "no card can be made of it"),
        ({"target_layers": True}, "give target="),
        ({"target_layers": 10**12}, "give target="),
    ],
)
def test_papers_of_the_wrong_kind_are_told(target: Target, tmp_path: Path, papers: dict[str, Any], words: str) -> None:
    folder = made(target, tmp_path / "d")
    whole = json.loads((folder / "provenance.json").read_text())
    (folder / "provenance.json").write_text(json.dumps(whole | papers))
    assert words in refusal(folder, "vllm", tmp_path / "out")


def test_layer_types_that_are_no_list_are_told(target: Target, tmp_path: Path) -> None:
    folder = made(target, tmp_path / "d")
    edit(folder, config={"layer_types": 5})
    assert "layer_types=5" in refusal(folder, "vllm", tmp_path / "out")

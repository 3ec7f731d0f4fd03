"""The comparison with speculators and SpecForge, without them: what they would have computed is made up."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.layouts import save_drafter
from models.target import Target
from tests.scripts.test_check_engines import script
from tests.tiny import tiny_drafter

Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def peers() -> Any:
    return script("check_peers")


@pytest.fixture(scope="module")
def words(tiny_target: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory, peers: Any) -> list[str]:
    """A recipe and two drafters, of which SpecForge can express the first."""
    folder = tmp_path_factory.mktemp("peers")
    target: Target = tiny_target("llama")
    for name, flags in (("plain", {}), ("normed", {"norm_output": True})):
        drafter = tiny_drafter(target, [i for i in range(320) if i % 3], **flags)
        save_drafter(drafter, folder / name, {"fingerprint": target.fingerprint})
    (folder / "tiny.yaml").write_text(f"target: {{path: {target.folder}}}\ndata: {{sources: {{}}}}\n")
    return [f"recipe={folder / 'tiny.yaml'}", str(folder / "plain"), str(folder / "normed")]


@pytest.fixture
def work(words: list[str], tmp_path: Path, peers: Any) -> Path:
    """Our half is done; theirs is what agrees."""
    peers.main("write", tmp_path, words)
    for name in ("00", "01"):
        ours = load_file(tmp_path / name / "ours.safetensors")
        for peer, loss in peers.PEERS.items():
            answer(tmp_path / name, peer, {"logits": ours["logits"], "loss": ours[loss]})
    return tmp_path


def answer(case: Path, peer: str, tensors: Tensors, **keys: list[str]) -> None:
    save_file(tensors, case / f"{peer}.safetensors")
    (case / f"{peer}.json").write_text(json.dumps({"version": "0", "keys": {"missing": [], "unknown": []} | keys}))


def test_what_agrees_is_told_and_what_cannot_be_expressed(
    work: Path, words: list[str], peers: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    peers.main("compare", work, [*words, f"out={work / 'out'}"])
    told = capsys.readouterr().out
    assert told.endswith("all as it must be\n") and "cannot express norm_output" in told
    assert (work / "out" / "peers.md").read_text() == told
    assert not (work / "01" / "specforge").exists()


def shifted(theirs: Tensors) -> None:
    theirs["logits"] = theirs["logits"].roll(1, 1)


def not_a_number(theirs: Tensors) -> None:
    theirs["logits"][2, 3, 4] = torch.nan


def another_loss(theirs: Tensors) -> None:
    theirs["loss"][1, 2] += 1e-3


@pytest.mark.parametrize("change", [shifted, not_a_number, another_loss])
def test_what_differs_is_found(work: Path, words: list[str], peers: Any, change: Callable[[Tensors], None]) -> None:
    theirs = load_file(work / "00" / "specforge.safetensors")
    change(theirs)
    answer(work / "00", "specforge", theirs)
    with pytest.raises(SystemExit):
        peers.main("compare", work, words)


def test_a_tensor_that_was_not_read_is_found(work: Path, words: list[str], peers: Any) -> None:
    theirs = load_file(work / "00" / "speculators.safetensors")
    answer(work / "00", "speculators", theirs, missing=["fc.weight"])
    with pytest.raises(SystemExit):
        peers.main("compare", work, words)


def test_the_flags_of_both_peers_come_with_every_vocabulary_and_taps(peers: Any) -> None:
    found = [(tuple(flags), full, custom) for flags, full, custom in peers.cases()]
    for flags in ((), ("fc_norm",)):
        assert len({case for case in found if case[0] == flags}) == 4
    named = {flag for flags, _, _ in found for flag in flags}
    assert named == {"fc_norm", "norm_output", "norm_before_fc", "norm_before_residual", "qk_norm"}

"""Starting from another drafter: what it brings is kept, what does not fit is refused before anything is made."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from models.eagle3 import Eagle3
from models.layouts import Verifier, load_drafter, save_drafter
from models.target import Target
from models.vocab import VocabMap
from recipes.loading import load
from recipes.schema import Recipe, UserError
from tests.tiny import tiny_drafter
from tests.train.tiny_recipe import prompts
from train import warm_start
from train.eagle import main

KEPT = sorted({0, 1, *range(3, 320, 2)})


@pytest.fixture(scope="module")
def arguments(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("warm")
    (folder / "tiny.yaml").write_text(
        f"""
target: {{path: {model_folder}}}
data:
  sources: {{mine: {{kind: file, path: {prompts(folder / "training.jsonl", 12, 0)}}}}}
  max_length: 64
  answer_tokens: 12
  slots: 4
  drop_loops: false
  validation_rows: 2
  cache: {folder / "cache"}
eagle: {{draft_vocab: 200, unroll_steps: 2}}
train: {{batch_tokens: 400, micro_batch_tokens: 200, max_steps: 1, learning_rate: 1.0e-9, tracker: none}}
eval: {{prompts: {prompts(folder / "report.jsonl", 2, 11)}, decoders: [ar, chain], max_new_tokens: 6, chain_length: 2,
  matrix: cold, lossless: -1, each_epoch: false}}
"""
    )
    return [f"recipe={folder / 'tiny.yaml'}"]


def recipe(arguments: list[str], run_dir: Path, *more: str) -> Recipe:
    return load([*arguments, f"run_dir={run_dir}", *more])


def start(target: Target, folder: Path, layout: str = "vllm", fingerprint: str = "", **flags: bool) -> Eagle3:
    drafter: Eagle3 = tiny_drafter(target, KEPT, **flags)
    verifier = Verifier("some/target", ["LlamaForCausalLM"], target.embed_weight)
    save_drafter(drafter, folder, {"fingerprint": fingerprint or target.fingerprint}, layout=layout, verifier=verifier)
    return drafter


def assert_trained_from(trained: Eagle3, begun: Eagle3, but: str = "") -> None:
    """One step at a vanishing learning rate leaves what it began with."""
    for name, tensor in begun.state_dict().items():
        if name != but:
            torch.testing.assert_close(trained.state_dict()[name], tensor, atol=1e-6, rtol=1e-6)


def test_a_run_of_eagle_3_1_exports_what_engines_read(arguments: list[str], target: Target, tmp_path: Path) -> None:
    main(recipe(arguments, tmp_path / "run", "eagle.fc_norm=true", "eagle.norm_output=true"))
    config = load_drafter(tmp_path / "run" / "drafter", target).config
    assert config.fc_norm and config.norm_output and not config.norm_before_residual


def test_a_run_that_sglang_cannot_serve_says_so(
    arguments: list[str], target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(recipe(arguments, tmp_path / "run", "eagle.norm_before_residual=true", "eagle.qk_norm=true"))
    told = [line for line in capsys.readouterr().out.splitlines() if "for vLLM alone" in line]
    assert len(told) == 1 and "norm_before_residual" in told[0] and "qk_norm" in told[0]
    said = json.loads((tmp_path / "run" / "drafter" / "config.json").read_text())
    assert said["architectures"] == ["Eagle3Qwen3ForCausalLM"] and said["norm_before_residual"] is True


def test_weights_and_vocabulary_are_kept(
    arguments: list[str], target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = start(target, tmp_path / "old", "speculators", fc_norm=True, norm_output=True)
    flags = ("eagle.fc_norm=true", "eagle.norm_output=true")
    main(recipe(arguments, tmp_path / "run", f"eagle.init_from={tmp_path / 'old'}", *flags))
    told = capsys.readouterr().out
    assert f"starting from the drafter in {tmp_path / 'old'} (of this target); vocabulary kept: {len(KEPT)} of" in told
    trained = load_drafter(tmp_path / "run" / "drafter", target)
    assert trained.vocab.hash() == begun.vocab.hash()
    assert_trained_from(trained, begun)
    papers = json.loads((tmp_path / "run" / "drafter" / "provenance.json").read_text())
    assert papers["vocabulary"]["hash"] == begun.vocab.hash() and papers["init_from"] == "old"


def test_the_vocabulary_is_replaced_where_that_is_asked_for(
    arguments: list[str], target: Target, tmp_path: Path
) -> None:
    """Even from a drafter of another target of the same sizes."""
    begun = start(target, tmp_path / "old", fingerprint="of a target before it was fine-tuned")
    given = (f"eagle.init_from={tmp_path / 'old'}", "eagle.init_vocab=replace")
    main(recipe(arguments, tmp_path / "run", *given))
    trained = load_drafter(tmp_path / "run" / "drafter", target)
    assert trained.vocab.size == 200 != begun.vocab.size
    assert_trained_from(trained, begun, but="lm_head.weight")


def test_rows_of_the_head_follow_their_tokens(target: Target, tmp_path: Path) -> None:
    begun: Eagle3 = tiny_drafter(target, KEPT)
    now = warm_start.with_vocab(begun, VocabMap.from_ids([2, 3, 4, 5, 300, 319], 320), target)
    assert now.config.draft_vocab_size == 6
    for row, token in enumerate(now.vocab.kept_ids.tolist()):
        own = begun.lm_head.weight[KEPT.index(token)] if token in KEPT else target.head_weight[token]
        assert torch.equal(now.lm_head.weight[row], own)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ((), "give eagle.fc_norm=true eagle.norm_output=true"),
        (("eagle.fc_norm=true", "eagle.norm_output=true", "target.taps=[1,3,6]"), "give target.taps=[2,4,5]"),
    ],
)
def test_what_does_not_go_on_is_refused_before_data_are_made(
    arguments: list[str],
    target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    more: tuple[str, ...],
    words: str,
) -> None:
    start(target, tmp_path / "old", fc_norm=True, norm_output=True)
    monkeypatch.setattr("train.run.load_target", None)
    for dry in ("true", "false"):
        given = (f"eagle.init_from={tmp_path / 'old'}", *more, f"dry_run={dry}")
        with pytest.raises(UserError) as caught:
            main(recipe(arguments, tmp_path / "run", *given))
        assert words in str(caught.value)


def test_a_start_of_other_sizes_or_none_is_refused(
    arguments: list[str], tiny_target: Callable[..., Any], tmp_path: Path
) -> None:
    start(tiny_target("llama", hidden_size=64), tmp_path / "old")
    with pytest.raises(UserError, match="is for hidden size 64"):
        main(recipe(arguments, tmp_path / "run", f"eagle.init_from={tmp_path / 'old'}"))
    with pytest.raises(UserError, match=r"eagle\.init_from=\./nothing: no such folder"):
        main(recipe(arguments, tmp_path / "run", "eagle.init_from=./nothing"))

"""FlexDraft in the decoders: outputs are plain decoding's whatever it drafts, and it drafts what its masks say."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eval.decode import decode
from eval.drafters import fitted
from eval.engine import Engines
from eval.plan import settings_of
from eval.settings import Settings
from models.attention import Documents
from models.flex_groups import Groups
from models.flex_layout import check_flexdraft, load_flexdraft, save_flexdraft
from models.flexdraft import FlexDraft, FlexDraftConfig
from models.packed import PackedForward
from models.target import Target, load_target
from recipes.files import read_json, write_json
from recipes.schema import EvalConfig, Recipe, TargetConfig, UserError
from tests.tiny import tiny_drafter, tiny_model_folder

SIZE = 5
SLOWLY = [pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3", "gemma3_text")]
WINDOWED = [pytest.param(name, marks=pytest.mark.slow) for name in ("gemma2", "mistral")]
GREEDY: dict[str, Any] = {"draft_temperature": 0.0, "verifier": "match"}
PROMPTS = [[3, 9, 27, 81, 243], [5] * 11, [7, 8, 9]]


def trained(folder: Path, family: str) -> tuple[Target, FlexDraft]:
    """A drafter that has half learned by heart what the target says to the first prompt: some drafts are right."""
    target = load_target(TargetConfig(path=str(tiny_model_folder(folder / family, family))))
    target.eos_ids = frozenset()
    torch.manual_seed(1)
    drafter = FlexDraft(FlexDraftConfig.from_target(target, 3, SIZE))
    drafter.init_from_target(target, [torch.arange(20)])
    text = torch.tensor(PROMPTS[0] + decode(target, None, PROMPTS[:1], settings("ar")).rows[0].tokens)
    documents = Documents([len(text)], target.device)
    _, keys = PackedForward(target, drafter.config.split_layer).read(text, documents)
    groups = Groups(documents, [range(4, len(text) - SIZE, 2)], SIZE)
    optimizer = torch.optim.AdamW(drafter.parameters(), 1e-2)
    for _ in range(15):
        logits = target.logits(drafter.groups(target, keys, groups))
        loss = torch.nn.functional.cross_entropy(logits, text[groups.positions_R])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return target, drafter.eval()


def settings(decoder: str, **changes: Any) -> Settings:
    e = EvalConfig(max_new_tokens=24, chain_length=SIZE - 1, depth=SIZE - 1, nodes=8)
    return replace(settings_of(decoder, e), **changes)


Make = Callable[..., tuple[Target, FlexDraft]]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """make(family) -> (target, drafter); one of each a module."""
    made: dict[str, tuple[Target, FlexDraft]] = {}

    def of(family: str = "llama") -> tuple[Target, FlexDraft]:
        if family not in made:
            made[family] = trained(tmp_path_factory.mktemp(family), family)
        return made[family]

    return of


@pytest.mark.parametrize("family", ["llama", *SLOWLY])
def test_greedy_outputs_are_plain_decodings(make: Make, family: str) -> None:
    target, drafter = make(family)
    plain = decode(target, None, PROMPTS, settings("ar"))
    kinds = [settings(name, gates=(0.01, 0.0, 0.0)) for name in ("chain", "prune", "graft", "flex")]
    for kind in [*kinds, settings("flex", parallel=True)]:
        flex = decode(target, drafter, PROMPTS, kind)
        assert [row.tokens for row in flex.rows] == [row.tokens for row in plain.rows]
        assert flex.rows[0].accepted > 3 and all(len(row.positions_offered) <= SIZE - 1 for row in flex.rows)


@pytest.mark.parametrize(("decoder", "parallel"), [("chain", False), ("flex", False), ("flex", True)])
def test_sampled_outputs_are_plain_decodings_draws(make: Make, decoder: str, parallel: bool) -> None:
    """Sample-and-match: the target's draws are those of (seed, row, position), so that the texts are the same."""
    target, drafter = make()
    plain = decode(target, None, PROMPTS, settings("ar", temperature=1.0))
    flex = decode(target, drafter, PROMPTS, settings(decoder, temperature=1.0, parallel=parallel, **GREEDY))
    assert [row.tokens for row in flex.rows] == [row.tokens for row in plain.rows]


@pytest.mark.parametrize("family", ["llama", *WINDOWED])
@pytest.mark.parametrize("fixed", [False, True])
def test_parallel_drafts_what_sequential_drafts(make: Make, family: str, fixed: bool) -> None:
    """In ragged batches, where prompts take the places of others that ended, with shapes fixed or not."""
    target, drafter = make(family)
    both = [settings("flex", parallel=parallel, gates=(0.001,)) for parallel in (False, True)]
    found = [
        decode(target, drafter, PROMPTS * 2, kind, row_ids=[*range(6)], slots=2, engines=Engines(fixed))
        for kind in both
    ]
    for one, other in zip(*(decoded.rows for decoded in found), strict=True):
        assert one.accepted_per_round == other.accepted_per_round
        assert one.drafted_depth_per_round == other.drafted_depth_per_round
    assert sum(row.accepted for row in found[0].rows) > 6


@pytest.mark.parametrize("family", ["llama", *SLOWLY])
def test_a_parallel_forward_says_what_the_target_says_and_no_group_sees_past_its_candidate(
    make: Make, family: str
) -> None:
    target, drafter = make(family)
    prompt, candidates = torch.tensor([[3, 9, 27, 81], [5, 5, 9, 2]]), torch.tensor([[7, 8, 9], [11, 12, 13]])
    lengths = [4, 3]

    def ran(tokens: torch.Tensor, plainly: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        cache = target.new_cache(2, 64)
        target.prefill(prompt, lengths, cache)
        if plainly:
            return target.forward(tokens, cache).final_BTH, cache.keys, cache.values
        final, groups = drafter.verify(target, tokens, cache)
        return final, groups, cache.keys

    final, groups, keys = ran(candidates)
    plain, plain_keys, _ = ran(candidates, plainly=True)
    torch.testing.assert_close(final, plain, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(keys, plain_keys, atol=1e-5, rtol=1e-5)
    for changed in range(3):
        other = candidates.clone()
        other[:, changed] += 40
        moved = (ran(other)[1] - groups).abs().amax((0, 2, 3))
        assert (moved[:changed] < 1e-5).all() and (moved[changed:] > 1e-3).all()


def test_a_ragged_batch_accepts_what_each_row_alone_would(make: Make) -> None:
    target, drafter = make()
    together = decode(target, drafter, PROMPTS, settings("chain"), row_ids=[0, 1, 2])
    for row, prompt in enumerate(PROMPTS):
        alone = decode(target, drafter, [prompt], settings("chain"), row_ids=[row])
        assert alone.rows[0].accepted_per_round == together.rows[row].accepted_per_round


def test_what_it_accepts_is_what_its_masks_say_behind_the_accepted_text(make: Make) -> None:
    """Tau is recomputed from the finished text: at each round one group behind the tokens before the root."""
    target, drafter = make()
    row = decode(target, drafter, PROMPTS[:1], settings("chain")).rows[0]
    text, place = PROMPTS[0] + row.tokens, len(PROMPTS[0])
    assert row.accepted > 0
    for accepted in row.accepted_per_round[:-1]:
        cache = target.new_cache(1, 64)
        target.prefill(torch.tensor([text[:place]]), [place], cache)
        drafts = target.logits(drafter.block(target, cache)[0, 1:]).argmax(-1).tolist()
        right = 0
        while right < len(drafts) and drafts[right] == text[place + 1 + right]:
            right += 1
        assert right == accepted
        place += accepted + 1


def test_the_layout_gives_back_the_same_drafter(make: Make, tmp_path: Path) -> None:
    target, drafter = make("qwen3")
    save_flexdraft(drafter, tmp_path / "out", {"fingerprint": target.fingerprint})
    again = load_flexdraft(tmp_path / "out", target)
    assert again.config == drafter.config
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"split_layer": 8}, "split_layer 8 is out of range for a target of 8 layers"),
        ({"split_layer": "5"}, r"config\.json's split_layer is '5': must be a whole number from 0"),
        ({"split_layer": 6}, r"model\.safetensors has no use for layers\.5\.self_attn\.k_proj\.weight"),
        ({"block_size": 1}, "block_size is 1: must be a whole number from 2 to 64"),
        ({"block_size": 10**9}, "block_size is 1000000000: must be a whole number from 2 to 64"),
        ({"calibrator_rank": -1}, "calibrator_rank is -1: must be a whole number from 0"),
        ({"target_layers": 10**9}, "target_layers is 1000000000: must be"),
        ({"head_dim": True}, "head_dim is True: must be a whole number"),
        ({"four_norms": "no"}, "four_norms is 'no': must be true or false"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan: must be a number above 0"),
        ({"rms_norm_eps": 0.5}, r"its rms_norm_eps is 0\.5, the target's 1e-0"),
        ({"sizes": 3}, "flexdraft_config has no use for sizes"),
        ({"split_layer": 4}, r"layers\.4\.self_attn.* is missing|layers\.5"),
        ({"hidden_size": 64}, "its hidden_size is 64, the target's 32"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused_by_name(
    make: Make, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    target, drafter = make()
    save_flexdraft(drafter, tmp_path / "out", {"fingerprint": target.fingerprint})
    path = tmp_path / "out" / "config.json"
    config = read_json(path, "x")
    config["flexdraft_config"] |= change
    write_json(path, config)
    with pytest.raises(UserError, match=words):
        check_flexdraft(tmp_path / "out", target)


def test_a_calibrator_that_would_not_be_used_and_missing_papers_are_refused_by_name(make: Make, tmp_path: Path) -> None:
    target, _ = make()
    drafter, folder = FlexDraft(FlexDraftConfig.from_target(target, 3, SIZE, calibrator_rank=2)), tmp_path / "out"
    save_flexdraft(drafter, folder, {"fingerprint": target.fingerprint})
    config = read_json(folder / "config.json", "x")
    sizes = config["flexdraft_config"]
    lost = {key: value for key, value in sizes.items() if key != "qk_norm"}
    for changed, words in (
        (sizes | {"calibrator_rank": 0}, r"calibrator\.safetensors is there, but config\.json's calibrator_rank is 0"),
        (lost | {"qk": True}, "flexdraft_config lacks qk_norm and has no use for qk"),
    ):
        write_json(folder / "config.json", config | {"flexdraft_config": changed})
        with pytest.raises(UserError, match=words):
            check_flexdraft(folder, target)
    write_json(folder / "config.json", config)
    write_json(folder / "provenance.json", {})
    with pytest.raises(UserError, match=r"provenance\.json names no fingerprint"):
        check_flexdraft(folder, None)
    (folder / "provenance.json").unlink()
    with pytest.raises(UserError, match=r"provenance\.json, which says of which target it is, is missing"):
        check_flexdraft(folder, target)


def test_another_targets_drafter_is_refused(make: Make, tmp_path: Path) -> None:
    target, drafter = make()
    save_flexdraft(drafter, tmp_path / "out", {"fingerprint": "other"})
    with pytest.raises(UserError, match="was trained for another target"):
        check_flexdraft(tmp_path / "out", target)


def test_decoders_that_it_cannot_serve_are_left_out_and_refused_by_name(make: Make) -> None:
    target, drafter = make()
    recipe = Recipe(eval=EvalConfig(decoders=["ar", "chain", "eagle", "graft", "lookup", "flex"]))
    mine = fitted(recipe, drafter).eval
    assert mine.decoders == ["ar", "chain", "flex", "graft", "lookup"] and mine.chain_length == SIZE - 1
    assert fitted(recipe, tiny_drafter(target)).eval.decoders == ["ar", "chain", "eagle", "graft", "lookup"]
    with pytest.raises(UserError, match="decoder=talon is not for this drafter, which drafts lines"):
        fitted(Recipe(decoder="talon"), drafter)
    with pytest.raises(UserError, match=r"eval.decoders=\[flex\]: none is for this drafter, which is no FlexDraft"):
        fitted(Recipe(eval=EvalConfig(decoders=["flex"])), tiny_drafter(target))
    with pytest.raises(UserError, match="decoder=flex is not for this drafter, which is no FlexDraft"):
        fitted(Recipe(decoder="flex"), tiny_drafter(target))

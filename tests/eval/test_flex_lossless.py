"""FlexDraft loses nothing: the law of its outputs is enumerated, and ragged batches say what plain decoding says."""

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eval.decode import decode
from eval.engine import EVERY_ROW, Engine, Engines
from models.flexdraft import FlexDraft, FlexDraftConfig
from models.sampling import law
from models.target import Target, load_target
from recipes.schema import TargetConfig
from tests.eval.test_flex import SIZE, settings, trained
from tests.tiny import tiny_model_folder

VOCAB, LENGTH, HEAT = 4, 4, 0.8
PROMPTS = [[2, 3, 0, 1, 3, 2], [1], [3, 3, 2]]
MODES = [False, True]


def law_of_texts(target: Target, prompt: list[int]) -> Tensor:
    """[VOCAB ** LENGTH] float64: what plain sampling says behind the prompt, from forwards of the whole texts."""
    texts = list(itertools.product(range(VOCAB), repeat=LENGTH))
    ids = torch.tensor([prompt + list(text) for text in texts])
    laws = law(target.logits(target.features(ids).final_BTH), HEAT)[:, len(prompt) - 1 : -1]
    return laws.gather(2, ids[:, len(prompt) :].unsqueeze(2)).squeeze(2).prod(1)


@pytest.fixture(scope="module")
def exact_target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tiny_model_folder(tmp_path_factory.mktemp("exact"), vocab_size=VOCAB, initializer_range=0.3)
    target = load_target(TargetConfig(path=str(folder), dtype="float64"))
    target.eos_ids = frozenset()
    return target


@pytest.mark.parametrize("parallel", MODES)
def test_the_law_of_its_texts_is_the_targets(
    exact_target: Target, monkeypatch: pytest.MonkeyPatch, parallel: bool
) -> None:
    """Every fall of the target's draws at T > 0, a row each, three prompts side by side, more rows than places: each
    row says the text of its draws, and the chances of these, as the engine has them, multiply to the text's own."""
    target = exact_target
    torch.manual_seed(0)
    drafter = FlexDraft(FlexDraftConfig.from_target(target, 3, SIZE, 4))
    drafter.init_from_target(target, [torch.arange(20) % VOCAB])
    assert drafter.calibrator is not None
    torch.nn.init.normal_(drafter.calibrator.outer.weight)
    texts = list(itertools.product(range(VOCAB), repeat=LENGTH))
    rows = [(prompt, text) for text in texts for prompt in PROMPTS]
    ends = torch.tensor([len(prompt) for prompt, _ in rows])
    draws = torch.tensor([text for _, text in rows])
    chance = torch.ones(len(rows), LENGTH, dtype=torch.float64)

    def choose(engine: Engine, logits: Tensor, positions: Tensor, part: slice = EVERY_ROW) -> Tensor:
        """The row's own draw at each position, whose chance is noted: what was drawn in vain is drawn again later."""
        row = engine.row_ids[part].view(-1, *[1] * (positions.dim() - 1)).expand_as(positions)
        place = positions - ends[row]
        token = draws[row, place.clamp(max=LENGTH - 1)]
        found = law(logits, HEAT).gather(-1, token.unsqueeze(-1)).squeeze(-1)
        inside = place < LENGTH
        chance[row[inside], place[inside]] = found[inside]
        return token

    monkeypatch.setattr(Engine, "choose", choose)
    kind = settings("flex", max_new_tokens=LENGTH, temperature=HEAT, parallel=parallel, gates=(0.05,))
    prompts = [prompt for prompt, _ in rows]
    found = decode(target, drafter.double().eval(), prompts, kind, slots=300)
    assert [tuple(row.tokens) for row in found.rows] == [text for _, text in rows]
    accepted = sum(row.accepted for row in found.rows)
    assert len(rows) / 4 < accepted < 2 * len(rows)  # some drafts are right, some are not
    for number, prompt in enumerate(PROMPTS):
        ours, wanted = chance[number :: len(PROMPTS)].prod(1), law_of_texts(target, prompt)
        assert abs(float(wanted.sum()) - 1) < 1e-12
        assert float((ours - wanted).abs().sum()) < 1e-12


@pytest.fixture(scope="module")
def half_trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, FlexDraft]:
    folder: Path = tmp_path_factory.mktemp("llama")
    return trained(folder, "llama")


@pytest.mark.parametrize("heat", [0.0, 0.2])
@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("parallel", MODES)
def test_ragged_batches_say_what_plain_decoding_says(
    half_trained: tuple[Target, FlexDraft], parallel: bool, fixed: bool, heat: float
) -> None:
    """Fourteen prompts of 1 to 30 tokens in five places, greedily and with the draws of (seed, row, position)."""
    target, drafter = half_trained
    source = torch.Generator().manual_seed(3)
    prompts = [torch.randint(2, 320, (n,), generator=source).tolist() for n in (1, 30, 2, 17, 9, 5, 23, 3, 12, 7, 4)]
    prompts += [[3, 9, 27, 81, 243]] * 3  # the one whose greedy answer the masks have learned
    plain = decode(target, None, prompts, settings("ar", temperature=heat))
    kind = settings("flex", temperature=heat, parallel=parallel, gates=(0.001,))
    flex = decode(target, drafter, prompts, kind, slots=5, engines=Engines(fixed))
    assert [row.tokens for row in flex.rows] == [row.tokens for row in plain.rows]
    assert sum(row.accepted for row in flex.rows) > 3

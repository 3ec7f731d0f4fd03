"""Losslessness: greedy outputs are the target's own, sampled ones have its law, whatever is drafted."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TopKLogitsWarper, TopPLogitsWarper

from eval.decode import decode
from eval.matrix import WIDTH, SuccessorMatrix
from eval.settings import Settings
from models.eagle3 import Eagle3
from models.target import Target
from tests.tiny import tiny_drafter

NEW = 24
DRAFTERS = {
    "chain-4": Settings("chain", NEW, depth=4),
    "chain-1": Settings("chain", NEW, depth=1),
    "eagle-12": Settings("eagle", NEW, depth=4, branch=4, nodes=12),
    "eagle-60": Settings("eagle", NEW),
    "graft-20": Settings("graft", NEW, depth=3, branch=3, nodes=20, gates=(0.9, 0.9, 0.9)),
    "graft-60": Settings("graft", NEW, gates=(0.02, 0.001, 0.5)),
    "graft-open": Settings("graft", NEW, gates=(0.0, 0.0, 0.0)),
    "prune-60": Settings("prune", NEW, gates=(0.02, 0.001, 0.5)),
    "prune-shut": Settings("prune", NEW, depth=3, branch=3, nodes=20, gates=(0.9, 0.9, 0.9)),
    "recycle-60": Settings("recycle", NEW),
    "lookup-10": Settings("lookup", NEW, depth=10),
    "suffix-40": Settings("suffix", NEW, depth=40),
    "talon-60": Settings("talon", NEW, depth=16),
    "talon-12": Settings("talon", NEW, depth=4, branch=3, nodes=12),
}


class Scene:
    def __init__(self, target: Target) -> None:
        self.target: Target = target
        self.drafter: Eagle3 = tiny_drafter(target, [i for i in range(320) if i % 5], noise=0.02)
        source = torch.Generator().manual_seed(1)
        self.prompts = [torch.randint(2, 320, (n,), generator=source).tolist() for n in (5, 9, 3, 14)]
        self.plain = {heat: self.tokens(Settings("ar", NEW, heat)) for heat in (0.0, 1.0)}

    def tokens(self, settings: Settings, matrix: SuccessorMatrix | None = None) -> list[list[int]]:
        drafter = self.drafter if settings.drafts else None
        return [row.tokens for row in decode(self.target, drafter, self.prompts, settings, matrix).rows]


@pytest.fixture(scope="module", params=["llama", "gemma3_text", "mistral"])
def scene(request: pytest.FixtureRequest, tiny_target: Callable[..., Any]) -> Scene:
    return Scene(tiny_target(request.param, initializer_range=0.1))


def test_plain_decoding_is_transformers_greedy(scene: Scene) -> None:
    """The last two families slide a window of 8 over these texts of up to 38 tokens."""
    for prompt, tokens in zip(scene.prompts, scene.plain[0.0], strict=True):
        ids = torch.tensor([prompt])
        out = scene.target.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, pad_token_id=0
        )
        assert out[0, len(prompt) :].tolist() == tokens


@pytest.mark.parametrize("heat", [0.0, 1.0])
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_decoder_gives_the_tokens_of_plain_decoding(scene: Scene, name: str, heat: float) -> None:
    """Greedy, and at T = 1 under the noise of (seed, row, position); cold, then with what the matrix has learnt."""
    settings, matrix = replace(DRAFTERS[name], temperature=heat), SuccessorMatrix(320)
    assert scene.tokens(settings, matrix) == scene.plain[heat]
    if settings.remembers:
        assert scene.tokens(settings, matrix) == scene.plain[heat]


@pytest.mark.parametrize("heat", [0.0, 1.0])
@pytest.mark.parametrize("name", ["ar", "chain-4", "eagle-12", "graft-60", "recycle-60", "suffix-40", "talon-60"])
def test_an_output_does_not_depend_on_its_batch(scene: Scene, name: str, heat: float) -> None:
    settings = replace(DRAFTERS[name] if name != "ar" else Settings("ar", NEW), temperature=heat)
    drafter = scene.drafter if settings.drafts else None
    for i in (2, 0):
        alone = decode(scene.target, drafter, [scene.prompts[i]], settings, row_ids=[i])
        assert alone.rows[0].tokens == scene.plain[heat][i]


@pytest.mark.parametrize("heat", [0.0, 1.0])
@pytest.mark.parametrize("distinct", [True, False])
def test_a_random_matrix_changes_no_token(scene: Scene, heat: float, distinct: bool) -> None:
    """Even one whose rows repeat a token, which no update writes."""
    source = torch.Generator().manual_seed(5)
    matrix = SuccessorMatrix(320)
    if distinct:
        rows = torch.rand(320, 320, generator=source).topk(WIDTH).indices
    else:
        rows = torch.randint(4, (320, WIDTH), generator=source)
    matrix.update(torch.arange(320), rows)
    for decoder in ("graft", "recycle"):
        settings = Settings(decoder, NEW, heat, gates=(0.9, 0.9, 0.9))
        assert scene.tokens(settings, matrix.copy()) == scene.plain[heat]


@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_gates_at_0_are_eagle_round_by_round(scene: Scene, heat: float) -> None:
    graft = decode(scene.target, scene.drafter, scene.prompts, Settings("graft", NEW, heat, gates=(0.0, 0.0, 0.0)))
    eagle = decode(scene.target, scene.drafter, scene.prompts, Settings("eagle", NEW, heat))
    for one, other in zip(graft.rows, eagle.rows, strict=True):
        assert one.tokens == other.tokens and one.accepted_per_round == other.accepted_per_round
        assert one.nodes == other.nodes and one.stages["none"] == one.rounds and one.merged == 0
        assert one.drafted_depth_per_round == other.drafted_depth_per_round


@pytest.mark.parametrize(("top_k", "top_p"), [(2, 1.0), (5, 0.6)])
def test_top_k_and_top_p_are_honoured(scene: Scene, top_k: int, top_p: float) -> None:
    settings = Settings("ar", NEW, 1.0, top_p, top_k, seed=3)
    plain = scene.tokens(settings)
    strayed = 0
    for prompt, tokens in zip(scene.prompts, plain, strict=True):
        text = torch.tensor([prompt + tokens])
        scores = scene.target.logits(scene.target.features(text).final_BTH)[0, len(prompt) - 1 : -1].double()
        strayed += int((scores.argmax(-1) != text[0, len(prompt) :]).sum())
        if top_k:
            scores = TopKLogitsWarper(top_k)(text, scores)
        if top_p < 1:
            scores = TopPLogitsWarper(top_p)(text, scores)
        assert (scores.gather(1, text[:, len(prompt) :].T) > float("-inf")).all()
    assert strayed > 0
    for name in ("chain-4", "graft-60", "prune-60", "recycle-60", "lookup-10", "suffix-40", "talon-60"):
        warm = replace(DRAFTERS[name], temperature=1.0, top_k=top_k, top_p=top_p, seed=3)
        assert scene.tokens(warm) == plain


# The joint law of tokens 1 to 3 on a target with 8 tokens, chi-square at 1e-3.

ROWS, VOCAB, PROMPT = 5000, 8, [2, 5, 3, 7]


@pytest.fixture(scope="module")
def small(tiny_target: Callable[..., Any]) -> tuple[Target, Eagle3]:
    target: Target = tiny_target(
        "llama", taps=[1, 2, 3], vocab_size=VOCAB, num_hidden_layers=4, hidden_size=16, intermediate_size=16,
        head_dim=4, initializer_range=0.25,
    )  # fmt: skip
    return target, tiny_drafter(target, noise=0.1)


def joint_law(target: Target, heat: float) -> Tensor:
    """[V, V, V] exact probabilities; what would follow an end token is booked at token 0."""
    texts = torch.tensor([PROMPT + list(p) for p in itertools.product(range(VOCAB), repeat=2)])
    law = (target.logits(target.features(texts).final_BTH).double() / heat).softmax(-1)[:, len(PROMPT) - 1 :]
    first = law[0, 0]
    second = law[::VOCAB, 1]
    third = law[:, 2].view(VOCAB, VOCAB, VOCAB)
    ended = torch.zeros(VOCAB, dtype=torch.float64)
    ended[0] = 1
    for end in target.eos_ids:
        second[end] = ended
        third[end] = ended
        third[:, end] = ended
    return first.view(-1, 1, 1) * second.unsqueeze(2) * third


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """p-value; cells that expect under 5 are pooled."""
    rare = expected < 5
    observed = torch.cat([counts[~rare], counts[rare].sum().view(1)]).double()
    wanted = torch.cat([expected[~rare], expected[rare].sum().view(1)])
    keep = wanted > 0
    statistic = ((observed - wanted)[keep] ** 2 / wanted[keep]).sum()
    freedom = torch.tensor(float(keep.sum()) - 1, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))


def sampled(small: tuple[Target, Eagle3], settings: Settings) -> Tensor:
    """[ROWS, 3] tokens; a row that ended early is filled with token 0."""
    target, drafter = small
    found = decode(target, drafter if settings.drafts else None, [PROMPT] * ROWS, settings)
    said = [[*row.tokens, 0, 0][:3] for row in found.rows]
    assert settings.decoder == "ar" or sum(row.accepted for row in found.rows) > ROWS // 10
    return torch.tensor(said)


JOINT = {
    "ar": Settings("ar", 4, 1.0, seed=11),
    "chain": Settings("chain", 4, 1.0, seed=12, depth=3),
    "eagle": Settings("eagle", 4, 1.0, seed=13, depth=3, branch=3, nodes=8),
    "graft": Settings("graft", 4, 1.0, seed=14, depth=3, branch=3, nodes=8, gates=(0.2, 0.2, 0.5)),
    "graft, all retrieved": Settings("graft", 4, 0.8, seed=15, depth=2, branch=2, nodes=12, gates=(1.0, 1.0, 1.0)),
    "prune": Settings("prune", 4, 1.0, seed=16, depth=3, branch=3, nodes=20, gates=(0.2, 0.2, 0.5)),
    "recycle": Settings("recycle", 4, 1.0, seed=17, nodes=12),
    "lookup": Settings("lookup", 4, 1.0, seed=18, depth=3),
    "suffix": Settings("suffix", 4, 1.0, seed=19, depth=3),
    "talon": Settings("talon", 4, 1.0, seed=20, depth=3, branch=3, nodes=8),
}


@pytest.mark.parametrize("name", JOINT)
def test_the_joint_law_of_three_tokens(small: tuple[Target, Eagle3], name: str) -> None:
    settings = JOINT[name]
    law = joint_law(small[0], settings.temperature).flatten()
    assert abs(float(law.sum()) - 1) < 1e-9
    said = sampled(small, settings)
    counts = torch.bincount(said @ torch.tensor([VOCAB * VOCAB, VOCAB, 1]), minlength=VOCAB**3)
    assert chi_square(counts, ROWS * law) > 1e-3
    assert chi_square(counts, ROWS * joint_law(small[0], settings.temperature * 1.15).flatten()) < 1e-3, "no power"


def test_shared_noise_gives_the_same_draws_to_all(small: tuple[Target, Eagle3]) -> None:
    plain = sampled(small, JOINT["ar"])
    for name in ("chain", "eagle", "graft", "prune", "recycle", "lookup", "suffix", "talon"):
        assert torch.equal(sampled(small, replace(JOINT[name], seed=11)), plain)

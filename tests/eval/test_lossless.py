"""Near-ties are proven twice or not excused; real greedy outputs are compared with transformers'."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from eval import lossless
from eval.lossless import Referee
from models.target import Target, load_target
from recipes.schema import TargetConfig
from tests.tiny import tiny_model_folder


class Ballot(nn.Module):
    """Logits that do not depend on the prefix; in float64 they may say something else than in float32."""

    def __init__(self, single: list[float], double: list[float]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.single, self.double_ = single, double

    @property
    def device(self) -> torch.device:
        return self.scale.device

    def forward(self, input_ids: torch.Tensor, **_: Any) -> SimpleNamespace:
        exact = self.scale.dtype == torch.float64
        row = torch.tensor(self.double_ if exact else self.single, dtype=self.scale.dtype)
        return SimpleNamespace(logits=row.expand(*input_ids.shape, len(row)))


TIED = [1.0, 1.00005, 0.2]
APART = [1.0, 1.5, 0.2]


@pytest.mark.parametrize(
    ("single", "double", "tokens", "verdict"),
    [
        (TIED, TIED, ([0, 1, 0], [0, 1, 0]), "identical"),
        (TIED, TIED, ([0, 1, 0], [0, 0, 2]), "near_tie"),
        (TIED, APART, ([0, 1, 0], [0, 0, 2]), "diverged"),  # float64 does not confirm it
        (APART, TIED, ([0, 1, 0], [0, 0, 2]), "diverged"),
        (TIED, TIED, ([0, 1, 0], [0, 2, 2]), "diverged"),  # a tie of other tokens excuses nothing
        (TIED, TIED, ([0, 1, 0], [0, 1]), "diverged"),  # one stops early
    ],
)
def test_a_divergence_is_excused_only_at_a_proven_near_tie(
    single: list[float], double: list[float], tokens: tuple[list[int], list[int]], verdict: str
) -> None:
    assert Referee(Ballot(single, double)).compare([2, 2], *tokens) == verdict


def test_a_parting_is_measured_in_steps_of_the_dtype_and_in_float64() -> None:
    half = Referee(Ballot([12.0, 12.0625, 0.0], [12.03, 12.031, 0.0]).bfloat16())
    assert half.compare([2], [1], [0]) == "diverged"  # rounding, but not a proven tie
    (parting,) = half.partings
    assert parting.step == 2.0**-4  # bfloat16 has 8 bits: between 8 and 16 they are 1/16 apart
    assert parting.gap == 2.0**-4 or parting.gap == 0.0  # 12.0625 is a number of bfloat16
    assert parting.exact_gap == pytest.approx(0.001)
    far = Referee(Ballot(APART, APART))
    far.compare([2], [1], [0])
    assert far.partings[0].exact_gap is None  # float64 is not asked where no rounding explains it


def test_the_first_place_of_parting_is_scored_after_its_own_prefix() -> None:
    seen: list[list[int]] = []

    class Spy(Ballot):
        def forward(self, input_ids: torch.Tensor, **options: Any) -> SimpleNamespace:
            seen.append(input_ids[0].tolist())
            return super().forward(input_ids, **options)

    Referee(Spy(TIED, TIED)).compare([2, 2], [0, 1, 0], [0, 0, 2])
    assert seen[0] == [2, 2, 0]


def test_one_bad_turn_spoils_the_prompt() -> None:
    assert lossless.worst(["identical", "near_tie"]) == "near_tie"
    assert lossless.worst(["near_tie", "diverged", "identical"]) == "diverged"
    assert lossless.worst([]) == "identical"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder: Path = tiny_model_folder(tmp_path_factory.mktemp("target"))
    return load_target(TargetConfig(path=str(folder)), "cpu", torch.float32)


def test_generate_is_greedy_and_keeps_the_end_token(target: Target) -> None:
    ids = [5, 9, 33, 12]
    answer = lossless.generate(target, [ids], 12)[0]
    assert 1 <= len(answer) <= 12
    for k, token in enumerate(answer):
        logits = target.model(input_ids=torch.tensor([ids + answer[:k]])).logits[0, -1]
        assert int(logits.argmax()) == token
    assert not set(answer[:-1]) & target.eos_ids


def test_generate_of_a_batch_is_generate_of_each(target: Target) -> None:
    prompts = [[5, 9, 33, 12], [7], [8, 9, 10, 11, 12, 13, 14]]
    assert lossless.generate(target, prompts, 12) == [lossless.generate(target, [ids], 12)[0] for ids in prompts]


def test_an_ended_row_is_cut_after_its_end_token() -> None:
    assert lossless._until([4, 5, 1, 1, 1], frozenset({1, 2})) == [4, 5, 1]
    assert lossless._until([4, 5, 6], frozenset({1, 2})) == [4, 5, 6]


def test_generate_sets_the_models_own_sampling_aside(target: Target) -> None:
    before = lossless.generate(target, [[5, 9, 33]], 8)
    target.model.generation_config.repetition_penalty = 5.0
    target.model.generation_config.do_sample = True
    assert lossless.generate(target, [[5, 9, 33]], 8) == before


def test_a_real_target_is_identical_to_itself(target: Target) -> None:
    answer = lossless.generate(target, [[7, 8, 9]], 10)[0]
    referee = Referee(target.model)
    assert referee.compare([7, 8, 9], answer, list(answer)) == "identical"
    other = [*answer[:-1], (answer[-1] + 1) % 320]
    assert referee.compare([7, 8, 9], answer, other) == "diverged"
    assert referee.double is None or referee.double.dtype == torch.float64


def test_tf32_is_put_back() -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    with lossless.exact_matmul(cast(Target, SimpleNamespace(dtype=torch.float32))):
        assert not torch.backends.cuda.matmul.allow_tf32
    assert torch.backends.cuda.matmul.allow_tf32 == before

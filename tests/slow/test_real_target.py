"""The real model, decoded every way: it makes sense, it is transformers' greedy, and no drafter changes a token."""

import pytest
import torch

from eval.decode import decode
from eval.matrix import SuccessorMatrix
from eval.settings import Settings
from models.eagle3 import Eagle3, Eagle3Config
from models.generate import generate
from models.target import Target
from models.vocab import VocabMap

pytestmark = pytest.mark.slow
NEW = 32
SETTINGS = {
    "chain": Settings("chain", NEW, depth=7),
    "eagle": Settings("eagle", NEW),
    "graft": Settings("graft", NEW),
    "graft, all retrieved": Settings("graft", NEW, gates=(1.0, 1.0, 1.0)),
}


@pytest.fixture(scope="module")
def plain(target: Target, prompts: list[list[int]]) -> list[list[int]]:
    return [row.tokens for row in decode(target, None, prompts, Settings("ar", NEW)).rows]


@pytest.fixture(scope="module")
def drafter(target: Target) -> Eagle3:
    """Freshly initialised; a reduced vocabulary that misses tokens of the answers."""
    vocab = VocabMap.from_ids(list(range(0, target.vocab_size, 3)), target.vocab_size)
    torch.manual_seed(0)
    drafter = Eagle3(Eagle3Config.from_target(target, vocab), vocab)
    drafter.init_from_target(target)
    return drafter.eval()


def test_it_answers(target: Target, plain: list[list[int]]) -> None:
    answer = target.tokenizer.decode(plain[0], skip_special_tokens=True)
    assert "Paris" in answer and "capital" in answer
    assert plain[0][-1] in target.eos_ids  # a short answer that ends by itself


def test_it_is_transformers_greedy(target: Target, prompts: list[list[int]], plain: list[list[int]]) -> None:
    batched = generate(
        target, prompts, max_new_tokens=NEW, temperatures=[0.0] * 3, slots=2, seed=0, stop_ids=target.eos_ids
    )
    for prompt, tokens, others in zip(prompts, plain, batched, strict=True):
        ids = torch.tensor([prompt])
        out = target.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=sorted(target.eos_ids),
            pad_token_id=0,
        )
        assert out[0, len(prompt) :].tolist() == tokens == others


@pytest.mark.parametrize("name", SETTINGS)
def test_no_drafter_changes_a_token(
    target: Target, drafter: Eagle3, prompts: list[list[int]], plain: list[list[int]], name: str
) -> None:
    matrix = SuccessorMatrix(target.vocab_size)
    together = decode(target, drafter, prompts, SETTINGS[name], matrix)
    assert [row.tokens for row in together.rows] == plain
    alone = decode(target, drafter, prompts[1:2], SETTINGS[name], matrix, [1])
    assert alone.rows[0].tokens == plain[1]

"""Long texts: read in chunks and past a sliding window, the answers are the same and no tensor is quadratic."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from eval.decode import decode
from eval.engine import Engines
from eval.settings import Settings
from models.target import Target
from tests.tiny import tiny_drafter

NEW = 20
SETTINGS = {
    "chain": Settings("chain", NEW, depth=3),
    "eagle": Settings("eagle", NEW, depth=4, branch=4, nodes=12),
    "talon": Settings("talon", NEW, depth=5, branch=3, nodes=12),
    "prune": Settings("prune", NEW, depth=3, branch=4, nodes=20, gates=(0.3, 0.1, 0.5)),
    "graft": Settings("graft", NEW, depth=3, branch=4, nodes=20, gates=(0.3, 0.1, 0.5)),
    "splice": Settings("splice", NEW, depth=3, branch=4, nodes=20, gates=(0.3, 0.1, 0.5)),
    "recycle": Settings("recycle", NEW, nodes=20),
    "lookup": Settings("lookup", NEW, depth=10),
    "suffix": Settings("suffix", NEW, depth=10),
}


def texts(lengths: tuple[int, ...]) -> list[list[int]]:
    source = torch.Generator().manual_seed(2)
    return [torch.randint(2, 320, (n,), generator=source).tolist() for n in lengths]


class Windowed:
    """A target, three prompts of which two are several windows of 8 long, and what transformers answers in fp32."""

    def __init__(self, target: Target) -> None:
        self.target, self.drafter = target, tiny_drafter(target, noise=0.02)
        self.prompts = texts((37, 4, 61))
        self.answers = [self._generate(torch.tensor([prompt])) for prompt in self.prompts]

    def _generate(self, ids: torch.Tensor) -> list[int]:
        mask = torch.ones_like(ids)
        out = self.target.model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
        found: list[int] = out[0, ids.shape[1] :].tolist()
        return found


@pytest.fixture(scope="module", params=["gemma3_text", "mistral", "llama"])
def windowed(request: pytest.FixtureRequest, tiny_target: Callable[..., Any]) -> Windowed:
    target: Target = tiny_target(request.param, initializer_range=0.1)
    assert (target.window == 8) == (request.param != "llama")
    kinds = {layer.kind for layer in target.layers}
    assert len(kinds) == 2 if request.param == "gemma3_text" else len(kinds) == 1
    return Windowed(target)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("chunk", [5, 11, 4096])
@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_plain_decoding_reads_in_chunks_as_at_once(
    windowed: Windowed, monkeypatch: pytest.MonkeyPatch, chunk: int, fixed: bool, heat: float
) -> None:
    w, settings = windowed, Settings("ar", NEW, heat)
    whole = [row.tokens for row in decode(w.target, None, w.prompts, settings).rows]
    assert heat or whole == w.answers
    monkeypatch.setattr("models.target.PREFILL_CHUNK", chunk)
    engines = Engines(fixed=fixed)
    assert [row.tokens for row in decode(w.target, None, w.prompts, settings, engines=engines).rows] == whole


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_every_decoder_past_the_window_is_transformers_greedy(
    windowed: Windowed, monkeypatch: pytest.MonkeyPatch, name: str, fixed: bool
) -> None:
    """Read in chunks of less than a window, the third prompt into a place that another one left."""
    w, settings, engines = windowed, SETTINGS[name], Engines(fixed=fixed)
    monkeypatch.setattr("models.target.PREFILL_CHUNK", 5)
    found = decode(w.target, w.drafter if settings.drafts else None, w.prompts, settings, slots=2, engines=engines)
    assert [row.tokens for row in found.rows] == w.answers


class Largest(TorchDispatchMode):
    """Watches how many bytes the largest tensor takes that any operation makes."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [t.untyped_storage().nbytes() for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        self.bytes = max(self.bytes, *sizes, 0)
        return out


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("name", ["graft", "talon"])
def test_no_tensor_grows_with_the_square_of_a_long_prompt(
    tiny_target: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, family: str, name: str
) -> None:
    """4000 tokens, of which one byte a pair would be 16 MB: in target, drafter and matrix, from the first chunk to the
    last round."""
    target: Target = tiny_target(family, initializer_range=0.1, max_position_embeddings=8192)
    drafter, settings = tiny_drafter(target, noise=0.0), replace(SETTINGS[name], max_new_tokens=6)
    prompts = texts((4000,))
    whole = decode(target, drafter, prompts, settings).rows[0].tokens
    monkeypatch.setattr("models.target.PREFILL_CELLS", 1 << 17)
    monkeypatch.setattr("eval.engine.PREFILL_LOGITS", 256)
    with Largest() as largest:
        assert decode(target, drafter, prompts, settings).rows[0].tokens == whole
    assert 100_000 < largest.bytes < 4_000_000

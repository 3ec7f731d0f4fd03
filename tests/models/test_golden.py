"""For every drafter that an export allows: the engine's reading of it gives the logits and states of training, and of
decoding."""

import itertools
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from models.attention import Documents
from models.eagle3 import Eagle3
from models.layout_tables import LAYOUTS, why_not
from models.layouts import Verifier, save_drafter
from models.target import Target
from recipes.schema import UserError
from tests.models.engine_reader import Reader, SglangReader, VllmReader
from tests.tiny import tiny_drafter

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "qk_norm")
SETS = [
    dict(zip(FLAGS, on, strict=True))
    for on in itertools.product((False, True), repeat=len(FLAGS))
    if not (on[1] and on[2])  # two norms of the same input
]
KEPT = [i for i in range(320) if i % 3]
READERS: dict[str, list[type[Reader]]] = {
    "portable": [VllmReader, SglangReader],
    "vllm": [VllmReader],
    "sglang": [SglangReader],
    "speculators": [VllmReader],
}
T, STEPS = 6, 4


def flag_names(flags: dict[str, bool]) -> str:
    return "+".join(name for name, on in flags.items() if on) or "none"


def verifier(target: Target) -> Verifier:
    return Verifier("some/target", ["LlamaForCausalLM"], target.embed_weight)


def assert_equal(one: torch.Tensor, other: torch.Tensor) -> None:
    """To 1e-5 of the vector's largest element: random weights make states and logits of any size."""
    assert (one - other).abs().max() <= 1e-5 * max(1.0, float(other.abs().max()))


def assert_served_as_trained(target: Target, drafter: Eagle3, folder: Path, readers: list[type[Reader]]) -> None:
    ids = torch.randint(2, 320, (1, T + STEPS + 1), generator=torch.Generator().manual_seed(5))
    features, row = target.features(ids[:, :T]).taps_BTC[0], Documents([T], target.device)
    with torch.no_grad():
        trained = list(drafter.unroll(features, target.embed(ids[0, 1:]), STEPS, row))
        rows = [drafter.logits(state) for state in trained]
        hidden = target.model(ids[:, :T], output_hidden_states=True).hidden_states
        for reads in readers:
            reader = reads(folder, target.model.get_input_embeddings().weight)
            captured = torch.cat([hidden[layer][0] for layer in reader.captured(target.n_layers)], -1)
            torch.testing.assert_close(captured, features, atol=1e-4, rtol=1e-4)
            for slot in (0, T - 1):
                following, drafted = ids[0, 1 : slot + 2].tolist(), ids[0, slot + 2 : slot + 1 + STEPS].tolist()
                served, states = reader.draft(features[: slot + 1], following, drafted)
                for i in range(STEPS):
                    kept = drafter.vocab.kept_ids
                    assert_equal(served[i][kept], rows[i][slot])
                    assert served[i].isfinite().sum() == len(kept)
                    assert_equal(states[i], trained[i][slot])
    assert_decoded_as_trained(target, drafter, ids, trained)


def assert_decoded_as_trained(target: Target, drafter: Eagle3, ids: torch.Tensor, trained: list[torch.Tensor]) -> None:
    """The cached steps, for a chain of drafts behind T committed slots."""
    cache, taps = drafter.new_cache(1, 32), target.features(ids[:, :T]).taps_BTC
    with torch.no_grad():
        states = drafter.step(drafter.fuse(taps), target.embed(ids[:, 1 : T + 1]), cache)
        assert_equal(states[0], trained[0])
        cache.keep(torch.tensor([T]), [T])
        state = states[:, -1:]
        for i in range(1, STEPS):
            said = target.embed(ids[:, T + i : T + i + 1])
            state = drafter.step(state, said, cache, i - 1, torch.ones(1, 1, i, dtype=torch.bool))
            assert_equal(state[0, 0], trained[i][-1])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("flags", SETS, ids=flag_names)
def test_an_engine_serves_what_was_trained(
    tiny_target: Callable[..., Any], tmp_path: Path, flags: dict[str, bool], layout: str
) -> None:
    """Full and reduced vocabulary, default and custom taps, for every combination of flags that the layout can express;
    the others are refused."""
    allowed = not (flags["norm_before_residual"] or flags["qk_norm"]) or layout in ("vllm", "speculators")
    for kept, taps in itertools.product((KEPT, None), (None, [1, 3, 6], [1, 2, 4, 7])):
        target: Target = tiny_target("llama", taps=taps)
        drafter: Eagle3 = tiny_drafter(target, kept, **flags)
        assert (why_not(drafter.config, layout) == []) == allowed
        papers = {"fingerprint": target.fingerprint}
        save = partial(save_drafter, drafter, tmp_path / "d", papers, layout=layout, verifier=verifier(target))
        if not allowed:
            with pytest.raises(UserError, match=f"layout={layout} cannot express this drafter: .*SGLang"):
                save()
            assert list(tmp_path.iterdir()) == []
            continue
        save()
        assert_served_as_trained(target, drafter, tmp_path / "d", READERS[layout])


@pytest.mark.parametrize("flags", SETS, ids=flag_names)
def test_compiled_steps_equal_the_unroll_under_every_flag(
    tiny_target: Callable[..., Any], flags: dict[str, bool]
) -> None:
    """Heads of a size that the decoding kernels of a CPU take."""
    target: Target = tiny_target("llama", head_dim=16)
    drafter: Eagle3 = tiny_drafter(target, KEPT, **flags)
    drafter.pack()
    ids = torch.randint(2, 320, (1, T + STEPS + 1), generator=torch.Generator().manual_seed(6))
    row = Documents([T], target.device)
    features = target.features(ids[:, :T]).taps_BTC[0]
    with torch.no_grad():
        trained = list(drafter.unroll(features, target.embed(ids[0, 1:]), STEPS, row))
    assert_decoded_as_trained(target, drafter, ids, trained)


@pytest.mark.parametrize("flags", [{}, {"fc_norm": True, "norm_output": True}], ids=flag_names)
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_other_targets_are_served_as_trained(
    tiny_target: Callable[..., Any], tmp_path: Path, family: str, flags: dict[str, bool]
) -> None:
    target: Target = tiny_target(family)
    drafter: Eagle3 = tiny_drafter(target, KEPT, **flags)
    save_drafter(drafter, tmp_path / "d", {"fingerprint": target.fingerprint})
    assert_served_as_trained(target, drafter, tmp_path / "d", READERS["portable"])


@pytest.mark.parametrize("flag", ["norm_before_residual", "norm_output"])
def test_a_lost_flag_would_show(tiny_target: Callable[..., Any], tmp_path: Path, flag: str) -> None:
    """These two change no tensor, so nothing but the logits tells; the first step cannot tell norm_output."""
    target: Target = tiny_target("llama")
    save_drafter(tiny_drafter(target, KEPT, **{flag: True}), tmp_path / "d", {"fingerprint": "x"}, layout="vllm")
    taps, draw = torch.randn(T, 96, generator=torch.Generator().manual_seed(1)), list(range(3, 9))
    rows = []
    for on in (True, False):
        config = json.loads((tmp_path / "d" / "config.json").read_text())
        (tmp_path / "d" / "config.json").write_text(json.dumps(config | {flag: on}))
        rows.append(VllmReader(tmp_path / "d", target.embed_weight.detach()).draft(taps, draw, [9, 10])[0])
    apart = [float((one[KEPT] - other[KEPT]).abs().max()) for one, other in zip(*rows, strict=True)]
    assert (apart[0] < 1e-6) == (flag == "norm_output")
    assert min(apart[1:]) > 0.1


def test_without_flags_nothing_is_added_to_the_equations(tiny_target: Callable[..., Any]) -> None:
    """To the bit: states are the layer's outputs, logits those of norm and head, and fc reads the taps as they are."""
    target: Target = tiny_target("llama")
    drafter: Eagle3 = tiny_drafter(target, KEPT)
    draw = torch.Generator().manual_seed(0)
    taps, embed = torch.randn(T, 96, generator=draw), torch.randn(T, 32, generator=draw)
    layer, attention = drafter.midlayer, drafter.midlayer.self_attn
    with torch.no_grad():
        state = drafter.fuse(taps)
        assert torch.equal(state, drafter.fc(taps))
        ours = next(iter(drafter.unroll(taps, embed, 1, Documents([T], target.device))))
        seen: list[torch.Tensor] = []

        def keep(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            seen.extend((q, k, v))
            return torch.zeros(1, T, 32)

        layer(state.unsqueeze(0), embed.unsqueeze(0), drafter._rope_at(torch.arange(T).unsqueeze(0), state.dtype), keep)
        q, k, v = seen
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        h = state + attention.o_proj(mixed[0].transpose(0, 1).flatten(1))
        torch.testing.assert_close(ours, h + layer.mlp(layer.post_attention_layernorm(h)), atol=1e-5, rtol=1e-5)
        assert torch.equal(drafter.logits(ours), drafter.lm_head(drafter.norm(ours)))
    assert not [name for name in drafter.state_dict() if "q_norm" in name or name.startswith(("fc_norm", "input_norm"))]

"""Sampled drafts and their rules in the decoding loop: the law of what comes out, and what is refused."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from eval.decode import decode
from eval.engine import Clock, Engine, Engines
from eval.paths import draw_paths
from eval.plan import Entry, check_settings, describe, settings_of, settings_record
from eval.plan import plan as plan_of
from eval.proposing import Sampled, proposer
from eval.report import lossless_lines
from eval.rules import (
    BEST_OF_ONE,
    BEST_OF_SEVERAL,
    FAULTS,
    RULES,
    TABLE,
    faults,
    guard,
    refuse,
    rule_of,
    stack_paths,
    verify,
    words,
)
from eval.settings import Settings
from eval.trials import Trial
from eval.tune import candidates
from eval.verify import Drafts, Stops
from models.capture import Steps
from models.eagle3 import Eagle3
from models.sampling import law as sampling_law
from models.target import Target
from recipes.schema import VERIFIERS, EvalConfig, Recipe, UserError
from tests.eval.enumeration import all_drafts, enumerate_rule, random_table
from tests.eval.test_drafting import Scene
from tests.eval.test_lossless_decode import PROMPT, ROWS, VOCAB, chi_square, joint_law
from tests.tiny import tiny_drafter

SAMPLED = Settings("chain", 24, 1.0, depth=4, draft_temperature=0.8, draft_top_p=0.95)
OFFERED = [rule.name for rule in TABLE if not rule.text_alone]
CASES = [("match", 1), ("match", 3), *((name, k) for name in OFFERED for k in (1, 3) if k == 1 or RULES[name].several)]


def test_the_recipe_knows_every_rule() -> None:
    assert ("match", *RULES) == VERIFIERS


@pytest.fixture(scope="module")
def scene(tiny_target: Callable[..., Any]) -> Scene:
    return Scene(tiny_target("llama"), 3, [i for i in range(320) if i % 3])


@pytest.mark.parametrize("paths", [1, 4])
@pytest.mark.parametrize("fixed", [False, True])
def test_paths_come_with_the_laws_that_they_were_drawn_from(scene: Scene, paths: int, fixed: bool) -> None:
    """Zero outside the draft vocabulary, and the drafter's own after each prefix inside."""
    settings = Settings(
        "chain", depth=3, paths=paths, draft_temperature=0.7, verifier="block" if paths == 1 else "spectr"
    )
    drafting, source = scene.drafting([0, 1, 2]), torch.Generator().manual_seed(2)
    noise: list[Tensor] = []

    def uniforms(count: int) -> Tensor:
        noise.append(torch.rand(3, count, generator=source, dtype=torch.float64))
        return noise[-1]

    made = proposer(settings, scene.roots, fixed, drafting, 320, uniforms)
    found = made.propose(Steps(torch.device("cpu"), captures=False), Clock(torch.device("cpu")))
    drawn = found.drawn
    assert drawn is not None and drawn.laws.shape == (3, 1 + 2 * paths, 320)
    assert noise[0].shape == (3, 2 * 3 * paths + 2)
    assert torch.equal(torch.cat([drawn.coins.flatten(1), drawn.ends], 1), noise[0][:, 3 * paths :])
    outside = torch.ones(320, dtype=torch.bool)
    outside[scene.drafter.vocab.kept_ids] = False
    assert drawn.laws[..., outside].eq(0).all()
    drafts = Drafts(drawn.tokens, drawn.laws, drawn.laws[:, :1].expand(-1, 1 + 3 * paths, -1), drawn.coins)
    for row in range(3):
        for k in range(paths):
            said: tuple[int, ...] = ()
            for d in range(3):
                expected = (scene.log_law(row, said) / 0.7).softmax(-1)
                node = int(drafts.nodes[row, k, d])
                assert torch.allclose(drawn.laws[row, node, ~outside], expected, atol=1e-5)
                token = int(drawn.tokens[row, k, d])
                point, upto = noise[0][row, k * 3 + d], drawn.laws[row, node].double().cumsum(0)
                assert upto[token] >= point * upto[-1] >= (upto[token - 1] if token else 0), "the draw of this uniform"
                said = (*said, token)
    assert found.tree.valid.sum(1).tolist() == [1 + int(n) for n in drafts.own.sum((1, 2))]


def test_paths_that_begin_alike_draw_from_one_law(scene: Scene) -> None:
    """With equal uniforms K paths are one path."""
    drafting, laws = scene.drafting([0, 1]), torch.zeros(2, 1 + 2 * 3, 320)
    noise = torch.rand(2, 1, 3, dtype=torch.float64).expand(2, 3, 3)
    tokens = draw_paths(drafting, noise, 1.0, 0.9, laws)
    assert torch.equal(tokens, tokens[:, :1].expand(2, 3, 3))
    assert ((laws == 0).sum(2) > 320 // 3).all(), "top_p cuts the draft law"


@pytest.fixture(scope="module")
def small(tiny_target: Callable[..., Any]) -> tuple[Target, Eagle3]:
    """Eight tokens, of which the drafter knows seven."""
    target: Target = tiny_target(
        "llama", taps=[1, 2, 3], vocab_size=VOCAB, num_hidden_layers=4, hidden_size=16, intermediate_size=16,
        head_dim=4, initializer_range=0.25,
    )  # fmt: skip
    return target, tiny_drafter(target, [i for i in range(VOCAB) if i != 5], noise=0.1)


def joint_counts(small: tuple[Target, Eagle3], settings: Settings) -> Tensor:
    found = decode(*small, [PROMPT] * ROWS, settings)
    assert sum(row.accepted for row in found.rows) > ROWS // 10
    said = torch.tensor([[*row.tokens, 0, 0][:3] for row in found.rows])
    return torch.bincount(said @ torch.tensor([VOCAB * VOCAB, VOCAB, 1]), minlength=VOCAB**3)


@pytest.mark.parametrize(("name", "paths"), CASES)
def test_the_joint_law_of_three_tokens(small: tuple[Target, Eagle3], name: str, paths: int) -> None:
    """Chi-square at 1e-3 of a whole decoder, draft law and target law at temperatures of their own."""
    settings = Settings("chain", 4, 1.0, seed=31, depth=2, verifier=name, paths=paths, draft_temperature=1.3)
    p_value = chi_square(joint_counts(small, settings), ROWS * joint_law(small[0], 1.0).flatten())
    assert p_value > 1e-3 or name == "spectr_gbv"
    if name == "spectr_gbv" and paths > 1:
        assert p_value < 1e-3, "as released it is biased, enough to be seen here"


@pytest.fixture(scope="module")
def pair(tiny_target: Callable[..., Any]) -> tuple[Target, Eagle3]:
    target: Target = tiny_target("llama", initializer_range=0.1)
    return target, tiny_drafter(target, [i for i in range(320) if i % 5], noise=0.0)


PROMPTS = [[5, 9, 3, 7, 4], [30, 31, 32] * 3, [8, 2, 100]]


@pytest.mark.parametrize(("name", "paths"), CASES)
def test_neither_batch_nor_fixed_shapes_change_a_token(pair: tuple[Target, Eagle3], name: str, paths: int) -> None:
    settings, engines = replace(SAMPLED, verifier=name, paths=paths), Engines(fixed=True)
    free = decode(*pair, PROMPTS, settings)
    assert sum(row.accepted for row in free.rows) > 0 or name in ("match", "tree")
    for _ in range(2):
        assert decode(*pair, PROMPTS, settings, engines=engines).rows == free.rows
    assert decode(*pair, PROMPTS[1:2], settings, row_ids=[1]).rows[0].tokens == free.rows[1].tokens
    assert all(0 <= n <= 4 for row in free.rows for n in row.accepted_per_round)
    assert all(row.nodes <= 4 * paths * row.rounds for row in free.rows)


def test_a_greedy_target_says_the_same_whatever_is_sampled(pair: tuple[Target, Eagle3]) -> None:
    plain = decode(pair[0], None, PROMPTS, Settings("ar", 24))
    for name, paths in CASES:
        if name != "spectr_gbv":
            settings = replace(SAMPLED, temperature=0.0, verifier=name, paths=paths)
            assert [r.tokens for r in decode(*pair, PROMPTS, settings).rows] == [r.tokens for r in plain.rows], name


@pytest.mark.slow
def test_a_draft_of_the_targets_temperature_from_a_sharp_drafter_changes_nothing_at_bfloat16(
    pair: tuple[Target, Eagle3],
) -> None:
    """Temperatures from one end to the other: finite, in the books, and never a token that top_k excludes."""
    for heat, draft_heat in ((0.01, 2.0), (2.0, 0.01), (0.01, 0.01)):
        for name, paths in CASES:
            settings = replace(
                SAMPLED, temperature=heat, top_k=5, verifier=name, paths=paths, draft_temperature=draft_heat
            )
            for row in decode(*pair, PROMPTS, settings).rows:
                assert len(row.tokens) == 24 or row.tokens[-1] in pair[0].eos_ids


REFUSED = [
    (Settings("eagle", temperature=1.0, verifier="block"), "needs the law of every draft"),
    (Settings("lookup", temperature=1.0, verifier="token"), "needs the law of every draft"),
    (Settings("chain", temperature=1.0, verifier="block"), "greedy, so that there is none"),
    (Settings("prune", temperature=1.0, verifier="traversal"), "would bias the output"),
    (replace(SAMPLED, verifier="token", paths=2), "judges one path"),
    (replace(SAMPLED, verifier="greedy_block"), "nothing but the text"),
    (Settings("chain", paths=2), "eval.paths=2: greedy drafts are the same on every path. Give eval.draft_temperature"),
    (replace(SAMPLED, verifier="traversal", paths=0), "eval.paths=0: a rule judges K >= 1 paths"),
    (replace(SAMPLED, verifier="match", paths=0), "eval.paths=0: a rule judges K >= 1 paths"),
    (replace(SAMPLED, verifier="magic"), "no such rule"),
]


@pytest.mark.parametrize(("settings", "said"), REFUSED)
def test_what_does_not_go_together_is_refused_before_anything_is_decoded(
    pair: tuple[Target, Eagle3], settings: Settings, said: str
) -> None:
    with pytest.raises(UserError, match=said):
        rule_of(settings)
    with pytest.raises(UserError, match=said):
        decode(pair[0], pair[1] if settings.drafts else None, PROMPTS, settings)


@pytest.mark.parametrize(
    ("changes", "decoder", "said"),
    [
        ({"verifier": "block"}, "", "greedy, so that there is none"),
        ({"verifier": "block", "temperature": 1.0}, "graft", "would bias the output"),
        ({"verifier": "block", "temperature": 1.0, "decoders": ["ar", "eagle"]}, "", "needs the law"),
        ({"paths": 3}, "", "the same on every path"),
        ({"verifier": "token", "temperature": 1.0, "paths": 3}, "", "judges one path"),
    ],
)
def test_recipes_are_refused_without_weights(changes: dict[str, Any], decoder: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_settings(Recipe(recipe="smollm2", decoder=decoder, eval=EvalConfig(**changes)))


def test_the_default_samples_above_temperature_0_and_the_table_says_so() -> None:
    greedy = settings_of("chain", EvalConfig())
    assert (greedy.verifier, greedy.samples, describe(greedy)) == ("match", False, "7 drafts in a row")
    warm = settings_of("chain", EvalConfig(temperature=0.6))
    assert warm.samples and warm.draft_temperature == 0.6 and RULES[warm.verifier].lossless
    many = settings_of("chain", EvalConfig(temperature=0.6, paths=3, draft_temperature=0.9))
    assert many.paths == 3 and many.draft_temperature == 0.9 and RULES[many.verifier].several
    assert settings_of("chain", EvalConfig(temperature=0.6, verifier="match")).samples is False
    assert settings_of("eagle", EvalConfig(temperature=0.6, paths=3)).paths == 1
    assert "lossless" in words(warm) and "0.6" in words(warm)
    assert "NOT lossless" in words(replace(SAMPLED, verifier="spectr_gbv"))
    for name in ("match", *OFFERED):  # the verdict and every table name a draft by this
        assert describe(replace(SAMPLED, verifier=name)).endswith("not lossless") == (name == "spectr_gbv")
    recipe = Recipe(
        recipe="smollm2", eval=EvalConfig(temperature=1.0, verifier="token", decoders=["ar", "chain", "eagle"])
    )
    entries = plan_of(recipe)
    assert [entry.settings.verifier for entry in entries] == ["match", "token", "match"]
    record = settings_record(entries[1], 1)
    assert record["verifier"] == "token" and record["paths"] == 1 and record["draft_temperature"] == 1.0
    assert "token" in record["verification"]


def test_laws_that_are_no_laws_are_refused_by_row_in_the_loop(
    pair: tuple[Target, Eagle3], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = Target.logits, []

    def broken(self: Target, final: Tensor) -> Tensor:
        logits = real(self, final)
        calls.append(logits.shape)
        if logits.dim() == 3:  # a verification
            logits[1, -1, 3] = float("nan")
        return logits

    monkeypatch.setattr(Target, "logits", broken)
    with pytest.raises(UserError, match=r"row 1: a law of the target holds NaN.*try eval.dtype=float32"):
        decode(*pair, PROMPTS, replace(SAMPLED, verifier="block"))


def drafts_of(B: int = 3, K: int = 2, L: int = 2, V: int = 5) -> Drafts:
    source = torch.Generator().manual_seed(4)
    laws = torch.rand(B, 1 + K * L, V, generator=source, dtype=torch.float64) + 0.1
    laws = laws / laws.sum(2, keepdim=True)
    tokens = torch.tensor([[[0, 1], [0, 2]]] * B)
    return Drafts(tokens, laws[:, : 1 + K * (L - 1)].clone(), laws.clone(), torch.rand(B, K, L, generator=source))


def break_at(which: str, value: float, node: int, token: int) -> Drafts:
    drafts = drafts_of()
    getattr(drafts, which)[1, node, token] = value
    return drafts


@pytest.mark.parametrize(
    ("which", "value", "node", "token", "fault"),
    [
        ("target", float("nan"), 3, 1, 0),
        ("target", -0.1, 0, 1, 0),
        ("target", 0.9, 4, 2, 1),
        ("draft", float("inf"), 0, 3, 2),
        ("draft", 0.7, 1, 4, 3),
        ("draft", 0.0, 1, 1, 4),
    ],
)
def test_every_fault_is_told_by_name_and_row(which: str, value: float, node: int, token: int, fault: int) -> None:
    assert not faults(drafts_of()).any()
    found = faults(break_at(which, value, node, token))
    assert found[1, fault] and not found[0].any() and not found[2].any()
    with pytest.raises(UserError, match=f"row 1: .*{FAULTS[fault].split('(')[0].strip()}"):
        refuse(found.tolist())


def test_places_that_no_path_uses_may_hold_anything() -> None:
    """Both paths begin with token 0: the second one's first node is the first one's."""
    assert not faults(break_at("target", float("nan"), 2, 0)).any()
    assert not faults(break_at("draft", float("nan"), 2, 0)).any()


def test_laws_from_single_precision_pass() -> None:
    logits = 5 * torch.randn(1, 9, 50_000, generator=torch.Generator().manual_seed(0))
    laws = sampling_law(logits, 0.7, top_p=0.9)
    tokens = laws[:, :1].argmax(2, keepdim=True).expand(1, 4, 2)
    drafts = Drafts(tokens.clone(), laws[:, :1].expand(1, 5, -1), laws, torch.rand(1, 4, 2))
    assert not faults(drafts).any()


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([[[1, 2], [1]]], "row 0: its paths have unequal lengths, 2, 1"),
        ([[[1, 2]], []], "row 1: no drafted path"),
        ([[[]]], "row 0: no drafted path, or an empty one"),
        ([[[1, 2]], [[1, 2], [3, 4]]], "rows differ"),
    ],
)
def test_paths_of_the_wrong_number_or_length_are_refused(rows: list[list[list[int]]], said: str) -> None:
    with pytest.raises(UserError, match=said):
        stack_paths(rows)


def test_drafts_of_the_wrong_shape_are_refused_by_the_rules_name() -> None:
    d, uniforms = drafts_of(), torch.rand(3, 2, dtype=torch.float64)
    none = torch.zeros(3, 0, 5, dtype=torch.float64)
    cases = [
        (RULES["block"], d, "block judges one path, and 2"),
        (RULES["traversal"], replace(d, draft=none), "needs the law of every draft"),
        (RULES["spectr"], replace(d, target=d.target[:, :4]), "target laws have the shape"),
        (RULES["spectr"], replace(d, draft=d.draft[..., :4]), "draft laws have the shape"),
        (RULES["tree"], Drafts(d.tokens[:, :0], d.draft, d.target, d.coins[:, :0]), "K >= 1 paths of L >= 1"),
    ]
    for rule, drafts, said in cases:
        with pytest.raises(UserError, match=said):
            verify(rule, drafts, uniforms)
    verify(RULES["tree"], replace(d, draft=none), uniforms)  # which asks for no laws


def cut_when_unsure(rule: str, unsure: int) -> Callable[[Drafts], Stops]:
    """Verification of one draft that is skipped when the token is one that the drafter says without confidence."""

    def stops(drafts: Drafts) -> Stops:
        judged = RULES[rule].stops(drafts)
        cut = drafts.tokens[:, 0, 0] == unsure
        law = torch.where(cut.unsqueeze(1), torch.tensor([1.0, 0.0], dtype=torch.float64), judged.law)

        def after(node_B: Tensor) -> Tensor:
            return torch.where((cut & (node_B == 0)).unsqueeze(1), drafts.target[:, 0], judged.after(node_B))

        return Stops(law, after)

    return stops


def test_a_cut_that_looks_at_the_sampled_token_biases_and_is_refused_at_construction(
    pair: tuple[Target, Eagle3], monkeypatch: pytest.MonkeyPatch
) -> None:
    """DSpark's example: a target of 0.7 / 0.3 comes out as 0.85 / 0.15. The tree rule does not mind."""
    table = random_table(1, 2, vocab=2)
    target, draft = table.clone(), table.clone()
    target[0], draft[0] = torch.tensor([[0.7, 0.3], [0.5, 0.5]], dtype=torch.float64)
    case = all_drafts(draft, target, 1, 1)
    assert enumerate_rule(cut_when_unsure("token", 1), case).distance == pytest.approx(0.15, abs=1e-12)
    assert enumerate_rule(cut_when_unsure("tree", 1), case).distance < 1e-12
    monkeypatch.setattr(Sampled, "peeks", True)
    settings = replace(SAMPLED, verifier="block")
    with pytest.raises(UserError, match="said less often than the target says it"):
        decode(*pair, PROMPTS, settings)
    guard(rule_of(replace(SAMPLED, verifier="tree")), True)
    decode(*pair, PROMPTS, replace(SAMPLED, verifier="match"))


def test_a_rule_waits_for_nothing_on_the_host(pair: tuple[Target, Eagle3], monkeypatch: pytest.MonkeyPatch) -> None:
    """The captured steps call nothing that reads a value."""
    engine_round = Engine.round

    def no_reading(*_: Any) -> Any:
        raise AssertionError("a value was read on the host")

    def guarded(self: Engine, *args: Any) -> Any:
        real = self._accept

        def accept(*inner: Any) -> Any:
            with monkeypatch.context() as patch:
                for method in ("item", "tolist", "__bool__", "__int__", "__float__", "nonzero"):
                    patch.setattr(Tensor, method, no_reading)
                return real(*inner)

        monkeypatch.setattr(self, "_accept", accept, raising=False)
        return engine_round(self, *args)

    monkeypatch.setattr(Engine, "round", guarded)
    for name, paths in CASES:
        settings = replace(SAMPLED, max_new_tokens=4, verifier=name, paths=paths)
        decode(*pair, PROMPTS, settings, engines=Engines(fixed=True))


def test_the_tuner_tries_rules_above_temperature_0_where_the_recipe_leaves_it_free() -> None:
    def tried(**changes: Any) -> set[tuple[str, int, float]]:
        found = candidates(Recipe(recipe="smollm2", eval=EvalConfig(decoders=["chain"], **changes)), "cuda")
        for settings in found:
            rule_of(settings)
        return {(s.verifier, s.paths, s.draft_temperature) for s in found if s.decoder == "chain"}

    assert tried() == {("match", 1, 0.0)}
    assert tried(temperature=0.7) == {
        ("match", 1, 0.0),
        (BEST_OF_ONE, 1, 0.7),
        (BEST_OF_SEVERAL, 2, 0.7),
        (BEST_OF_SEVERAL, 4, 0.7),
    }
    assert tried(temperature=0.7, verifier="token") == {("token", 1, 0.7)}
    assert tried(temperature=0.7, paths=3) == {(BEST_OF_SEVERAL, 3, 0.7)}


def test_a_tuned_rule_is_the_one_that_is_run() -> None:
    best = Trial(replace(SAMPLED, verifier="traversal", paths=4)).record()
    recipe = Recipe(recipe="smollm2", eval=EvalConfig(decoders=["ar", "chain"], temperature=1.0))
    chain = plan_of(recipe, {"best": {"chain": best}})[1].settings
    assert (chain.verifier, chain.paths, chain.draft_temperature, chain.draft_top_p) == ("traversal", 4, 0.8, 0.95)
    assert chain.depth == 4


@pytest.mark.parametrize(("verifier", "said"), [("block", "verifier block: lossless"), ("spectr_gbv", "NOT lossless")])
def test_the_report_names_the_policy_and_the_rule_of_every_decoder(verifier: str, said: str) -> None:
    settings = {"ar": Settings("ar", temperature=1.0), "chain": replace(SAMPLED, verifier=verifier)}
    settings["eagle"] = Settings("eagle", temperature=1.0)
    tables = [
        {"decoder": name, "checks": {"dtype": "float32"}, "settings": settings_record(Entry(name, s), 1)}
        for name, s in settings.items()
    ]
    lines = lossless_lines(tables)
    assert any(
        line.startswith("chain: 1 path sampled at temperature 0.8, top_p 0.95") and said in line for line in lines
    )
    assert any(line.startswith("eagle: ") and "sample-and-match" in line for line in lines)

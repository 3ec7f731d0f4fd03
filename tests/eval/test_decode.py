"""The decoding loop: its books, where it ends, and how much it verifies a round."""

import gc
import itertools
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from eval.decode import Decoded, RowResult, decode
from eval.engine import Engines, remember
from eval.matrix import SuccessorMatrix
from eval.settings import Settings
from eval.tree import DRAFTER, RETRIEVAL, DraftTree
from models.capture import Steps
from models.eagle3 import Eagle3
from models.target import Target, load_target
from recipes.schema import DECODERS, TargetConfig
from tests.tiny import tiny_drafter

NEW = 24
LENGTHS = (5, 9, 3)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    source = torch.Generator().manual_seed(1)
    return [torch.randint(2, 320, (n,), generator=source).tolist() for n in LENGTHS]


def run(target: Target, drafter: Eagle3, prompts: list[list[int]], settings: Settings) -> Decoded:
    matrix = SuccessorMatrix(target.vocab_size) if settings.remembers else None
    return decode(target, drafter if settings.drafts else None, prompts, settings, matrix)


SETTINGS = [
    Settings("ar", NEW),
    Settings("chain", NEW, depth=4),
    Settings("eagle", NEW, depth=4, branch=4, nodes=12),
    Settings("graft", NEW, depth=4, branch=4, nodes=20, gates=(0.3, 0.1, 0.5)),
    Settings("graft", NEW, gates=(0.02, 0.001, 0.5)),
    Settings("graft", NEW, temperature=1.0, gates=(0.02, 0.001, 0.5)),
    Settings("splice", NEW, depth=4, branch=4, nodes=20, gates=(0.3, 0.1, 0.5)),
    Settings("splice", NEW, temperature=1.0, gates=(0.02, 0.001, 0.5)),
    Settings("prune", NEW, depth=4, branch=4, nodes=20, gates=(0.3, 0.1, 0.5)),
    Settings("prune", NEW, depth=2, branch=4, nodes=12, gates=(0.02, 0.2, 0.5)),
    Settings("recycle", NEW, nodes=20),
    Settings("lookup", NEW, depth=10),
    Settings("suffix", NEW, depth=40),
    Settings("suffix", NEW, temperature=1.0, depth=12),
    Settings("talon", NEW, depth=16),
    Settings("talon", NEW, depth=5, branch=3, nodes=20),
]
GREEDY = [settings for settings in SETTINGS if settings.temperature == 0]
COPYING = ("recycle", "lookup", "suffix", "graft", "splice")  # what they accept may come from elsewhere than a drafter


def name(settings: Settings) -> str:
    return f"{settings.decoder}-{settings.nodes}-{settings.depth}-T{settings.temperature:g}"


def check_books(row: RowResult, decoder: str, depth: int, limit: int) -> None:
    assert len(row.tokens) == 1 + row.emitted <= limit
    assert row.rounds == len(row.accepted_per_round) == len(row.drafted_depth_per_round)
    assert row.accepted == sum(row.accepted_per_round) == sum(row.positions_accepted) == sum(row.sources.values())
    # every round but a cut last one emits its accepted drafts and the bonus
    assert row.emitted in (row.accepted + row.rounds, row.accepted + row.rounds - 1)
    assert all(
        0 <= kept <= drafted for kept, drafted in zip(row.accepted_per_round, row.drafted_depth_per_round, strict=True)
    )
    assert row.positions_accepted == [
        sum(kept > j for kept in row.accepted_per_round) for j in range(len(row.positions_accepted))
    ]
    assert row.positions_offered == sorted(row.positions_offered, reverse=True)
    assert all(a <= o <= row.rounds for a, o in zip(row.positions_accepted, row.positions_offered, strict=True))
    assert row.done
    assert len(row.origins) == len(row.tokens) and row.origins[0] == "bonus"
    assert {name: row.origins.count(name) for name in row.sources} == row.sources
    assert sum(row.stages.values()) == row.rounds
    if decoder not in ("prune", "graft", "splice"):
        assert row.stages["none"] == row.rounds
    assert max(row.drafted_depth_per_round) <= {"recycle": 9, "graft": 9, "splice": 20}.get(decoder, depth)
    if decoder not in COPYING:
        assert row.sources["retrieval"] == 0
    elif decoder not in ("graft", "splice"):
        assert row.sources["drafter"] == 0


@pytest.mark.parametrize("settings", SETTINGS, ids=name)
def test_the_books_agree_with_the_tokens(
    target: Target, drafter: Eagle3, prompts: list[list[int]], settings: Settings
) -> None:
    found = run(target, drafter, prompts, settings)
    for row in found.rows:
        check_books(row, settings.decoder, settings.depth, NEW)
    assert found.rounds_total == max(row.rounds for row in found.rows)
    assert set(found.seconds) == {"prefill", "draft", "retrieve", "verify", "accept", "cache"}
    assert abs(sum(found.seconds.values()) - found.seconds["prefill"] - found.decode_seconds) < 0.2
    if settings.decoder == "ar":
        assert all(row.rounds == row.emitted and row.accepted == 0 for row in found.rows)
        assert all(row.positions_offered == [] and row.nodes == 0 for row in found.rows)


def test_drafts_are_accepted_and_retrieval_brings_some(
    target: Target, drafter: Eagle3, prompts: list[list[int]]
) -> None:
    """Without this the other tests would pass with a decoder that never accepts."""
    graft = run(target, drafter, prompts, SETTINGS[4])
    assert sum(row.sources["retrieval"] for row in graft.rows) > 0
    drafting = run(target, tiny_drafter(target, noise=0.0), [prompts[0] * 3], replace(SETTINGS[2], max_new_tokens=60))
    assert sum(row.sources["drafter"] for row in drafting.rows) > 0


@pytest.mark.parametrize("settings", [s for s in GREEDY if s.decoder != "ar"], ids=name)
def test_every_decoder_accepts_some_drafts(target: Target, prompts: list[list[int]], settings: Settings) -> None:
    """Of a text that repeats itself, and from a drafter that was started from the target."""
    drafter = tiny_drafter(target, noise=0.0)
    found = run(target, drafter, [prompts[0] * 3], replace(settings, max_new_tokens=60))
    assert found.rows[0].accepted > 0


@pytest.mark.parametrize("settings", SETTINGS, ids=name)
def test_fixed_shapes_change_nothing(
    target: Target, drafter: Eagle3, prompts: list[list[int]], settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU runs, on this device: buckets for spans, whole paths committed, trees of one size; engines kept."""
    stop = run(target, drafter, prompts, replace(settings, decoder="ar")).rows[0].tokens[17]
    monkeypatch.setattr(target, "eos_ids", frozenset({stop}))
    engines = Engines(fixed=True)
    matrices = [SuccessorMatrix(target.vocab_size) for _ in range(2)]
    for batch in (prompts, prompts[::-1], [prompts[1] * 20], prompts):  # the third needs larger caches
        free = decode(target, drafter, batch, settings, matrices[0])
        fixed = decode(target, drafter, batch, settings, matrices[1], engines=engines)
        assert fixed.rows == free.rows
        assert torch.equal(matrices[0].rows, matrices[1].rows)


@pytest.mark.parametrize("settings", GREEDY, ids=name)
def test_an_end_token_cuts_the_path_and_the_books(
    target: Target, drafter: Eagle3, prompts: list[list[int]], settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(target, drafter, prompts, replace(settings, decoder="ar"))
    stop = whole.rows[0].tokens[10]
    monkeypatch.setattr(target, "eos_ids", frozenset({stop}))
    found = run(target, drafter, prompts, settings)
    for row, full in zip(found.rows, whole.rows, strict=True):
        expected = full.tokens[: full.tokens.index(stop) + 1] if stop in full.tokens else full.tokens
        assert row.tokens == expected
        if len(row.tokens) > 1:
            check_books(row, settings.decoder, settings.depth, NEW)


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
@pytest.mark.parametrize("settings", GREEDY, ids=name)
def test_max_new_tokens_is_a_limit_and_is_reached(
    target: Target, drafter: Eagle3, prompts: list[list[int]], settings: Settings, limit: int
) -> None:
    found = run(target, drafter, prompts, replace(settings, max_new_tokens=limit))
    assert [len(row.tokens) for row in found.rows] == [limit] * 3
    assert all(row.rounds == 0 for row in found.rows) == (limit == 1)


def test_what_an_end_token_hid_is_not_offered(
    target: Target, drafter: Eagle3, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft behind the end token was neither accepted nor rejected, so no position counts it."""
    for position in range(2, 12):
        stop = run(target, drafter, prompts[:1], SETTINGS[0]).rows[0].tokens[position]
        with monkeypatch.context() as patch:
            patch.setattr(target, "eos_ids", frozenset({stop}))
            row = run(target, drafter, prompts[:1], SETTINGS[4]).rows[0]
        last = row.accepted_per_round[-1] if row.rounds else 0
        if row.emitted == row.accepted + row.rounds - 1:
            earlier = zip(row.accepted_per_round[:-1], row.drafted_depth_per_round[:-1], strict=True)
            offered = sum(drafted for _, drafted in earlier) + last
            assert sum(row.positions_offered) == offered


@pytest.mark.parametrize("nodes", [1, 2, 7, 23, 60])
@pytest.mark.parametrize("gates", [(1.0, 1.0, 1.0), (0.0, 1.0, 1.0), (0.02, 0.001, 0.5), (0.0, 0.0, 0.0)])
@pytest.mark.parametrize("decoder", ["eagle", "graft", "prune", "talon", "recycle"])
def test_no_round_verifies_more_than_the_budget(
    target: Target,
    drafter: Eagle3,
    prompts: list[list[int]],
    decoder: str,
    gates: tuple[float, ...],
    nodes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    widths: list[int] = []
    real = Target.forward

    def forward(self: Target, ids_BT: Tensor, *rest: Any, **options: Any) -> Any:
        widths.append(ids_BT.shape[1])
        return real(self, ids_BT, *rest, **options)

    monkeypatch.setattr(Target, "forward", forward)
    found = run(target, drafter, prompts, Settings(decoder, 6, nodes=nodes, gates=gates))
    assert max(widths[1:]) <= nodes + 1  # the first is prefill
    assert all(row.nodes <= nodes * row.rounds for row in found.rows)
    if decoder == "eagle":
        assert all(row.nodes == nodes * row.rounds for row in found.rows)


def test_gates_deeper_than_the_tree_are_dropped(target: Target, drafter: Eagle3, prompts: list[list[int]]) -> None:
    found = run(target, drafter, prompts, Settings("graft", 8, depth=2, branch=4, nodes=12, gates=(0.0, 0.0, 1.0)))
    assert all(row.stages["none"] == row.rounds for row in found.rows)


@pytest.mark.parametrize("settings", [*SETTINGS, Settings("chain", NEW, 1.0, depth=3, draft_temperature=1.0)], ids=name)
def test_an_engine_goes_without_a_collection(
    tiny_target: Callable[..., Any], prompts: list[list[int]], settings: Settings
) -> None:
    """Its caches are most of a GPU's memory, and while decoders are timed nothing is collected."""
    target = tiny_target("llama")
    engines, drafter = Engines(), tiny_drafter(target) if settings.drafts else None
    gc.disable()
    try:
        decode(target, drafter, prompts, settings, engines=engines)
        engine = weakref.ref(engines.get(target, drafter, settings, len(prompts), max(map(len, prompts))))
        assert engine() is not None
        del engines
        assert engine() is None
    finally:
        gc.enable()


def test_a_carried_matrix_is_read_and_updated(tiny_target: Callable[..., Any], prompts: list[list[int]]) -> None:
    """One that knows the text is right nine tokens deep, the depth of the templates, in the first round."""
    target: Target = tiny_target("llama")
    drafter: Eagle3 = tiny_drafter(target)
    plain = decode(target, None, prompts[1:2], Settings("ar", NEW)).rows[0].tokens
    matrix, settings = SuccessorMatrix(target.vocab_size), Settings("graft", NEW, gates=(1.0, 1.0, 1.0))
    said = torch.tensor(plain[:10])
    matrix.update(said[:-1], torch.cat([said[1:, None], torch.arange(7).expand(9, 7)], 1))
    row = decode(target, drafter, prompts[1:2], settings, matrix).rows[0]
    assert row.tokens == plain and row.accepted_per_round[0] == 9 and row.sources["retrieval"] >= 8
    assert all(int(matrix.rows[token, 0]) >= 0 for token in prompts[1] + plain[:-1])


def test_prefill_fills_the_matrix_with_the_targets_best(target: Target, drafter: Eagle3) -> None:
    matrix, prompt = SuccessorMatrix(target.vocab_size), [5, 9, 5, 30]
    decode(target, drafter, [prompt], Settings("graft", 1), matrix)
    best = target.logits(target.features(torch.tensor([prompt])).final_BTH[0]).topk(8, -1).indices
    assert torch.equal(matrix.rows[5], best[2])  # the later of two
    assert torch.equal(matrix.rows[9], best[1]) and torch.equal(matrix.rows[30], best[3]) and matrix.filled == 3


def test_of_nodes_with_one_token_the_accepted_path_teaches_the_matrix_then_the_higher_score() -> None:
    """The accepted node of token 3 is a retrieved one, and so scores far below the draft that says the same."""
    tokens, parents = torch.tensor([[9, 3, 5, 3, 5, 3]]), torch.tensor([[0, 0, 0, 2, 0, 4]])
    scores = torch.tensor([[0.0, -1e9, -2.0, -2.5, -1.0, -1.1]])
    source = torch.tensor([[DRAFTER, RETRIEVAL, DRAFTER, DRAFTER, DRAFTER, DRAFTER]])
    valid = torch.tensor([[True] * 6])
    logits = torch.randn(1, 6, 20, generator=torch.Generator().manual_seed(0))
    best = logits.topk(8, -1).indices[0]
    for path, node_of_3 in (([0, 1], 1), ([0, 0], 5)):
        matrix, tree = SuccessorMatrix(20), DraftTree(tokens, parents, scores, source, valid, 2)
        remember(matrix, tree, torch.tensor([path]), logits, torch.tensor([True]))
        assert torch.equal(matrix.rows[3], best[node_of_3])
        assert torch.equal(matrix.rows[5], best[4]) and torch.equal(matrix.rows[9], best[0])
        matrix = SuccessorMatrix(20)
        remember(matrix, tree, torch.tensor([path]), logits, torch.tensor([False]))
        assert matrix.filled == 0, "a finished row teaches nothing"


@pytest.mark.parametrize("settings", SETTINGS, ids=name)
def test_bfloat16_decodes_and_keeps_its_books(target: Target, prompts: list[list[int]], settings: Settings) -> None:
    half = load_target(TargetConfig(path=str(target.folder)), dtype=torch.bfloat16)
    found = run(half, tiny_drafter(half, noise=0.0).to(torch.bfloat16), prompts, settings)
    for row in found.rows:
        check_books(row, settings.decoder, settings.depth, NEW)


def test_decoder_names() -> None:
    assert {settings.decoder for settings in SETTINGS} == set(DECODERS) - {"flex"}  # tests/eval/test_flex.py
    assert len({name(s) for s in SETTINGS}) == len(SETTINGS)


def test_a_watcher_sees_the_answer_grow_round_by_round(
    target: Target, drafter: Eagle3, prompts: list[list[int]]
) -> None:
    seen: list[list[int]] = []
    settings = Settings("eagle", NEW, depth=4, branch=4, nodes=12)
    decoded = decode(target, drafter, prompts[:1], settings, watch=lambda rows: seen.append(list(rows[0].tokens)))
    row = decoded.rows[0]
    assert len(seen) == 1 + row.rounds  # after prefill, and once a round
    assert [len(now) - len(before) for before, now in itertools.pairwise(seen)] == [
        kept + 1 for kept in row.accepted_per_round[:-1]
    ] + [row.emitted - sum(kept + 1 for kept in row.accepted_per_round[:-1])]
    assert seen[-1] == row.tokens


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("settings", SETTINGS, ids=name)
def test_prompts_that_wait_take_the_places_of_those_that_ended(
    target: Target, drafter: Eagle3, settings: Settings, fixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine ragged prompts, some of which end early and one at once: each is answered as it is alone."""
    source = torch.Generator().manual_seed(3)
    prompts = [torch.randint(2, 320, (n,), generator=source).tolist() for n in (5, 9, 3, 21, 1, 8, 2, 13, 4)]
    helper, engines, ids = drafter if settings.drafts else None, Engines(fixed=fixed), [*range(7, 16)]
    plain = replace(settings, decoder="ar")
    monkeypatch.setattr(target, "eos_ids", frozenset[int]())
    whole = [decode(target, None, [p], plain, row_ids=[i]).rows[0].tokens for p, i in zip(prompts, ids, strict=True)]
    ends = frozenset({whole[0][9], whole[1][4], whole[4][0], whole[5][15]})
    monkeypatch.setattr(target, "eos_ids", ends)
    alone = [tokens[: 1 + next((k for k, t in enumerate(tokens) if t in ends), NEW)] for tokens in whole]
    assert len({len(tokens) for tokens in alone}) > 3
    for slots in (3,) if fixed else (1, 4):
        found = decode(target, helper, prompts, settings, row_ids=ids, slots=slots, engines=engines)
        assert [row.tokens for row in found.rows] == alone
        rounds = [row.rounds for row in found.rows]
        assert max(rounds) <= found.rounds_total <= sum(rounds)
        assert slots > 1 or found.rounds_total == sum(rounds)
        for row in found.rows:
            if row.rounds:
                check_books(row, settings.decoder, settings.depth, NEW)


@pytest.mark.parametrize(("verifier", "paths"), [("block", 1), ("promoted", 3)])
def test_sampled_drafts_do_not_depend_on_who_was_there_before(
    target: Target, drafter: Eagle3, prompts: list[list[int]], verifier: str, paths: int
) -> None:
    settings = Settings("chain", NEW, 1.0, depth=3, verifier=verifier, paths=paths, draft_temperature=1.0)
    alone = [decode(target, drafter, [p], settings, row_ids=[i]).rows[0].tokens for i, p in enumerate(prompts)]
    found = decode(target, drafter, prompts, settings, slots=1)
    assert [row.tokens for row in found.rows] == alone
    assert [row.tokens for row in decode(target, drafter, prompts, settings, slots=2).rows] == alone


@pytest.mark.parametrize("decoder", ["graft", "splice", "recycle"])
def test_whatever_reads_the_matrix_waits_for_what_teaches_it_beside(
    target: Target, drafter: Eagle3, prompts: list[list[int]], decoder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taught as late as a second stream may be, when somebody joins it, the matrix holds what it holds taught at once:
    nothing has read it or written to what teaches it before. Two places for three prompts: rows end, and are taken."""
    prompts = [*prompts[:2], [*range(2, 100)]]
    settings = Settings(decoder, NEW, nodes=20, gates=(0.02, 0.001, 0.5))

    def found() -> tuple[list[RowResult], Tensor]:
        matrix = SuccessorMatrix(target.vocab_size)
        helper = drafter if settings.drafts else None
        decoded = decode(target, helper, prompts, settings, matrix, engines=Engines(fixed=True), slots=2)
        return decoded.rows, matrix.rows

    at_once, waiting = found(), list[Callable[[], object]]()

    def beside(self: Steps, key: object, step: Callable[[], object]) -> None:
        assert not waiting
        waiting.append(step)

    def join(self: Steps) -> None:
        while waiting:
            waiting.pop()()

    monkeypatch.setattr(Steps, "beside", beside)
    monkeypatch.setattr(Steps, "join", join)
    late = found()
    assert late[0] == at_once[0] and torch.equal(late[1], at_once[1])
    assert not waiting, "save waits too"

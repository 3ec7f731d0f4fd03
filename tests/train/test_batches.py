import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.supervision import supervised
from recipes.loading import load
from recipes.schema import TrainConfig, UserError
from tests.train import tiny_run
from train.batches import Cursor, Schedule, Step, deal, load_batch, pack, plan_epoch

CFG = TrainConfig(batch_tokens=400, micro_batch_tokens=200, epochs=3)
LENGTHS = np.random.default_rng(0).integers(5, 120, size=300)


def rows_of(step: Step) -> list[int]:
    return [row for one in step for row in one]


def test_an_epoch_holds_every_row_once_and_is_a_function_of_seed_and_epoch() -> None:
    steps = plan_epoch(LENGTHS, CFG, seed=1, epoch=0)
    assert sorted(r for step in steps for r in rows_of(step)) == list(range(300))
    assert steps == plan_epoch(LENGTHS, CFG, seed=1, epoch=0)
    assert steps != plan_epoch(LENGTHS, CFG, seed=1, epoch=1)
    assert steps != plan_epoch(LENGTHS, CFG, seed=2, epoch=0)


def test_steps_are_near_batch_tokens_and_the_last_is_no_stub() -> None:
    sizes = [int(LENGTHS[rows_of(step)].sum()) for step in plan_epoch(LENGTHS, CFG, seed=0, epoch=0)]
    assert all(350 <= size <= 400 for size in sizes[:-1])
    assert 200 <= sizes[-1] <= 600


def test_steps_are_shuffled_and_their_micro_batches_full() -> None:
    steps = plan_epoch(LENGTHS, CFG, seed=0, epoch=0)
    means = [LENGTHS[rows_of(step)].mean() for step in steps]
    assert means != sorted(means) and means != sorted(means, reverse=True)
    figures = Schedule(LENGTHS, CFG, seed=0).usage(ranks=1).figures
    assert figures["filled"] > 0.98 and figures["padding"] == 0


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=40), limit=st.integers(1, 50))
def test_packing_keeps_to_the_budget_and_wastes_no_pack(lengths: list[int], limit: int) -> None:
    sizes = np.array(lengths)
    packs = pack(list(range(len(lengths))), sizes, limit)
    assert sorted(rows_of(packs)) == list(range(len(lengths)))
    loads = [int(sizes[one].sum()) for one in packs]
    assert all(load <= limit or len(one) == 1 for load, one in zip(loads, packs, strict=True))
    fitting = sorted(load for load in loads if load <= limit)
    assert len(fitting) < 2 or fitting[0] + fitting[1] > limit, "two packs that fit into one"


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 250), min_size=1, max_size=60),
    ranks=st.integers(1, 5),
    seed=st.integers(0, 9),
)
def test_ranks_share_the_same_step_without_overlap(lengths: list[int], ranks: int, seed: int) -> None:
    sizes = np.array(lengths)
    for step in plan_epoch(sizes, CFG, seed, epoch=0):
        shares = deal(step, sizes, CFG.micro_batch_tokens, ranks)
        assert len(shares) == ranks and len({len(share) for share in shares}) == 1
        assert sorted(r for share in shares for r in rows_of(share)) == sorted(rows_of(step))
        for one in (p for share in shares for p in share if len(p) > 1):
            assert sizes[one].sum() <= CFG.micro_batch_tokens


def test_one_rank_runs_the_packs_as_planned_and_several_have_about_as_much_to_do() -> None:
    for step in plan_epoch(LENGTHS, CFG, seed=0, epoch=0):
        (alone,) = deal(step, LENGTHS, CFG.micro_batch_tokens, 1)
        assert sorted(alone) == sorted(step)
        loads = [int(LENGTHS[rows_of(share)].sum()) for share in deal(step, LENGTHS, CFG.micro_batch_tokens, 3)]
        assert max(loads) - min(loads) <= 120


def test_a_rank_without_a_row_is_counted_as_padding() -> None:
    lengths = np.array([150, 150, 150])
    usage = Schedule(lengths, CFG, seed=0).usage(ranks=2)
    assert (usage.tokens, usage.idle) == (450, 2)
    assert usage.figures["padding"] == pytest.approx(2 / 452, abs=1e-5)


def test_the_default_recipe_pads_less_than_two_percent() -> None:
    """Rows as its prepared data have them: a question of 10 to 100 tokens, an answer of up to 128, most of them cut."""
    rng = np.random.default_rng(0)
    recipe = load(["recipe=smollm2"])
    lengths = rng.integers(30, 130, size=336) + np.minimum(recipe.data.answer_tokens, rng.integers(30, 300, size=336))
    for ranks in (1, 2):
        assert Schedule(lengths, recipe.train, recipe.seed).usage(ranks).figures["padding"] < 0.02


def test_walk_from_a_cursor_is_the_rest_of_the_walk() -> None:
    schedule = Schedule(LENGTHS, CFG, seed=0)
    whole = list(schedule.walk(Cursor()))
    assert len(whole) == schedule.total == sum(len(plan_epoch(LENGTHS, CFG, 0, e)) for e in range(3))
    for cut in (1, len(whole) // 2, len(whole) - 1):
        assert list(Schedule(LENGTHS, CFG, seed=0).walk(whole[cut - 1][1])) == whole[cut:]
    assert [after for _, after in whole if schedule.ends_epoch(after)][-1] == Cursor(schedule.total, 3, 0)
    assert sum(schedule.ends_epoch(after) for _, after in whole) == 3


def test_max_steps_replaces_epochs() -> None:
    few = Schedule(LENGTHS, TrainConfig(batch_tokens=400, micro_batch_tokens=200, max_steps=2), seed=0)
    assert [few.ends_epoch(after) for _, after in few.walk(Cursor())] == [False, True]
    many = Schedule(LENGTHS[:10], TrainConfig(batch_tokens=400, micro_batch_tokens=200, max_steps=9), seed=0)
    assert list(many.walk(Cursor()))[-1][1].step == 9


def test_no_rows_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match="no rows"):
        Schedule(np.zeros(0, np.int64), CFG, seed=0)


def test_a_batch_is_its_rows_end_to_end() -> None:
    rows = tiny_run.rows([9, 1, 14])
    batch = load_batch(rows, [2, 0, 1])
    assert batch.lengths == [14, 9, 1] and len(batch.ids_T) == len(batch.answer_T) == 24
    assert batch.ids_T[14:23].tolist() == rows.row(0)[0].tolist()
    assert batch.answer_T[14:23].tolist() == rows.row(0)[1].tolist()
    idle = load_batch(rows, [])
    assert idle.answer_T.sum() == 0 and idle.lengths == [2]


def test_an_answer_does_not_go_on_in_the_next_document() -> None:
    """Rows that are answers from end to end, as pre-tokenised ones may be."""
    rows = tiny_run.make_rows([([1, 2, 3], [1, 1, 1]), ([4], [1]), ([5, 6, 7, 8], [1, 1, 1, 1])], [{}] * 3)
    batch = load_batch(rows, [0, 1, 2])
    assert supervised(batch.answer_T, 2).tolist() == [
        [True, False, False, False, True, True, False, False],
        [False, False, False, False, True, False, False, False],
    ]

import numpy as np
import pytest

from recipes.schema import TrainConfig, UserError
from tests.train import tiny_run
from train.batches import Cursor, Schedule, cut_padded, deal, load_batch, plan_epoch

CFG = TrainConfig(batch_tokens=400, micro_batch_tokens=200, epochs=3)
LENGTHS = np.random.default_rng(0).integers(5, 120, size=300)


def test_an_epoch_holds_every_row_once_and_is_a_function_of_seed_and_epoch() -> None:
    steps = plan_epoch(LENGTHS, CFG, seed=1, epoch=0)
    assert sorted(r for step in steps for r in step) == list(range(300))
    assert steps == plan_epoch(LENGTHS, CFG, seed=1, epoch=0)
    assert steps != plan_epoch(LENGTHS, CFG, seed=1, epoch=1)
    assert steps != plan_epoch(LENGTHS, CFG, seed=2, epoch=0)


def test_steps_are_near_batch_tokens_and_the_last_is_no_stub() -> None:
    sizes = [int(LENGTHS[step].sum()) for step in plan_epoch(LENGTHS, CFG, seed=0, epoch=0)]
    assert all(200 <= size <= 600 for size in sizes[:-1])
    assert sizes[-1] >= 200
    assert 350 <= np.mean(sizes) <= 450


def test_steps_are_shuffled_and_padding_is_low() -> None:
    steps = plan_epoch(LENGTHS, CFG, seed=0, epoch=0)
    means = [LENGTHS[step].mean() for step in steps]
    assert means != sorted(means)
    micro = [part for step in steps for part in deal(step, LENGTHS, 200, 1)[0]]
    padded = sum(len(part) * int(LENGTHS[part].max()) for part in micro)
    assert padded < 1.25 * LENGTHS.sum()


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_ranks_share_the_same_step_without_overlap(ranks: int) -> None:
    for step in plan_epoch(LENGTHS, CFG, seed=0, epoch=0):
        shares = deal(step, LENGTHS, CFG.micro_batch_tokens, ranks)
        assert len(shares) == ranks and len({len(share) for share in shares}) == 1
        rows = [r for share in shares for part in share for r in part]
        assert sorted(rows) == sorted(step)
        for part in (part for share in shares for part in share if len(part) > 1):
            assert len(part) * LENGTHS[part].max() <= CFG.micro_batch_tokens


def test_a_row_longer_than_the_limit_stands_alone() -> None:
    assert cut_padded([0, 1, 2, 3], np.array([4, 4, 50, 4]), 12) == [[0, 1], [2], [3]]


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


def test_batches_are_padded_on_the_right() -> None:
    rows = tiny_run.rows([9, 14])
    batch = load_batch(rows, [0, 1])
    assert batch.ids_BT.shape == (2, 14) and batch.answer_BT[0, 9:].sum() == 0
    assert batch.ids_BT[0, :9].tolist() == rows.row(0)[0].tolist()
    assert load_batch(rows, []).answer_BT.sum() == 0

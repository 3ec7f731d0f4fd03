"""The loss against a slot-by-slot reference, and simulated tau against a walk over chains."""

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from data_prep import teacher as teaching
from data_prep.rows import Rows
from data_prep.supervision import supervised
from models.attention import Documents
from models.target import States, Target, load_target
from models.vocab import VocabMap
from recipes.schema import NORMALISERS, OBJECTIVES, TargetConfig
from tests.train import tiny_run
from train import fused_loss, objective
from train.batches import load_batch
from train.losses import Loss
from train.objective import UnrollLoss, select, simulated_tau, step_weights, survival, tau_from_counts

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def exact(model_folder: Path) -> Target:
    return load_target(TargetConfig(path=str(model_folder)), CPU, torch.float64)


def naive_loss(loss: UnrollLoss, rows: Rows, indices: list[int]) -> tuple[Tensor, list[int], list[float], list[float]]:
    """Row by row, slot by slot, over every slot there is: (loss, kept slots a step, accuracy and overlap a step)."""
    target, vocab, steps = loss.target, loss.vocab, loss.steps
    terms: list[dict[int, list[Tensor]]] = [{} for _ in range(steps)]
    right, supervised, overlap = [0] * steps, [0] * steps, [0.0] * steps
    for number, r in enumerate(indices):
        ids, answer = rows.row(r)
        states = target.features(ids.unsqueeze(0))
        teacher = target.logits(states.final_BTH[0])
        tail = torch.zeros(steps, dtype=torch.long)
        embeds = target.embed(torch.cat([ids, tail])[1:])
        alone = Documents([len(ids)], CPU)
        for i, hidden in enumerate(loss.drafter.unroll(states.taps_BTC[0], embeds, steps, alone)):
            for p in range(len(ids) - 2 - i):
                span = answer[p + 1 : p + 3 + i].tolist()
                if len(set(span)) != 1 or span[0] == 0:
                    continue
                supervised[i] += 1
                logits, best = loss.drafter.logits(hidden[p]), int(teacher[p + 1 + i].argmax())
                value, shared = slot_loss(loss.loss, logits, teacher[p + 1 + i], vocab.kept_ids)
                overlap[i] += float(shared.detach())
                if not vocab.t2d[best]:
                    continue
                terms[i].setdefault(number, []).append(value)
                right[i] += int(vocab.kept_ids[logits.argmax()]) == best
    weights = [0.8**i / sum(0.8**j for j in range(steps)) for i in range(steps)]
    means = [torch.zeros((), requires_grad=True)]
    for w, by_row in zip(weights, terms, strict=True):
        if by_row and loss.per_row:
            means.append(w * torch.stack([torch.stack(t).mean() for t in by_row.values()]).mean())
        elif by_row:
            means.append(w * torch.stack([value for t in by_row.values() for value in t]).mean())
    counts = [len(t) if loss.per_row else sum(map(len, t.values())) for t in terms]
    rates = [[a / max(1, b) for a, b in zip(part, supervised, strict=True)] for part in (right, overlap)]
    return torch.stack(means).sum(), counts, rates[0], rates[1]


def slot_loss(loss: Loss, draft_V: Tensor, teacher_V: Tensor, kept_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The obvious formulas: (a slot's loss, the overlap of the two laws)."""
    log_q, log_p = draft_V.log_softmax(-1), teacher_V[kept_ids].log_softmax(-1)
    overlap = torch.minimum(teacher_V.softmax(-1)[kept_ids], log_q.exp()).sum()
    kl = (log_p.exp() * (log_p - log_q)).sum()
    weight = loss.lk_scale * torch.exp(-loss.lk_decay * overlap.detach())
    values = {
        "soft_ce": -(log_p.exp() * log_q).sum(),
        "kl": kl,
        "lk_alpha": -overlap.log(),
        "lk_lambda": weight * kl + (1 - weight) * (1 - overlap),
    }
    return values[loss.name], overlap


def pass_through(loss: UnrollLoss, rows: Rows, micro_batches: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """An optimiser step's (loss, sums, counts) over micro-batches, backward done."""
    inputs = [loss.prepare(load_batch(rows, part)) for part in micro_batches]
    counts = torch.stack([loss.counts(x) for x in inputs]).sum(0)
    total, sums = torch.zeros(()), torch.zeros(7, loss.steps, dtype=torch.float64)
    for x in inputs:
        value, metric = loss(x, counts)
        value.backward()
        total, sums = total + value.detach(), sums + metric
    return total, sums, counts


def gradients(loss: UnrollLoss) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in loss.drafter.named_parameters() if p.grad is not None}


def assert_equals_naive(loss: UnrollLoss, rows: Rows, micro_batches: list[list[int]]) -> list[int]:
    """Loss, counts, figures and all gradients; returns the counts."""
    expected, kept, accuracy, overlap = naive_loss(loss, rows, [r for part in micro_batches for r in part])
    expected.backward()
    wanted = gradients(loss)
    loss.zero_grad()
    value, sums, counts = pass_through(loss, rows, micro_batches)
    assert counts.tolist() == kept
    assert value.item() == pytest.approx(expected.item(), abs=1e-5)
    assert loss.metrics(sums)["acc"] == pytest.approx(accuracy, abs=1e-5)
    assert loss.metrics(sums)["overlap"] == pytest.approx(overlap, abs=2e-5)
    for name, gradient in gradients(loss).items():
        meant = wanted.get(name, torch.zeros_like(gradient))
        most = 1e-6 if gradient.dtype == torch.float64 else 1e-4
        assert (gradient - meant).norm() <= most * meant.norm() + most / 100, name
    return kept


def test_loss_counts_and_accuracy_equal_a_naive_loop(target: Target) -> None:
    kept = assert_equals_naive(tiny_run.objective(target), tiny_run.rows(), [[0, 3], [7], [2]])
    assert kept[0] > kept[1] > kept[2] > 0, "the test must hold dropped and censored slots"


@settings(deadline=None, max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 24), min_size=1, max_size=4),
    flags=st.sets(st.sampled_from(["fc_norm", "norm_output", "norm_before_residual", "qk_norm"])),
    name=st.sampled_from(OBJECTIVES),
    normaliser=st.sampled_from(NORMALISERS),
    recompute=st.booleans(),
    seed=st.integers(0, 99),
)
def test_work_on_the_supervised_slots_alone_changes_nothing(
    exact: Target, lengths: list[int], flags: set[str], name: str, normaliser: str, recompute: bool, seed: int
) -> None:
    """Against the naive loop over every slot: packed rows with no, one and several answers, all flags, all losses. In
    fp64, since the slope of -log A has no bound near A = 0."""
    draw = random.Random(seed)
    marks = []
    for length in lengths:
        turns = [(k, draw.randint(1, 9)) for k in draw.sample([0, 1, 2, 3], 4)]
        answers = [k for k, n in turns for _ in range(n)]
        marks.append([0] * max(0, length - len(answers)) + answers[:length])
    rows = tiny_run.make_rows([([draw.randrange(tiny_run.VOCAB) for _ in m], m) for m in marks], [{} for _ in marks])
    eagle: dict[str, Any] = {"objective": name, "normaliser": normaliser, "lk_decay": 2.0, **dict.fromkeys(flags, True)}
    loss = tiny_run.objective(exact, seed=seed, keep_bytes=0, **eagle)
    loss.drafter.double()
    loss.recompute = recompute
    assert_equals_naive(loss, rows, [list(range(len(rows)))])


@settings(deadline=None, max_examples=50)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_slots_are_in_the_order_that_sorting_by_teacher_gives(lengths: list[int], seed: int) -> None:
    draw = random.Random(seed)
    answer_T = torch.tensor([number for n in lengths for number in sorted(draw.choices((0, 1, 2), k=n))])
    supervised_ST = supervised(answer_T, 3)
    place_T = torch.arange(sum(lengths))  # as if every position taught
    slots = select(place_T, supervised_ST, place_T, Documents(lengths, CPU))
    found = [(p, i) for i in range(3) for p in supervised_ST[i].nonzero().flatten().tolist()]
    meant = sorted(found, key=lambda slot: (slot[0] + 1 + slot[1], slot[1]))
    counted = slots.counted_n.tolist()
    in_order = zip(slots.index_n.tolist(), slots.step_n.tolist(), strict=True)
    assert [slot for slot, counts in zip(in_order, counted, strict=True) if counts] == meant
    assert slots.teacher_n.tolist() == sorted(slots.teacher_n.tolist())
    assert sorted(slots.order_n.tolist()) == list(range(len(counted)))
    ends = torch.tensor(lengths).cumsum(0)
    assert slots.row_n.tolist() == [int((ends <= p).sum()) for p in slots.index_n.tolist()]


def test_one_norm_before_fc_trains_the_same(target: Target) -> None:
    loss = tiny_run.objective(target, norm_before_fc=True)
    assert_equals_naive(loss, tiny_run.rows(), [[0, 3], [7]])


@pytest.mark.parametrize("bf16", [False, True])
def test_recomputed_activations_give_the_same_gradients_bit_for_bit(target: Target, bf16: bool) -> None:
    """In bf16 the other way holds less too: what is cheap it makes again."""
    rows, loss = tiny_run.rows(), tiny_run.objective(target)
    loss.bf16 = bf16
    value, sums, _ = pass_through(loss, rows, [[1, 3, 5, 6]])
    held = gradients(loss)
    loss.zero_grad()
    loss.recompute = True
    again, sums_again, _ = pass_through(loss, rows, [[1, 3, 5, 6]])
    assert value.item() == again.item() and torch.equal(sums, sums_again)
    assert all(torch.equal(gradient, held[name]) for name, gradient in gradients(loss).items())


@pytest.mark.parametrize("bf16", [False, True])
def test_layers_and_head_run_on_the_supervised_slots_alone(target: Target, bf16: bool) -> None:
    rows, loss = tiny_run.rows(), tiny_run.objective(target)
    loss.bf16, seen = bf16, []
    for module in (loss.drafter.midlayer.mlp, loss.drafter.midlayer.self_attn.o_proj, loss.drafter.lm_head):
        module.register_forward_pre_hook(lambda m, args: seen.append(args[0].flatten(0, -2).shape[0]))
    batch = load_batch(rows, [0, 3, 7])
    inputs = loss.prepare(batch)
    loss(inputs, loss.counts(inputs))
    slots = inputs.supervised_ST.sum(1).tolist()
    assert seen == [n for n in slots for _ in "om"] + [sum(slots)] and slots[0] < len(batch.ids_T)


def test_one_micro_batch_of_four_equals_four_of_one(target: Target) -> None:
    rows, loss = tiny_run.rows(), tiny_run.objective(target)
    one, sums_one, _ = pass_through(loss, rows, [[1, 3, 5, 6]])
    together = gradients(loss)
    loss.zero_grad()
    four, sums_four, _ = pass_through(loss, rows, [[1], [3], [5], [6]])
    assert one.item() == pytest.approx(four.item(), abs=1e-6)
    torch.testing.assert_close(sums_one, sums_four, atol=1e-4, rtol=1e-6)
    for name, gradient in gradients(loss).items():
        torch.testing.assert_close(gradient, together[name], atol=1e-6, rtol=1e-5)


@settings(deadline=None, max_examples=30)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_a_packed_micro_batch_equals_its_documents_one_at_a_time(target: Target, lengths: list[int], seed: int) -> None:
    """Loss, counts, metric sums and all gradients; documents of one and two tokens, and all answer, are among them."""
    draw = random.Random(seed)
    behind_a_prompt = [[0] * min(3, n) + [1] * (n - 3) for n in lengths]
    marks = [sorted(draw.choices([1, 1, 2], k=len(m))) if draw.random() < 0.5 else m for m in behind_a_prompt]
    ids = [[draw.randrange(tiny_run.VOCAB) for _ in range(n)] for n in lengths]
    rows = tiny_run.make_rows(list(zip(ids, marks, strict=True)), [{}] * len(ids))
    loss = tiny_run.objective(target, keep_bytes=0)
    together, sums, counts = pass_through(loss, rows, [list(range(len(rows)))])
    packed = gradients(loss)
    loss.zero_grad()
    apart, sums_apart, counts_apart = pass_through(loss, rows, [[i] for i in range(len(rows))])
    assert together.item() == pytest.approx(apart.item(), abs=1e-5)
    assert counts.tolist() == counts_apart.tolist()
    torch.testing.assert_close(sums, sums_apart, atol=1e-4, rtol=1e-5)
    for name, gradient in gradients(loss).items():
        torch.testing.assert_close(gradient, packed[name], atol=1e-5, rtol=1e-4)


def test_features_of_a_packed_row_equal_those_document_by_document(target: Target) -> None:
    batch = load_batch(tiny_run.rows(), [3, 0, 7])
    alone = tiny_run.objective(target, keep_bytes=1).prepare(batch)
    packed = tiny_run.objective(target, keep_bytes=0).prepare(batch)
    # states of up to 17: products of other sizes round them up to 1.5e-5 apart on one kind of CPU
    torch.testing.assert_close(packed.taps_TC, alone.taps_TC, atol=5e-5, rtol=1e-5)
    torch.testing.assert_close(packed.final_mH, alone.final_mH, atol=5e-5, rtol=1e-5)
    assert torch.equal(packed.best_m, alone.best_m)


def test_kept_features_are_those_computed_again_bit_for_bit(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever company a row comes back, and however many fit."""
    rows, fresh = tiny_run.rows(), tiny_run.objective(target, keep_bytes=1)
    calls: list[int] = []
    run = target.features

    def counted(ids: Tensor) -> States:
        calls.append(ids.shape[1])
        return run(ids)

    monkeypatch.setattr(target, "features", counted)
    for keep_bytes, again in ((1, 3), (12000, 2), (10**9, 0)):
        keeping = tiny_run.objective(target, keep_bytes=keep_bytes)
        keeping.prepare(load_batch(rows, [0, 3, 7]))
        assert sum(t.nbytes for f in keeping.teacher.keeping.kept.values() for t in f) <= keep_bytes
        calls.clear()
        second = keeping.prepare(load_batch(rows, [7, 0, 3]))
        assert len(calls) == again
        expected = fresh.prepare(load_batch(rows, [7, 0, 3]))
        for one, other in ((second.taps_TC, expected.taps_TC), (second.final_mH, expected.final_mH)):
            assert torch.equal(one, other)
        assert torch.equal(second.best_m, expected.best_m)


def test_an_empty_micro_batch_reaches_every_parameter_with_weight_zero(target: Target) -> None:
    loss = tiny_run.objective(target)
    value, sums, counts = pass_through(loss, tiny_run.rows(), [[]])
    assert value.item() == 0 and counts.sum() == 0 and sums.sum() == 0
    named = dict(loss.drafter.named_parameters())
    assert gradients(loss).keys() == named.keys()
    assert all(float(g.abs().max()) == 0 for g in gradients(loss).values())


def test_full_vocabulary_drops_nothing(target: Target) -> None:
    loss = tiny_run.objective(target, VocabMap.identity(tiny_run.VOCAB))
    _, sums, counts = pass_through(loss, tiny_run.rows(), [[0, 1, 2]])
    assert counts.tolist() == sums[objective.SUPERVISED].long().tolist()
    assert loss.metrics(sums)["coverage"] == 1.0


def test_bf16_autocast_stays_near_fp32(target: Target) -> None:
    rows, loss = tiny_run.rows(), tiny_run.objective(target)
    exact, _, _ = pass_through(loss, rows, [[1, 3]])
    loss.bf16 = True
    rough, _, _ = pass_through(loss, rows, [[1, 3]])
    assert rough.item() == pytest.approx(exact.item(), rel=0.02)


def test_chunks_change_nothing(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, loss = tiny_run.rows(), tiny_run.objective(target)
    whole, sums, _ = pass_through(loss, rows, [[3, 7]])
    at_once = gradients(loss)
    loss.zero_grad()
    monkeypatch.setattr(teaching, "CHUNK", 3 * tiny_run.VOCAB)
    monkeypatch.setattr(fused_loss, "CHUNK_CPU", 3 * loss.vocab.size)
    parts, sums_parts, _ = pass_through(loss, rows, [[3, 7]])
    assert whole.item() == pytest.approx(parts.item(), abs=1e-6)
    torch.testing.assert_close(sums, sums_parts, atol=1e-4, rtol=1e-6)
    for name, gradient in gradients(loss).items():
        torch.testing.assert_close(gradient, at_once[name], atol=1e-6, rtol=1e-4)


def test_step_weights_sum_to_one() -> None:
    assert sum(step_weights(7, 0.8)) == pytest.approx(1)
    assert step_weights(3, 0.5) == pytest.approx([4 / 7, 2 / 7, 1 / 7])


def brute_force_tau(match: list[list[bool]], supervised: list[list[bool]]) -> float:
    """Walk every chain; count at each position who got there and who passed."""
    tau, survive = 1.0, 1.0
    for k in range(len(match)):
        reached = [n for n in range(len(match[0])) if all(match[j][n] for j in range(k)) and supervised[k][n]]
        survive *= sum(match[k][n] for n in reached) / len(reached) if reached else 0
        tau += survive
    return tau


def test_simulated_tau_equals_a_walk_over_every_small_case() -> None:
    columns = [
        (m, s) for m in itertools.product([False, True], repeat=3) for s in ((0, 0, 0), (1, 0, 0), (1, 1, 0), (1, 1, 1))
    ]
    torch.manual_seed(0)
    for _ in range(200):
        chosen = [columns[int(i)] for i in torch.randint(len(columns), (5,))]
        match = [[c[0][k] for c in chosen] for k in range(3)]
        supervised = [[bool(c[1][k]) for c in chosen] for k in range(3)]
        ours = simulated_tau(torch.tensor(match), torch.tensor(supervised))
        assert ours == pytest.approx(brute_force_tau(match, supervised))


def test_marginals_of_nine_tenths_do_not_make_a_chain() -> None:
    """Ten slots, each position matched by nine: the misses fall on other slots each time, so the chain pays for all."""
    match = torch.ones(5, 10, dtype=torch.bool)
    match[torch.arange(5), torch.arange(5)] = False
    assert match.double().mean(1).tolist() == pytest.approx([0.9] * 5)
    apart = simulated_tau(match, torch.ones_like(match))
    assert apart == pytest.approx(1 + 0.9 + 0.8 + 0.7 + 0.6 + 0.5)
    together = torch.ones(5, 10, dtype=torch.bool)
    together[:, 0] = False
    assert simulated_tau(together, torch.ones_like(together)) == pytest.approx(1 + 5 * 0.9)


def test_the_end_of_an_answer_is_censoring_and_not_a_miss() -> None:
    match = torch.tensor([[True, True], [True, False]])
    supervised = torch.tensor([[True, True], [True, False]])
    assert simulated_tau(match, supervised) == pytest.approx(3.0)
    at_risk, survived = survival(match, supervised)
    assert at_risk.tolist() == [2, 1] and survived.tolist() == [2, 1]


def test_counts_add_up_over_micro_batches() -> None:
    torch.manual_seed(1)
    match, supervised = torch.rand(4, 30) < 0.7, torch.ones(4, 30, dtype=torch.bool)
    left, right = survival(match[:, :11], supervised[:, :11]), survival(match[:, 11:], supervised[:, 11:])
    assert tau_from_counts(left[0] + right[0], left[1] + right[1]) == pytest.approx(simulated_tau(match, supervised))

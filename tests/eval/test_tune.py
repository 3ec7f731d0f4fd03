"""The tuner against price lists whose best setting is known."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from eval import tune, tunings
from eval.decode import Decoded
from eval.plan import plan
from eval.settings import Settings
from eval.trials import Trial, choose
from models.target import Target
from recipes.files import sha256_file
from recipes.schema import Recipe, UserError
from tests.eval.fakes import FakeDecode, FakeTarget, fake_drafter, fake_prompts, fake_recipe

TARGET, DRAFTER = cast(Target, FakeTarget()), fake_drafter()
PROMPTS = fake_prompts(18)


def accepts(rate: float) -> Callable[[Settings], float]:
    """Accepted drafts a round: a chain's geometric sum; a tree is worth a little more, retrieval a little on top."""

    def of(s: Settings) -> float:
        if s.decoder == "ar":
            return 0.0
        chain = sum(rate**k for k in range(1, s.depth + 1))
        return chain * {"chain": 1.0, "eagle": 1.1, "graft": 1.15}[s.decoder] if s.nodes > s.depth else chain

    return of


def cost(step: float, row: float, draft: float, noise: float = 0.0) -> Callable[[Settings], float]:
    dice = random.Random(0)

    def of(s: Settings) -> float:
        price = step if s.decoder == "ar" else step + row * s.nodes + draft * s.depth
        late = 5 * noise * price if dice.random() < 0.1 else 0.0  # now and then the machine does something else
        return price * (1 + noise * dice.uniform(-1, 1)) + late

    return of


def tuned(decode: FakeDecode, **more: Any) -> dict[str, Any]:
    return tune.tune(fake_recipe(max_new_tokens=64), TARGET, DRAFTER, PROMPTS, decode=decode, **more)


def measured(decode: FakeDecode) -> list[dict[str, Any]]:
    settings = tune.candidates(fake_recipe(max_new_tokens=64), "cpu")
    return tune.measured_grid(fake_recipe(), TARGET, DRAFTER, PROMPTS, settings=settings, decode=decode)


def machine(rate: float, prices: tuple[float, float, float], noise: float = 0.0) -> FakeDecode:
    """A head that is right at `rate`, on a machine that asks (step, row, draft) ms."""

    def drafting(s: Settings) -> float:
        return 0.0 if s.decoder == "ar" else prices[2] * s.depth

    return FakeDecode(accepts=accepts(rate), cost=cost(*prices, noise=noise), drafting=drafting)


def best_of(
    accept: Callable[[Settings], float], price: Callable[[Settings], float]
) -> tuple[float, Callable[[dict[str, Any]], float]]:
    def speed(s: Settings) -> float:
        return (1 + accept(s)) / price(s)

    def of(row: dict[str, Any]) -> float:
        keys = ("decoder", "depth", "branch", "nodes")
        return speed(Settings(**{key: row[key] for key in keys}))

    return max(speed(s) for s in tune.candidates(fake_recipe(), "cpu")), of


@pytest.mark.parametrize("rate", [0.3, 0.5, 0.7])
@pytest.mark.parametrize("prices", [(27.0, 3.5, 3.0), (27.0, 8.0, 1.0), (10.0, 0.1, 2.0)])
def test_the_choice_is_within_three_percent_of_the_best(rate: float, prices: tuple[float, float, float]) -> None:
    decode = machine(rate, prices, noise=0.03)
    best, speed = best_of(accepts(rate), cost(*prices))
    assert speed(tuned(decode)["chosen"]) >= 0.97 * best


def test_speculation_is_off_where_it_cannot_pay() -> None:
    decode = machine(0.1, (27.0, 20.0, 10.0))
    assert tuned(decode)["chosen"]["decoder"] == "ar"


def test_the_field_shrinks_and_the_finalists_ran_the_same_prompts() -> None:
    found = tuned(machine(0.5, (27.0, 3.5, 3.0)))
    calls = [row["calls"] for row in found["table"]]
    most = sum(count for count, *_ in tune.ROUNDS)
    assert tune.FINALISTS <= calls.count(most) <= tune.FINALISTS + 1
    assert sum(count <= tune.ROUNDS[0][0] for count in calls) > len(calls) / 2
    assert {row["decoder"] for row in found["best"].values()} == {"chain", "eagle", "graft"}


def test_the_cost_curve_is_reported() -> None:
    found = tuned(machine(0.5, (27.0, 3.5, 3.0)))
    verify = found["cost_curve"]["verify_ms_by_rows"]
    assert verify["1"] == pytest.approx(27.0)
    assert verify["4"] == pytest.approx(27.0 + 3 * 3.5)
    assert list(map(int, verify)) == sorted(map(int, verify))
    assert found["cost_curve"]["draft_ms_by_depth"]["2"] == pytest.approx(6.0)


def test_the_budget_ends_the_later_rounds() -> None:
    found = tuned(machine(0.5, (27.0, 3.5, 3.0)), budget=0.0)
    least = [least for *_, least in tune.ROUNDS]
    assert max(row["calls"] for row in found["table"]) == sum(least)
    assert sum(row["calls"] > least[0] for row in found["table"]) <= tune.FEW + 1


def test_warm_up_prompts_are_not_decoded_again() -> None:
    decode = FakeDecode()
    tuned(decode)
    warm = decode.calls[0]
    assert len(warm.prompts) == tune.WARM_PROMPTS
    assert not any(ids in warm.prompts for call in decode.calls[1:] for ids in call.prompts)


def test_every_graft_candidate_has_a_matrix_of_its_own() -> None:
    decode = FakeDecode()
    tuned(decode)
    owners: dict[int, set[Settings]] = {}
    for call in decode.calls[1:]:
        if call.settings.decoder == "graft":
            owners.setdefault(id(call.matrix), set()).add(replace(call.settings, max_new_tokens=1))
        else:
            assert call.matrix is None
    assert owners and all(len(settings) == 1 for settings in owners.values())


def test_each_decoder_is_tried_with_the_gates_that_were_calibrated_for_it() -> None:
    gates = {"graft": (0.1, 0.2, 0.3), "prune": (0.2, 0.1, 0.0)}
    recipe = fake_recipe(decoders=["graft", "prune", "splice"], gates=[0.1, 0.2, 0.3])  # as eval.run passes it on
    tried = {(s.decoder, s.gates) for s in tune.candidates(recipe, "cpu", calibrated={"gates": gates}) if s.drafts}
    own = {(name, gates["prune" if name == "prune" else "graft"]) for name in ("graft", "prune", "splice")}
    assert tried == own | {(name, tuple(min(0.9, tune.HIGHER_GATES * g) for g in low)) for name, low in own}


def test_the_measured_grid_judges_the_choice() -> None:
    decode = machine(0.5, (27.0, 3.5, 3.0))
    grid = measured(decode)
    assert len(grid) == len(tune.candidates(fake_recipe(), "cpu"))
    assert [row["tokens_per_s"] for row in grid] == sorted((row["tokens_per_s"] for row in grid), reverse=True)
    assert tune.shortfall(grid, grid[0]) == 0
    assert tune.shortfall(grid, tuned(decode)["chosen"]) < 0.03


def test_the_time_of_the_grid_is_told_before_it_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It takes longer than the tuning, whose time alone was told."""
    decode = machine(0.5, (27.0, 3.5, 3.0))
    monkeypatch.setattr(tune, "_keeping", lambda warm, batches: decode)
    found = tune.judged(fake_recipe(max_new_tokens=64), TARGET, DRAFTER, PROMPTS, tune.candidates(fake_recipe(), "cpu"))
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("the grid: "))
    settings = len(tune.candidates(fake_recipe(), "cpu"))
    real = sum(tune.GRID_BATCHES * tune.GRID_TOKENS / row["tokens_per_s"] for row in found["grid"])
    assert f"all {settings} settings" in line and float(line.split()[-2]) == pytest.approx(real, rel=0.1)


def test_the_grid_shows_why_speculation_is_off() -> None:
    prices = machine(0.1, (27.0, 20.0, 10.0))
    found = tuned(prices)
    grid = measured(prices)
    *rows, last = tunings.grid_lines(found | {"grid": grid, "shortfall": tune.shortfall(grid, found["chosen"])})
    assert rows[0].startswith("ar ") and rows[0].endswith(" 1.00 x ar")
    shares = [float(row.split()[-3]) for row in rows[1:]]
    assert shares == sorted(shares, reverse=True) and shares[0] < 1
    assert last == "batch 1: off (nothing surely beats ar); 0.0 % below the best of the grid, 1.00 x ar"


def test_a_call_in_which_a_gpu_recorded_steps_is_not_booked() -> None:
    """Each setting's first two calls take fifty times as long; so do the first two of one that a gate reaches late."""

    class Recording(FakeDecode):
        def __call__(
            self, target: Any, drafter: Any, prompts: Any, settings: Settings, *more: Any, **named: Any
        ) -> Any:
            decoded = super().__call__(target, drafter, prompts, settings, *more, **named)
            key = replace(settings, max_new_tokens=0)
            late = settings.depth == 2 and seen.get(key, 0) in (8, 9)
            fresh = seen.get(key, 0) < 2 or late
            seen[key] = seen.get(key, 0) + 1
            slow = 50 if fresh else 1
            return replace(decoded, decode_seconds=slow * decoded.decode_seconds, unready=int(fresh))

    seen: dict[Settings, int] = {}
    rate, prices = 0.5, (27.0, 3.5, 3.0)
    decode = Recording(accepts(rate), cost(*prices))
    best, speed = best_of(accepts(rate), cost(*prices))
    found = tuned(decode)
    assert speed(found["chosen"]) >= 0.97 * best
    assert all(row["ms_per_round"] < 200 for row in found["table"])


def test_small_sets_of_prompts_come_again_from_the_same_matrix() -> None:
    decode = FakeDecode()
    tune.tune(fake_recipe(batch_size=16, max_new_tokens=16), TARGET, DRAFTER, fake_prompts(18), decode=decode)
    calls = [call for call in decode.calls[1:] if call.settings.decoder == "ar"]
    assert len(calls) == 1 + tune.LEAST and {len(call.prompts) for call in calls} == {16}


def test_the_gpu_grid_is_larger() -> None:
    gpu = tune.candidates(fake_recipe(), "cuda")
    assert len(gpu) > 2 * len(tune.candidates(fake_recipe(), "cpu"))
    assert max(s.nodes for s in gpu) == 60 and max(s.depth for s in gpu) == 8


def test_a_batch_is_one_call() -> None:
    decode = FakeDecode()
    tune.tune(fake_recipe(batch_size=4, max_new_tokens=16), TARGET, DRAFTER, PROMPTS, decode=decode)
    assert {len(call.prompts) for call in decode.calls[1:]} == {4}


def test_tuned_settings_come_back_on_the_same_machine_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, weights = fake_recipe(max_new_tokens=16), tmp_path / "model.safetensors"
    weights.write_bytes(b"a drafter")
    assert tunings.read(tmp_path, recipe, TARGET) is None
    wrote = tune.tune(recipe, TARGET, DRAFTER, PROMPTS, decode=FakeDecode())
    assert list(tmp_path.iterdir()) == [weights], "only eval.tune writes beside a drafter"
    tunings.write(tmp_path, wrote)
    read = tune.tuning(recipe, TARGET, DRAFTER, PROMPTS, tmp_path, decode=None)
    assert read == json.loads(json.dumps(wrote)) | {"drafter": sha256_file(weights)}
    assert tunings.read(tmp_path, recipe, TARGET) == read
    weights.write_bytes(b"trained again")
    assert tunings.read(tmp_path, recipe, TARGET) is None
    assert "other weights of the drafter" in capsys.readouterr().out
    weights.write_bytes(b"a drafter")
    calibrator = tmp_path / "calibrator.safetensors"
    calibrator.write_bytes(b"of the same masks")
    assert tunings.read(tmp_path, recipe, TARGET) is None
    assert "other weights of the drafter" in capsys.readouterr().out
    calibrator.unlink()
    assert tunings.read(tmp_path, fake_recipe(temperature=1.0), TARGET) is None
    assert "holds nothing for batch 1, T = 1, but for batch 1, T = 0\n" in capsys.readouterr().out
    warm = tune.tune(fake_recipe(max_new_tokens=16, temperature=1.0), TARGET, DRAFTER, PROMPTS, decode=FakeDecode())
    tunings.write(tmp_path, warm)
    assert tunings.read(tmp_path, recipe, TARGET) == read, "each temperature has its own"
    one = replace(recipe, decoder="graft")
    assert tunings.read(tmp_path, one, TARGET) == read, "whoever tuned them all tuned this one"
    other = fake_recipe(max_new_tokens=16, decoders=["talon", "graft"], depth=3)
    assert tunings.read(tmp_path, other, TARGET) is None
    assert "measured with no talon, eval.depth=8 (now 3)\n" in capsys.readouterr().out
    (tmp_path / tunings.FILE).write_text('{"schema": 2, "batches": {}}')
    assert tunings.read(tmp_path, recipe, TARGET) is None
    tunings.check(tmp_path)
    assert "older Espalier" in capsys.readouterr().out


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: '{"schema": 3}',
        lambda text: '{"schema": 3, "entries": {"batch 1, T = 0": 3}}',
        lambda text: text.replace('"batch 1, T = 0": {', '"one": {'),
        lambda text: text.replace('"batch 1, T = 0": {', '"batch 2, T = 0": {'),
        lambda text: text.replace('"best"', '"worst"'),
        lambda text: text.replace('"depth": 1', '"depth": "1"'),
        lambda text: text.replace('"nodes": ', '"nodes": -'),
        lambda text: text.replace('"cost_curve"', '"curve"'),
        lambda text: text.replace('"verify_ms_by_rows": {', '"verify_ms_by_rows": 3, "old": {'),
        lambda text: text.replace('"seconds": ', '"seconds": "soon", "old": ', 1),
        lambda text: text.replace('"hardware"', '"software"'),
        lambda text: text.replace('"nodes": ', '"nodes": 1000000000'),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, damage: Callable[[str], str]) -> None:
    """By whoever reads it, and by whoever would have written to it after minutes of work."""
    (tmp_path / "model.safetensors").write_bytes(b"a drafter")
    recipe = fake_recipe(max_new_tokens=16)
    wrote = tune.tune(recipe, TARGET, DRAFTER, PROMPTS, decode=FakeDecode())
    tunings.write(tmp_path, wrote)
    tunings.check(tmp_path)
    path = tmp_path / tunings.FILE
    whole = path.read_text()
    path.write_text(damage(whole))
    assert path.read_text() != whole
    for use in (tunings.check, lambda folder: tunings.read(folder, recipe, TARGET)):
        with pytest.raises(UserError, match="Delete it"):
            use(tmp_path)


def test_each_batch_size_has_its_own_choice(tmp_path: Path) -> None:
    """Speculation pays at batch 1 here, and at batch 4 a verified row costs too much."""

    def recipe(size: int) -> Recipe:
        return fake_recipe(batch_size=size, max_new_tokens=64)

    (tmp_path / "model.safetensors").write_bytes(b"a drafter")
    tunings.write(tmp_path, tune.tune(recipe(1), TARGET, DRAFTER, PROMPTS, decode=machine(0.5, (27.0, 3.5, 3.0))))
    tunings.write(tmp_path, tune.tune(recipe(4), TARGET, DRAFTER, PROMPTS, decode=machine(0.1, (27.0, 20.0, 10.0))))
    one, four = (tunings.read(tmp_path, recipe(size), TARGET) for size in (1, 4))
    assert one is not None and four is not None
    assert (one["speculate"], four["speculate"]) == (True, False)
    assert one["chosen"]["decoder"] in tunings.choice(one) and tunings.choice(four).startswith("off")
    assert tunings.read(tmp_path, recipe(2), TARGET) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", tunings.FILE]


def test_eagle_and_graft_share_a_budget_where_both_are_compared() -> None:
    row = {"branch": 4, "gates": [0.1, 0.2, 0.3], "parallel": False}
    best = {
        "eagle": row | {"depth": 8, "nodes": 60, "tokens_per_s": 3.0},
        "graft": row | {"depth": 3, "nodes": 16, "tokens_per_s": 2.0},
    }
    both = plan(fake_recipe(decoders=["ar", "eagle", "graft"]), {"best": best})
    assert {(e.settings.depth, e.settings.nodes) for e in both if e.label != "ar"} == {(8, 60)}
    alone = plan(replace(fake_recipe(), decoder="graft"), {"best": best})
    assert {(e.settings.depth, e.settings.nodes) for e in alone if e.label != "ar"} == {(3, 16)}


def test_no_prompts_no_tuning() -> None:
    with pytest.raises(UserError, match="validation prompts"):
        tune.tune(fake_recipe(), TARGET, DRAFTER, [], decode=cast(Callable[..., Decoded], FakeDecode()))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_baselines_are_tuned_as_well(device: str) -> None:
    names = ["talon", "prune", "recycle", "lookup", "suffix", "graft", "splice"]
    found = tune.candidates(fake_recipe(decoders=names, nodes=16), device)
    assert {s.decoder for s in found} == {"ar", *names}
    assert max(s.nodes for s in found if s.decoder not in ("ar", "suffix")) == 16
    assert sorted(s.depth for s in found if s.decoder == "suffix") == [3, 6, 10, 40]
    gates = {name: {s.gates for s in found if s.decoder == name} for name in ("prune", "graft", "splice")}
    assert gates["prune"] == gates["graft"] == gates["splice"] and len(gates["graft"]) == 2
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(("rounds", "chosen"), [([8, 8, 8, 8, 8, 8], "chain"), ([2, 16, 16, 3, 16, 16], "ar")])
def test_what_a_few_prompts_luck_wins_is_not_chosen(rounds: list[int], chosen: str) -> None:
    def trial(settings: Settings, rounds: list[int], ms: float) -> Trial:
        spent = [ms * n / 1000 for n in rounds]
        stages = [{"verify": 0.5 * s} for s in spent]
        pool = {(settings.depth, False): [0.5 * ms]}
        rows = [settings.depth] * len(rounds)
        return Trial(settings, None, [16] * len(rounds), rounds, rounds, spent, stages, rows=rows, pool=pool)

    plain = trial(Settings("ar"), [16] * 6, 1.0)
    drafts = trial(Settings("chain", depth=2), rounds, 96 / sum(rounds) / 1.1)  # predicted: 1.1 x ar, either way
    assert drafts.speed == pytest.approx(1.1 * plain.speed)
    assert choose([drafts, plain]).settings.decoder == chosen

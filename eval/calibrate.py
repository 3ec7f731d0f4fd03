"""`python -m eval.calibrate recipe=NAME drafter=DIR`: where Graft's gates should stop drafting, for this drafter here.

Validation prompts are decoded with open gates, and each round is looked at four times: had the first, second or third
gate stopped it, or none, how confident was the drafter there, and how much of its tree would the target have accepted?
(What the target says does not depend on drafts, so each tree is judged on the same text.) What a round of each kind
costs is measured on the real thing, with gates that always stop or never. The gates are then chosen one after the
other for the most tokens a second: tokens of all rounds over the cost of all rounds.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from data_prep.prompts import Prompt
from eval.calibrated import FILE, MATRIX_FILE, words
from eval.decode import Decoded, decode, decode_keeping
from eval.drafters import Drafter
from eval.drafting import GATE_DEPTHS, UNGATED, rerank
from eval.engine import Engines
from eval.matrix import MAX_DEPTH, SuccessorMatrix
from eval.matrix_file import save_matrix
from eval.memory import attempt, too_many
from eval.outcome import check_prompts, encode, in_dtype, longest_prompt, new_matrix, row_id, warmup_prompts
from eval.plan import check_settings, refuse_unread, settings_of
from eval.proposing import Grafted, Laps, Proposal, Proposer
from eval.results import environment
from eval.settings import CALIBRATED, PUBLISHED_GATES, Settings
from eval.tree import FIELDS, DraftTree
from eval.verify import walk
from models.capture import Steps
from models.flex_layout import is_flexdraft
from models.source import load_tokenizer
from models.target import Target, padded
from models.weights import weights_hash
from recipes.cli import entry
from recipes.files import check_writable, sha256_json, write_json
from recipes.schema import Recipe, UserError

TOKENS, COST_TOKENS, COST_BATCHES = 64, 24, 3
GRID = [i / 100 for i in range(100)]  # thresholds that are tried


@dataclass(frozen=True)
class Log:
    """Rounds of batches [R, B]: the drafter's confidence at each gate [R, B, gates], the tokens that stopping at each
    stage would have emitted, by decoder [R, B, gates + 1], and which rows count [R, B]."""

    confidence: Tensor
    tokens: dict[str, Tensor]
    counts: Tensor


class Watched(Proposer):
    """Graft with open gates that keeps, of every round, the confidences and the tree of each stage."""

    line = False

    def __init__(self, inner: Grafted) -> None:
        super().__init__(inner.settings, inner.roots, inner.fixed)
        self.inner, self.drafting, self.matrix = inner, inner.drafting, inner.matrix
        self.seen: list[tuple[list[Tensor], dict[str, list[DraftTree]]]] = []

    def propose(self, steps: Steps, clock: Laps) -> Proposal:
        inner, depth = self.inner, self.settings.depth
        f = inner.drafting.draft(depth, inner.branch, (), steps)
        confidence = [f.layers[level - 1][2].amax(1).exp() for level in levels(depth)]
        trees: dict[str, list[DraftTree]] = {name: [] for name in CALIBRATED}
        for stage, level in [*enumerate(levels(depth)), (UNGATED, depth)]:
            stage_B = torch.full_like(self.roots, stage)
            part = replace(f, layers=f.layers[:level], stage=stage_B, level=level).candidates()
            pruned = rerank(part, self.roots, inner.budgets[stage_B], max(1, inner.kept[stage]))
            trees["prune"].append(pruned)
            trees["graft"].append(inner.fill(pruned, stage_B))
        self.seen.append((confidence, trees))
        return Proposal(trees["graft"][-1], self.stage, self.merged)


def levels(depth: int) -> list[int]:
    """Draft depths of the gates that a tree of this depth has."""
    return [level for level in GATE_DEPTHS if level <= depth]


def watch(target: Target, drafter: Drafter, settings: Settings, batch: "Batch", matrix: SuccessorMatrix) -> Log:
    """Decode one batch with open gates and judge every stage's tree on the text that followed."""
    prompts, row_ids = batch
    engines, settings = Engines(fixed=False), replace(settings, decoder="graft", gates=())
    engine = engines.get(target, drafter, settings, len(prompts), max(map(len, prompts)))
    assert isinstance(engine.proposer, Grafted)
    engine.proposer = watched = Watched(engine.proposer)
    decoded = decode(target, drafter, prompts, settings, matrix, row_ids, engines)
    longest, B = max(len(row.tokens) for row in decoded.rows), len(prompts)
    text = padded([row.tokens for row in decoded.rows], longest + 2 * MAX_DEPTH + settings.depth)
    reach = max(settings.depth, MAX_DEPTH)
    place, index = torch.zeros(B, dtype=torch.int64), torch.arange(B)  # of each row's root in its text
    confidence, tokens, counts = [], {name: list[Tensor]() for name in CALIBRATED}, []
    for number, (sure, trees) in enumerate(watched.seen):
        counts.append(torch.tensor([int(p) + reach < len(r.tokens) for p, r in zip(place, decoded.rows, strict=True)]))
        confidence.append(torch.stack(sure, 1).cpu())
        for name in CALIBRATED:
            said = [accepted(tree, text, place) + 1 for tree in trees[name]]
            tokens[name].append(torch.stack(said, 1))
        for row, found in zip(index, decoded.rows, strict=True):
            if number < found.rounds:
                place[row] += found.accepted_per_round[number] + 1
    return Log(
        torch.stack(confidence), {name: torch.stack(parts) for name, parts in tokens.items()}, torch.stack(counts)
    )


def accepted(tree: DraftTree, text_BT: Tensor, place_B: Tensor) -> Tensor:
    """How many drafts the target would accept whose text after the root goes on as given."""
    index = torch.arange(len(place_B))
    host = replace(tree, **{name: getattr(tree, name).cpu() for name in FIELDS})
    last = text_BT.shape[1] - 1
    return walk(host, lambda _, depth: text_BT[index, (place_B + 1 + depth).clamp(max=last)])[1]


def measured_costs(
    run: Callable[..., Decoded], settings: Settings, batches: Sequence["Batch"], matrix: SuccessorMatrix
) -> dict[str, list[float]]:
    """Milliseconds of a round by decoder and by the stage that stopped all rows, the last one none: medians over
    batches, interleaved, after one run each that counts for nothing."""
    gates = len(levels(settings.depth))
    kinds = [(name, stage) for name in CALIBRATED for stage in range(gates + 1)]
    found: dict[tuple[str, int], list[float]] = {kind: [] for kind in kinds}
    for number, (prompts, row_ids) in enumerate([batches[0], *batches]):
        for name, stage in kinds:
            shut = tuple(float(gate == stage) for gate in range(gates))
            forced = replace(settings, decoder=name, gates=shut, max_new_tokens=COST_TOKENS, graft_fill="always")
            decoded = run(prompts, forced, matrix=matrix.copy() if name == "graft" else None, row_ids=row_ids)
            if number and decoded.rounds_total:
                found[name, stage].append(1000 * decoded.decode_seconds / decoded.rounds_total)
    if not all(found.values()):
        raise UserError("calibration needs validation prompts that the target answers with more than one token")
    return {name: [statistics.median(found[name, stage]) for stage in range(gates + 1)] for name in CALIBRATED}


def speed(log: Log, decoder: str, costs: list[float], gates: Sequence[float]) -> float:
    """Tokens a second of the logged rounds under these gates; a batch round costs what its last row to stop does."""
    stage = torch.full(log.counts.shape, len(costs) - 1)
    for gate in reversed(range(len(gates))):
        stage = stage.masked_fill(log.confidence[..., gate] <= gates[gate], gate)
    tokens = log.tokens[decoder].gather(2, stage.unsqueeze(2)).squeeze(2)
    last = stage.masked_fill(~log.counts, -1).amax(1)
    cost = torch.tensor(costs, dtype=torch.float64)[last[last >= 0]].sum()
    return 1000 * float((tokens * log.counts).sum()) / float(cost)


def choose(log: Log, decoder: str, costs: list[float]) -> list[float]:
    """One gate after the other, each given those before it; of equally good thresholds the smallest."""
    gates: list[float] = []
    for _ in range(len(costs) - 1):
        gates.append(max(GRID, key=lambda threshold: (speed(log, decoder, costs, [*gates, threshold]), -threshold)))
    return gates


Batch = tuple[list[list[int]], list[int]]  # prompts of one call, and their row ids


def batches_of(recipe: Recipe, target: Target, prompts: Sequence[Prompt]) -> list[Batch]:
    """All prompts that fit, first turns alone, in batches of the recipe's size."""
    limit, size = longest_prompt(target, replace(recipe.eval, max_new_tokens=TOKENS)), recipe.eval.batch_size
    named = [(encode(target, recipe, prompt), row_id(prompt.id, 0)) for prompt in prompts]
    fitting = [(ids, row) for ids, row in named if len(ids) <= limit]
    if not fitting:
        raise UserError(f"calibration needs validation prompts of at most {limit} tokens. Raise eval.max_prompt")
    fitting += islice(cycle([*fitting]), -len(fitting) % size)
    parts = [fitting[start : start + size] for start in range(0, len(fitting), size)]
    return [([ids for ids, _ in part], [row for _, row in part]) for part in parts]


def calibrate(
    recipe: Recipe, target: Target, drafter: Drafter, prompts: Sequence[Prompt]
) -> tuple[dict[str, Any], SuccessorMatrix]:
    """What calibrated.json holds, less what names the drafter; and the matrix as the prompts left it."""
    drafter, e, run = in_dtype(drafter, target.dtype), recipe.eval, decode_keeping()
    batches, matrix = batches_of(recipe, target, prompts), new_matrix(target)
    settings = settings_of("graft", e, max_new_tokens=TOKENS)
    logs = []
    for number, batch in enumerate(batches):
        logs.append(watch(target, drafter, settings, batch, matrix))
        print(f"watched {number + 1} of {len(batches)} batches", flush=True)
    log = joined(logs)
    if not log.counts.any():
        raise UserError("calibration needs longer answers: none of the target's goes on far enough to judge a draft")

    def decoded(prompts: list[list[int]], settings: Settings, **more: Any) -> Decoded:
        return run(target, drafter, prompts, settings, **more)

    costs = measured_costs(decoded, settings, batches[:COST_BATCHES], matrix)
    record: dict[str, Any] = {
        "schema": 1,
        "target": target.fingerprint,
        "measured_on": environment(target),
        "shape": {"nodes": e.nodes, "depth": e.depth, "branch": e.branch},
        "batch_size": e.batch_size,
        "temperature": e.temperature,
        "prompts": len(prompts),
        "prompts_sha256": sha256_json([prompt.turns[0] for prompt in prompts]),
        "rounds": int(log.counts.sum()),
        "gates": {},
        "expected": {},
    }
    for name in CALIBRATED:
        gates = choose(log, name, costs[name])
        record["gates"][name] = [*gates, *PUBLISHED_GATES[len(gates) :]]
        record["expected"][name] = {
            "ms_a_round_by_stage": costs[name],
            "tokens_a_round_by_stage": log.tokens[name][log.counts].double().mean(0).tolist(),
            "tokens_per_s": speed(log, name, costs[name], gates),
            "tokens_per_s_open": speed(log, name, costs[name], [0.0] * len(gates)),
        }
    return record, matrix


def joined(logs: Sequence[Log]) -> Log:
    tokens = {name: torch.cat([log.tokens[name] for log in logs]) for name in CALIBRATED}
    return Log(torch.cat([log.confidence for log in logs]), tokens, torch.cat([log.counts for log in logs]))


def main(recipe: Recipe) -> None:
    """Calibrate, and store gates and matrix beside the drafter."""
    from eval.run import check_models, drafter_folder, load

    refuse_unread(recipe, "eval.calibrate", "prompts", "decoder", "out")
    check_settings(recipe)
    source, prompts = check_models(recipe), warmup_prompts()
    folder = check_writable(drafter_folder(recipe))
    check_writable((folder / MATRIX_FILE).parent)
    if is_flexdraft(folder):
        raise UserError("eval.calibrate is for EAGLE-3 drafters: a FlexDraft drafter has nothing for it to choose yet")
    if source is not None:
        longer = replace(recipe, eval=replace(recipe.eval, max_new_tokens=TOKENS))
        check_prompts(source, load_tokenizer(source, recipe.target.trust_remote_code), longer, prompts)
    if recipe.dry_run:
        print(OmegaConf.to_yaml(OmegaConf.structured(recipe)))
        print(f"{len(prompts)} validation prompts, {TOKENS} tokens each; {FILE} and {MATRIX_FILE} go to {folder}")
        return
    target, drafter, folder = load(recipe)
    found = attempt(partial(calibrate, recipe, target, drafter, prompts))
    if found is None:
        raise too_many(recipe.eval.batch_size)
    record, matrix = found
    record["drafter"] = weights_hash(folder)
    save_matrix(matrix, folder / MATRIX_FILE, target.fingerprint)
    write_json(folder / FILE, record)
    for name in CALIBRATED:
        gates, expected = record["gates"][name], record["expected"][name]
        figures = (
            f"{expected['tokens_per_s']:.1f} tokens/s expected, {expected['tokens_per_s_open']:.1f} with open gates"
        )
        print(f"{name}: gates {'/'.join(f'{gate:g}' for gate in gates)}; {figures}")
    print(f"{words(record)}; written to {folder / FILE}")
    print(f"{matrix.filled} matrix rows written to {folder / MATRIX_FILE}")


if __name__ == "__main__":
    entry(main)

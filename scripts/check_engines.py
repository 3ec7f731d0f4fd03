"""Espalier's half of scripts/check_engines.sh: decode with our own chain decoder, then compare with what vLLM did.

    python scripts/check_engines.py decode WORK recipe=smollm2 DRAFTER [DRAFTER ...] [prompts=20] [new=64] [length=3]
    python scripts/check_engines.py compare WORK recipe=smollm2 ... [out=DIR]

Greedy, float32, the first turns of prompts that ship with Espalier. Outputs must be the same tokens. Accepted drafts
are compared at every round that starts at the same token in both; a difference is excused only where the drafter's own
choice is a proven near-tie: the token that one of the two drafted is within 1e-4 of its best logit in float32 and in
float64.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from data_prep.prompts import load_prompts
from eval.decode import decode
from eval.lossless import NEAR_TIE, Referee
from eval.outcome import encode, warmup_prompts
from eval.settings import Settings
from models.attention import Documents
from models.facts import read_facts
from models.kinds import look
from models.layouts import load_drafter
from models.taps import engine_taps
from models.target import load_target
from recipes.cli import told
from recipes.files import make_folder, write_json, write_text
from recipes.loading import load
from recipes.schema import UserError

SLOTS = 8  # rows decoded side by side


def arguments(words):
    """(recipe, drafters, numbers, out)."""
    known = {"prompts": 20, "new": 64, "length": 3}
    drafters, out, rest = [], "", []
    for word in words:
        key, _, value = word.partition("=")
        if key in known and value.isdigit():
            known[key] = int(value)
        elif key == "out":
            out = value
        elif "=" in word:
            rest.append(word)
        else:
            drafters.append(str(Path(word).expanduser().resolve()))
    if not drafters:
        raise UserError("no drafter given: scripts/check_engines.sh recipe=smollm2 DRAFTER [DRAFTER ...]")
    return load([*rest, "target.dtype=float32", "device=cpu"]), drafters, known, out


def run(mode, work, words):
    recipe, drafters, n, out = arguments(words)
    targets = {}
    loaded = {name: load_pair(recipe, Path(name), targets=targets) for name in drafters}
    if mode == "decode":
        write_json(work / "ours.json", ours(recipe, loaded, n))
        return
    theirs, mine = (json.loads((work / f"{name}.json").read_text()) for name in ("vllm", "ours"))
    rows = [compare(recipe, *loaded[name], mine, theirs, name) for name in mine["drafters"]]
    text = table(rows, mine, theirs)
    print(text)
    if out:
        write_text(make_folder(Path(out)) / "engines.md", text + "\n")
        write_json(Path(out) / "engines.json", {"ours": mine, "vllm": theirs, "rows": rows})
    if not all(row["good"] for row in rows):
        sys.exit(1)


def load_pair(recipe, folder, dtype=torch.float32, targets=None):
    """The target, giving the states that this drafter reads, and the drafter. `targets`: those loaded, by taps."""
    facts = read_facts(folder)
    taps = engine_taps(facts, look(facts))["vLLM"] or recipe.target.taps
    targets = {} if targets is None else targets
    if tuple(taps) not in targets:
        targets[tuple(taps)] = load_target(replace(recipe.target, taps=taps), "cpu", dtype)
    target = targets[tuple(taps)]
    return target, load_drafter(folder, target).to(dtype)


def ours(recipe, loaded, n):
    prompts = [*load_prompts("report"), *warmup_prompts()][: n["prompts"]]
    if len(prompts) < n["prompts"]:
        raise UserError(f"prompts={n['prompts']}: only {len(prompts)} ship with Espalier")
    first = next(iter(loaded.values()))[0]
    ids = [encode(first, recipe, prompt) for prompt in prompts]
    plain = Settings("ar", max_new_tokens=n["new"])
    chain = Settings("chain", max_new_tokens=n["new"], depth=n["length"], branch=1, nodes=n["length"])
    found = {}
    for name, (target, drafter) in loaded.items():
        twin = next((other for other in found if same(drafter, loaded[other][1])), None)
        if twin is None:  # one that another layout holds is decoded once
            rows = decode(target, drafter, ids, chain, slots=SLOTS).rows
            found[name] = {"tokens": [r.tokens for r in rows], "accepted": [r.accepted_per_round for r in rows]}
        else:
            found[name] = found[twin]
    return {
        "folder": str(first.folder.resolve()),
        "prompts": ids,
        "ends": sorted(first.eos_ids),
        "new": n["new"],
        "length": n["length"],
        "max_length": max(map(len, ids)) + n["new"] + n["length"] + 1,
        "plain": [row.tokens for row in decode(first, None, ids, plain, slots=SLOTS).rows],
        "drafters": found,
    }


def same(one, other):
    """Whether the two drafters are equal to the last bit."""
    if one.config != other.config or not torch.equal(one.vocab.d2t, other.vocab.d2t):
        return False
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def compare(recipe, target, drafter, mine, theirs, name):
    """One row of the table, and whether all of it is as it must be."""
    prompts, our, their = mine["prompts"], mine["drafters"][name], theirs["drafters"][name]
    referee, judge = Referee(target.model), DraftJudge(recipe, name, target, drafter)
    row = {"drafter": name, "outputs": {}, "rounds": 0, "equal": 0, "near_ties": 0, "wrong": []}
    row["ours"] = row["theirs"] = 0
    for number, ids in enumerate(prompts):
        texts = [theirs["plain"][number], their["tokens"][number], our["tokens"][number]]
        for text in texts:
            verdict = referee.compare(ids, mine["plain"][number], text)
            row["outputs"][verdict] = row["outputs"].get(verdict, 0) + 1
        whole = texts[1] == texts[2]
        common = texts[1][: next((i for i, (a, b) in enumerate(zip(*texts[1:], strict=False)) if a != b), None)]
        counts = [rounds(common, our["accepted"][number], whole), rounds(common, their["accepted"][number], whole)]
        row["ours"], row["theirs"] = (row[k] + sum(c.values()) for k, c in zip(("ours", "theirs"), counts, strict=True))
        for start in sorted(counts[0].keys() & counts[1].keys()):
            a, b = counts[0][start], counts[1][start]
            row["rounds"] += 1
            row["equal"] += a == b
            if a != b:
                gaps = judge.gaps(ids + common, len(ids) + start, min(a, b))
                row["near_ties"] += max(gaps) < NEAR_TIE
                if max(gaps) >= NEAR_TIE:
                    row["wrong"].append({"prompt": number, "token": start, "ours": a, "vllm": b, "gaps": gaps})
    row["weights"] = their["weights"]
    row["unlike"] = [
        n for n, how in row["weights"].items() if isinstance(how, str) and how.startswith(("never", "diff"))
    ]
    row["good"] = not (row["outputs"].get("diverged") or row["wrong"] or row["unlike"])
    return row


def rounds(tokens, accepted, whole):
    """{tokens before the round: accepted drafts} of rounds that lie inside `tokens`; the last one may have been cut."""
    found, start = {}, 1  # the first token is the prefill's
    for count in accepted:
        if start + count + 1 > len(tokens) - (not whole):
            break
        found[start] = count
        start += count + 1
    return found


class DraftJudge:
    """How far a token is below the drafter's best logit at one place of one chain, in float32 and in float64."""

    def __init__(self, recipe, name, target, drafter):
        self.recipe, self.name, self.narrow, self.wide = recipe, name, (target, drafter), None

    @torch.no_grad()
    def gaps(self, ids, committed, depth):
        """After `committed` tokens, the draft at `depth`, those before it being the text's own."""
        self.wide = self.wide or load_pair(self.recipe, Path(self.name), torch.float64)
        return [self._gap(*pair, ids, committed, depth) for pair in (self.narrow, self.wide)]

    def _gap(self, target, drafter, ids, committed, depth):
        row = torch.tensor(ids)
        slots = committed - 1  # the last of them reads the last committed token
        taps = target.features(row[None, :slots]).taps_BTC[0]
        states = drafter.unroll(taps, target.embed(row[1:]), depth + 1, Documents([slots], target.device))
        logits = drafter.logits([*states][depth][-1])
        place = int(drafter.vocab.to_draft(row[committed + depth]))
        return float("inf") if place < 0 else float(logits.max() - logits[place])


def table(rows, mine, theirs):
    """Markdown; one row a drafter."""
    n = len(mine["prompts"])
    head = (
        f"vLLM {theirs['version']} (CPU, float32) against Espalier's chain decoder: {n} prompts, {mine['new']} new "
        f"tokens, drafts of {mine['length']}, greedy. Outputs: "
        "those of vLLM without and with the drafter and ours with it, beside ours without.",
        "",
        "| drafter | equal outputs | rounds compared | equal counts | near-ties | accepted, ours / vLLM | weights |",
        "|---|---|---|---|---|---|---|",
    )
    lines = [*head]
    for row in rows:
        texts = row["outputs"]
        said = f"{texts.get('identical', 0)} of {3 * n}" + "".join(
            f", {texts[k]} {word}" for k, word in (("near_tie", "near-ties"), ("diverged", "DIFFERENT")) if k in texts
        )
        errors = [how for how in row["weights"].values() if isinstance(how, float)]
        held = f"{len(row['weights'])} of {len(row['weights'])}" if not row["unlike"] else f"WRONG: {row['unlike']}"
        held += f", products within {max(errors):.1e}" if errors else ""
        lines.append(
            f"| {row['drafter']} | {said} | {row['rounds']} | {row['equal']} | {row['near_ties']} | "
            f"{row['ours']} / {row['theirs']} | {held} |"
        )
        lines += [f"\nWRONG COUNT: {wrong}" for wrong in row["wrong"]]
    return "\n".join([*lines, "", "all as it must be" if all(row["good"] for row in rows) else "NOT AS IT MUST BE"])


if __name__ == "__main__":
    told(lambda: run(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))

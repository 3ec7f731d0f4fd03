"""What each acceptance rule keeps of a drafter: tau and tokens/s on real prompts, drafts greedy and sampled.

    python scripts/bench_verifiers.py recipe=NAME drafter=DIR prompts=FILE.jsonl [temperatures=1.0,0.6] [lengths=4,8]
        [paths=4] [batch=120] [tokens=96] [seconds=200] [rules=block,traversal] [out=FILE.md]

First turns only. Greedy drafts are a chain, and for K > 1 EAGLE's tree of K L nodes, L deep; sampled ones are K paths
of L at the target's own temperature and top-p. Intervals: 95 %, paired bootstrap over prompts, against token
verification at the same temperature and length. What `seconds` leave no time for is named and left out. Other words are
overrides of the recipe.
"""

import gc
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data_prep.prompts import load_prompts
from eval import stats
from eval.decode import decode
from eval.engine import Engines
from eval.outcome import encode, in_dtype, longest_prompt
from eval.results import environment
from eval.rules import TABLE
from eval.run import check, load
from eval.settings import Settings
from models.eagle3 import Eagle3
from models.target import Target
from recipes.cli import entry
from recipes.files import write_text
from recipes.schema import Recipe, UserError

OWN = {"temperatures": "1.0,0.6", "lengths": "4,8", "paths": "4", "batch": "120", "tokens": "96", "seconds": "200",
       "rules": "", "out": ""}  # fmt: skip
FIRST_TOKENS = 24  # of an untimed first call, in which a GPU's steps are captured
BASE = "token"


@dataclass
class Row:
    """One setting on all prompts: a number a prompt in each list."""

    settings: Settings
    drafts: str
    emitted: list[int] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def key(self) -> tuple[float, int]:
        return self.settings.temperature, self.settings.depth

    @property
    def tau(self) -> float:
        return stats.ratio(self.emitted, self.rounds)

    @property
    def speed(self) -> float:
        return sum(self.emitted) / max(self.seconds, 1e-9)


def cases(temperature: float, length: int, most_paths: int, top_p: float, rules: Sequence[str]) -> Iterator[Row]:
    """Every way to draft and to judge `length` tokens, token verification first: the others are compared with it."""
    base = Settings("chain", temperature=temperature, top_p=top_p, depth=length, nodes=length, branch=1)
    sampled = replace(base, draft_temperature=temperature, draft_top_p=top_p)
    names = [name for name in rules if name != BASE]
    yield Row(replace(sampled, verifier=BASE), "sampled")
    yield Row(base, "greedy")
    yield from (Row(replace(sampled, verifier=rule), "sampled") for rule in names if rule in ("block", "match"))
    for paths in range(most_paths, 1, -1):
        tree = replace(base, decoder="eagle", branch=paths, nodes=paths * length)
        yield Row(replace(tree, paths=1), "greedy")
        several = [rule.name for rule in TABLE if rule.several and rule.name != "tree"] + ["match"]
        yield from (Row(replace(sampled, verifier=rule, paths=paths), "sampled") for rule in several if rule in names)


def paths_of(row: Row) -> int:
    return row.settings.branch if row.settings.decoder == "eagle" else row.settings.paths


def measure(row: Row, target: Target, drafter: Eagle3, prompts: Sequence[list[int]], batch: int, tokens: int) -> None:
    """Decode all prompts by one setting, in engines of its own: captured steps keep what they allocate."""
    engines = Engines(longest=max(map(len, prompts)))
    helper = drafter if row.settings.drafts else None
    for start in range(0, len(prompts), batch):
        part = [*prompts[start : start + batch]]
        ids = [*range(start, start + len(part))]
        if start == 0 or len(part) < batch:
            decode(
                target,
                helper,
                part,
                replace(row.settings, max_new_tokens=min(tokens, FIRST_TOKENS)),
                row_ids=ids,
                engines=engines,
            )
        found = decode(target, helper, part, replace(row.settings, max_new_tokens=tokens), row_ids=ids, engines=engines)
        row.emitted += [r.emitted for r in found.rows]
        row.rounds += [r.rounds for r in found.rows]
        row.seconds += found.decode_seconds
    del engines
    gc.collect()
    if target.device.type == "cuda":
        torch.cuda.empty_cache()


def compare(
    target: Target, drafter: Eagle3, prompts: Sequence[list[int]], top_p: float, options: dict[str, str]
) -> tuple[list[Row], list[Row]]:
    """(rows measured, rows that there was no time for); plain decoding of each temperature first."""
    begun, most = time.perf_counter(), float(options["seconds"])
    batch, tokens = int(options["batch"]), int(options["tokens"])
    rules = (
        options["rules"].split(",")
        if options["rules"]
        else [rule.name for rule in TABLE if rule.name != "tree"] + ["match"]
    )
    heats, lengths = (
        [float(x) for x in options["temperatures"].split(",")],
        [int(x) for x in options["lengths"].split(",")],
    )
    todo = [Row(Settings("ar", temperature=heat, top_p=top_p), "-") for heat in heats]
    todo += [
        row for heat in heats for length in lengths for row in cases(heat, length, int(options["paths"]), top_p, rules)
    ]
    done: list[Row] = []
    for number, row in enumerate(todo):
        spent = time.perf_counter() - begun
        if spent > most:
            return done, todo[number:]
        measure(row, target, drafter, prompts, batch, tokens)
        done.append(row)
        print(f"{spent:6.1f} s  {name(row)}: tau {row.tau:.3f}, {row.speed:.0f} tokens/s", flush=True)
    return done, []


def name(row: Row) -> str:
    s = row.settings
    if s.decoder == "ar":
        return f"T={s.temperature:g} ar"
    return f"T={s.temperature:g} L={s.depth} K={paths_of(row)} {row.drafts} {s.verifier}"


def table(rows: Sequence[Row]) -> str:
    """Markdown: one line a setting, ordered by temperature, length, paths."""
    lines = [
        "| T | L | K | drafts | rule | tau [95 %] | tau over token verification's [95 %] | tokens/s |",
        "|---" * 8 + "|",
    ]
    base = {row.key: row for row in rows if row.settings.verifier == BASE}
    lossy = {rule.name for rule in TABLE if not rule.lossless}
    for row in sorted(
        rows, key=lambda r: (r.settings.temperature, r.settings.decoder != "ar", r.settings.depth, paths_of(r))
    ):
        s, plain = row.settings, row.settings.decoder == "ar"
        interval = stats.ratio_interval(row.emitted, row.rounds)
        tau = f"{row.tau:.2f}" + (f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval and not plain else "")
        against = ""
        if row.key in base and not plain and row is not base[row.key]:
            other = base[row.key]
            ratio = row.tau / other.tau if other.tau else 0.0
            around = stats.speedup_interval(row.emitted, row.rounds, other.emitted, other.rounds)
            against = f"{ratio:.3f}" + (f" [{around[0]:.3f}, {around[1]:.3f}]" if around else "")
        rule = s.verifier + (" (**not lossless**)" if s.verifier in lossy else "")
        cells = ["-", "-", "ar", "-"] if plain else [str(s.depth), str(paths_of(row)), row.drafts, rule]
        lines.append(f"| {s.temperature:g} | {' | '.join(cells)} | {tau} | {against} | {row.speed:.0f} |")
    return "\n".join(lines)


def bench(recipe: Recipe, options: dict[str, str]) -> str:
    """Load, measure, and return the table with its heading; written to `out` if that is given."""
    check(recipe)
    target, drafter, _ = load(recipe)
    drafter = in_dtype(drafter, target.dtype)
    if not isinstance(drafter, Eagle3):
        raise UserError("scripts/bench_verifiers.py is for EAGLE-3 drafters: a FlexDraft drafter samples no drafts")
    named = load_prompts(recipe.prompts or recipe.eval.prompts, recipe.eval.limit)
    e = replace(recipe.eval, max_new_tokens=int(options["tokens"]))
    encoded = [encode(target, recipe, replace(prompt, turns=prompt.turns[:1])) for prompt in named]
    prompts = sorted((ids for ids in encoded if len(ids) <= longest_prompt(target, e)), key=len)
    rows, left = compare(target, drafter, prompts, e.top_p, options)
    about = environment(target)
    heading = (
        f"{about['hardware']}, {about['dtype']}, torch {about['torch']}; {len(prompts)} prompts, at most "
        f"{options['tokens']} new tokens, batch {options['batch']}, top_p {e.top_p:g}; drafter of "
        f"{drafter.vocab.size} tokens, sampled at the target's temperature."
    )
    text = f"{heading}\n\n{table(rows)}\n"
    if left:
        text += f"\nNo time was left for: {', '.join(name(row) for row in left)}.\n"
    if options["out"]:
        write_text(Path(options["out"]).expanduser(), text)
    return text


def checked(mine: dict[str, str]) -> dict[str, str]:
    """This script's own words, refused by name where they are not the numbers or rules that they should be."""
    rules = [*(rule.name for rule in TABLE), "match"]
    for key, value in mine.items():
        listed = key in ("temperatures", "lengths")
        try:
            found = (
                [float(x) if key in ("temperatures", "seconds") else int(x) for x in value.split(",")]
                if key not in ("rules", "out")
                else [1]
            )
        except ValueError:
            found = []
        if not found or min(found) <= 0 or (len(found) > 1 and not listed):
            kind = "numbers above 0, with commas between them" if listed else "one number above 0"
            raise UserError(f"{key}={value}: must be {kind}")
        unknown = [name for name in value.split(",") if key == "rules" and value and name not in rules]
        if unknown:
            raise UserError(f"rules={value}: {unknown[0]} is not one of {', '.join(rules)}")
    return OWN | mine


def main(argv: list[str]) -> None:
    mine = dict(word.split("=", 1) for word in argv if word.partition("=")[0] in OWN)
    rest = [word for word in argv if word.partition("=")[0] not in OWN]
    entry(lambda recipe: print(bench(recipe, checked(mine))), rest)


if __name__ == "__main__":
    main(sys.argv[1:])

"""What an evaluation runs: the recipe's settings checked, and one Entry for each decoder of the table."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from eval.matrix_file import is_file
from eval.rules import BEST_OF_ONE, BEST_OF_SEVERAL, RULES, rule_of, words
from eval.settings import GATED, LINES, PARALLEL, PUBLISHED_GATES, Settings
from recipes.rules import validate
from recipes.schema import DECODERS, DRAFTED, EvalConfig, Recipe, UserError


@dataclass(frozen=True)
class Entry:
    """One row of the table: a decoder with its settings, and the state that its matrix, if any, starts from."""

    label: str
    settings: Settings
    matrix: str = ""  # "" (no matrix) | cold | carried | warm-N | FILE.safetensors
    timed: bool = True  # False: run in batches for tau alone
    gates_from: str = ""  # where the gates of `graft` and `prune` come from, in words


def check_settings(recipe: Recipe) -> None:
    """Refuse settings that no decoder can honour. Needs neither weights nor prompts."""
    validate(recipe)
    warm_prompts(recipe.eval.matrix)
    for settings in judged(recipe):
        rule_of(settings)


def refuse_unread(recipe: Recipe, command: str, *keys: str) -> None:
    """Refuse what a command would pass over without a word."""
    for key in keys:
        if value := getattr(recipe, key):
            raise UserError(f"{key}={value}: {command} does not read that. Leave it out")


def judged(recipe: Recipe) -> list[Settings]:
    """The settings whose rule is asked for: `chain`'s, or those that eval.verifier is given with in vain."""
    e = recipe.eval
    names = [recipe.decoder] if recipe.decoder else e.decoders
    if "chain" in names:
        return [settings_of("chain", e)]
    given = {} if e.verifier == "auto" else {"verifier": e.verifier}
    return [settings_of(name, e, **given) for name in names if given and name != "ar"]


def warm_prompts(matrix: str) -> int:
    """N of `warm-N`; 0 for `cold`, `carried` and a file. Anything else is refused."""
    if matrix in ("", "cold", "carried") or is_file(matrix):
        return 0
    found = re.fullmatch(r"warm-(\d+)", matrix)
    if not found or int(found[1]) < 1:
        raise UserError(
            f"eval.matrix: {matrix!r} is not a state of the successor matrix. Use cold, carried or warm-N (N >= 1)"
        )
    return int(found[1])


DEPTHS = {"lookup": 10, "suffix": 40, "talon": 16}  # as published; TALON's has no cap, ours is the schema's


def settings_of(decoder: str, e: EvalConfig, **changes: Any) -> Settings:
    """The recipe's settings for one decoder; a line is a tree without branches."""
    depth = e.chain_length if decoder in ("chain", "flex") else DEPTHS.get(decoder, e.depth)
    line = decoder in LINES
    policy = sampling_of(e, changes.get("temperature", e.temperature)) if decoder == "chain" else {}
    settings = Settings(
        decoder=decoder,
        max_new_tokens=e.max_new_tokens,
        temperature=e.temperature,
        top_p=e.top_p,
        top_k=e.top_k,
        seed=e.seed,
        depth=depth,
        branch=1 if line else e.branch,
        nodes=depth if line else e.nodes,
        gates=(e.flex_threshold,) if decoder == "flex" else tuple(e.gates) or PUBLISHED_GATES,
        graft_fill=e.graft_fill,
        parallel=decoder in PARALLEL and e.flex_mode == "parallel",
        **policy,
    )
    return replace(settings, **changes)


POLICY = ("verifier", "paths", "draft_temperature", "draft_top_p")  # of Settings: how `chain` drafts and is judged


def sampling_of(e: EvalConfig, temperature: float) -> dict[str, Any]:
    """How `chain` drafts and is verified: with eval.verifier=auto greedily at temperature 0, and above it sampled with
    the best rule that was measured. Unless it is given, the draft temperature is the target's where a rule asks for
    laws, and 0 where none does."""
    verifier, heat = e.verifier, e.draft_temperature
    if verifier == "auto":
        sampled = temperature > 0 if heat is None else heat > 0
        verifier = (BEST_OF_ONE if e.paths == 1 else BEST_OF_SEVERAL) if sampled else "match"
    if heat is None:
        heat = temperature if verifier in RULES and RULES[verifier].laws else 0.0
    return {"verifier": verifier, "paths": e.paths, "draft_temperature": heat, "draft_top_p": e.draft_top_p}


def policies(e: EvalConfig) -> list[dict[str, Any]]:
    """Ways for `chain` to draft and to be judged, for the tuner to choose among: changes of Settings. Where the recipe
    names a rule, paths or a draft temperature, and at temperature 0, there is nothing to choose."""
    if e.temperature == 0 or e.verifier != "auto" or e.paths > 1 or e.draft_temperature is not None:
        return [{}]
    rules = [("match", 1, 0.0), (BEST_OF_ONE, 1, e.temperature)]
    rules += [(BEST_OF_SEVERAL, paths, e.temperature) for paths in (2, 4)]
    return [{"verifier": rule, "paths": paths, "draft_temperature": heat} for rule, paths, heat in rules]


def plan(
    recipe: Recipe,
    tuned: dict[str, Any] | None = None,
    drafter: bool = True,
    calibrated: dict[str, Any] | None = None,
) -> list[Entry]:
    """The rows of the table, `ar` first.

    With tuned settings each has its best, but `eagle` and `graft` share the budget of the faster of the two, so that
    their difference is what retrieval brings; the recipe's own chain length is kept beside them, for tau alone. Gates
    are the tuned ones, else the recipe's, else those that were `calibrated`.
    """
    check_settings(recipe)
    e = recipe.eval
    names = [recipe.decoder] if recipe.decoder else list(dict.fromkeys(e.decoders))
    names = [name for name in DECODERS if (name in names and (drafter or name not in DRAFTED)) or name == "ar"]
    shapes = tuned_shapes(tuned, names) if tuned else {}
    entries = []
    for name in names:
        gates, words = gates_of(name, e, shapes, calibrated)
        settings = settings_of(name, e, **{**gates, **shapes.get(name, {})})
        row = Entry(name, settings, matrix=e.matrix if settings.remembers else "", gates_from=words)
        entries.append(row)
        if name == "chain" and settings.depth != e.chain_length:
            entries.append(Entry(f"chain-{e.chain_length}", settings_of(name, e), timed=False))
        if name == "graft" and e.matrix != "cold":
            entries.append(replace(row, label="graft-cold", matrix="cold"))
    return entries


def batch_sizes(e: EvalConfig) -> list[int]:
    """Of the sweep, ascending; without one, the one batch size there is."""
    return sorted(set(e.batch_sizes)) or [e.batch_size]


def at_batch(recipe: Recipe, size: int) -> Recipe:
    return replace(recipe, eval=replace(recipe.eval, batch_size=size))


def gates_of(
    name: str, e: EvalConfig, shapes: dict[str, dict[str, Any]], calibrated: dict[str, Any] | None
) -> tuple[dict[str, Any], str]:
    """Changes of Settings, and where the gates come from in words; nothing for a decoder without gates."""
    if name not in GATED:
        return {}, ""
    if name in shapes:
        theirs = e.gates and calibrated is None
        return {}, "the recipe's, or higher ones by the tuner's choice" if theirs else "the tuner's choice"
    if calibrated is not None:  # only where the recipe, as it was given, names none
        return own_gates(name, calibrated), calibrated["words"]
    if e.gates:
        return {}, "the recipe's"
    return {}, "published for another target; eval.calibrate finds those of an EAGLE-3 drafter"


def own_gates(name: str, calibrated: dict[str, Any] | None) -> dict[str, Any]:
    """Changes of Settings: the gates that eval.calibrate found for this decoder; nothing where it found none."""
    if calibrated is None or name not in GATED:
        return {}
    return {"gates": tuple(calibrated["gates"]["graft" if name == "splice" else name])}


def asked(recipe: Recipe) -> dict[str, Any]:
    """What of the recipe shapes the table beside the tuner's choice: a change of it asks for new tuning."""
    e = recipe.eval
    names = [recipe.decoder] if recipe.decoder else list(e.decoders)
    shape = {"nodes": e.nodes, "depth": e.depth, "branch": e.branch, "gates": list(e.gates), "graft_fill": e.graft_fill}
    rule = {key: getattr(e, key) for key in POLICY}
    flex = {"flex_mode": e.flex_mode, "flex_threshold": e.flex_threshold}
    return {"decoders": names, "chain_length": e.chain_length, **shape, **rule, **flex}


def tuned_shapes(tuned: dict[str, Any], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """{decoder: changes of Settings} from tuned.json; where both are wanted, eagle and graft brought to one budget."""
    best = tuned["best"]
    shapes = {name: {"depth": b["depth"], "branch": b["branch"], "nodes": b["nodes"]} for name, b in best.items()}
    for name in (*GATED, "flex"):
        if name in best:
            shapes[name] |= {"gates": tuple(best[name]["gates"]), "parallel": best[name]["parallel"]}
    if "chain" in best:
        shapes["chain"] |= {key: best["chain"][key] for key in POLICY}
    if all(name in best and name in names for name in ("eagle", "graft")):
        leader, other = (
            ("graft", "eagle") if best["graft"]["tokens_per_s"] >= best["eagle"]["tokens_per_s"] else ("eagle", "graft")
        )
        for key in ("depth", "branch", "nodes"):
            shapes[other][key] = shapes[leader][key]
    return shapes


def describe(settings: Settings) -> str:
    """The draft's shape in words, for tables."""
    if settings.decoder == "ar":
        return "one token a step"
    if settings.samples:
        many = f"{settings.paths} paths of " if settings.paths > 1 else ""
        rule = RULES.get(settings.verifier)
        biased = "" if rule is None or rule.lossless else ", not lossless"
        return f"{many}{settings.depth} sampled drafts, {settings.verifier}{biased}"
    if settings.decoder == "chain":
        return f"{settings.depth} draft{'s' if settings.depth > 1 else ''} in a row"
    if settings.decoder == "flex":
        mode = "parallel" if settings.parallel else "sequential"
        return f"{mode}, at most {settings.depth} drafts in a row, likelier together than {settings.gates[0]:g}"
    if settings.decoder in LINES:
        return f"at most {settings.depth} copied tokens in a row"
    if settings.decoder == "recycle":
        return f"{settings.nodes} retrieved nodes"
    if settings.decoder == "talon":
        return f"{settings.nodes} nodes, depth at most {settings.depth}, top-{settings.branch}"
    shape = f"{settings.nodes} nodes, depth {settings.depth}, top-{settings.branch}"
    if settings.decoder in GATED:
        shape += ", gates " + "/".join(f"{gate:g}" for gate in settings.gates)
    if settings.remembers and settings.graft_fill == "always":
        shape += ", always filled"
    if settings.parallel:
        shape += ", drafted in parallel"
    return shape


def settings_record(entry: Entry, batch_size: int) -> dict[str, Any]:
    """The `settings` of results.json. `top_k` is the sampler's; the tree's is `branch`."""
    record = asdict(entry.settings)
    record["gates"] = list(entry.settings.gates)
    return {
        **record,
        "batch_size": batch_size,
        "matrix": entry.matrix or "none",
        "timed": entry.timed,
        "verification": words(entry.settings),
        "gates_from": entry.gates_from,
    }

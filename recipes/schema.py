"""The recipe: one frozen dataclass tree that every room may know.

A recipe is a YAML file in `recipes/` (or a path to one) laid over these defaults, then dotted `key=value` overrides.
Unknown keys are refused with the nearest known one named.
"""

import dataclasses
import difflib
import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

HERE = Path(__file__).parent
DECODERS = ("ar", "chain", "eagle", "talon", "prune", "recycle", "lookup", "suffix", "graft", "splice")
DRAFTED = ("chain", "eagle", "talon", "prune", "graft", "splice")  # those that ask a drafter
VERIFIERS = (
    "match", "tree", "token", "block", "greedy_block", "spectr", "multipath", "traversal", "promoted", "spectr_gbv"
)  # fmt: skip
KINDS = ("file", "hub", "self")  # of data.sources
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
# What `validate` asks of single keys; rules that join several are in it.
CHOICES: dict[str, tuple[str, ...]] = {
    "device": ("auto", "cpu", "cuda"),
    "target.dtype": DTYPES,
    "data.dtype": DTYPES,
    "eval.dtype": DTYPES,
    "train.precision": ("auto", "fp32", "bf16", "fast"),
    "train.tracker": ("wandb", "none"),
    "decoder": ("", *DECODERS),
    "eval.verifier": ("auto", *VERIFIERS),
}
# sampling habits that depend on more than the next token's law, or change it along the path: refused by name
NOT_LOSSLESS = ("penalty", "logit_bias", "min_p", "typical_p", "no_repeat", "beam", "bad_words", "guidance", "min_new")
AT_LEAST_ONE = {
    "data": ("max_length", "answer_tokens", "slots", "validation_rows"),
    "data.server": ("concurrency",),
    "eagle": ("unroll_steps",),
    "train": ("epochs", "batch_tokens", "micro_batch_tokens", "save_every", "keep", "log_every"),
    "eval": ("max_new_tokens", "batch_size", "chain_length", "depth", "branch", "nodes", "max_prompt", "paths"),
}
AT_MOST = {"depth": 16, "chain_length": 16, "branch": 64, "nodes": 1024, "temperature": 10, "paths": 16}  # of eval
AT_LEAST_ZERO = {
    "data.server": ("requests_per_minute",),
    "eagle": ("draft_vocab",),
    "train": ("max_steps", "weight_decay", "keep_features_mb"),
    "eval": ("limit", "temperature", "top_k"),
}


class UserError(Exception):
    """A mistake the user can mend: what was wrong, where (file, line, key), and what to do about it."""


@dataclass(frozen=True)
class TargetConfig:
    path: str = ""  # hub id, local folder, GGUF file, or `package:NAME/FILE.gguf` for a file that a package ships
    sha256: str = ""  # of the GGUF file; refused when it differs; empty = not checked
    taps: list[int] = field(default_factory=list)  # h[L] numbering; empty = [2, n // 2, n - 3]
    dtype: str = "auto"  # auto = bfloat16 on a GPU, float32 on a CPU
    template_args: dict[str, Any] = field(default_factory=dict)  # passed to the chat template, recorded with the run
    trust_remote_code: bool = False


@dataclass(frozen=True)
class SourceConfig:
    kind: str = "file"  # file | hub | self
    path: str = ""  # file (.jsonl, .json, .parquet; .gz and .zst too), or hub dataset id
    split: str = "train"  # hub only
    column: str = ""  # the one column or key to read; empty = what its keys show (data_prep/schemas.py)
    rows: int = 0  # at most this many prompts; 0 = all (self-synthesis needs a number)
    answers: str = "regenerate"  # by the target | keep those that stand there (file and hub)
    openings: list[str] = field(default_factory=lambda: [""])  # self only: the first words of the user turn, in turn
    max_tokens: int = 96  # self only: longest question; longer ones are truncations and fall
    temperatures: list[float] = field(default_factory=lambda: [1.0])  # self only: dealt out in turn
    subjects: int = 0  # self only: drawn from the target, for every other question to be about one; 0 = none


@dataclass(frozen=True)
class ServerConfig:
    """An OpenAI-compatible server of the target (vLLM, SGLang). Its key, if it wants one: OPENAI_API_KEY."""

    url: str = ""  # up to and with /v1, e.g. http://localhost:8000/v1; empty = the target writes on this machine
    model: str = ""  # the name that it is served by; empty = the only one there
    concurrency: int = 64  # requests in flight
    requests_per_minute: int = 0  # at most; 0 = as fast as it takes them (429 and Retry-After are heeded anyway)
    timeout: float = 600.0  # seconds for one answer


@dataclass(frozen=True)
class DataConfig:
    sources: dict[str, SourceConfig] = field(default_factory=dict)
    max_length: int = 1024  # tokens a row; longer rows are cut and counted
    answer_tokens: int = 256  # max_new_tokens of the target's answers
    temperatures: list[float] = field(default_factory=lambda: [0.0])  # of the answers, dealt out row by row
    drop_loops: bool = True  # answers that repeat themselves
    drop_truncated: bool = False  # answers that answer_tokens or max_length cut off
    slots: int = 32  # rows decoded side by side
    dtype: str = "auto"  # of generation; auto = bfloat16 where this device is faster with it, else float32
    server: ServerConfig = field(default_factory=ServerConfig)
    validation_rows: int = 32  # held out, by prompt; the best checkpoint is chosen on them
    cache: str = ""  # folder of prepared data, keyed by content; empty = ~/.cache/espalier


@dataclass(frozen=True)
class EagleConfig:
    draft_vocab: int = 32000  # most frequent supervised tokens; 0 = the target's full vocabulary
    unroll_steps: int = 7
    step_decay: float = 0.8  # weight of unroll step i is step_decay ** i over their sum


@dataclass(frozen=True)
class TrainConfig:
    epochs: int = 1
    max_steps: int = 0  # optimiser steps; 0 = as the epochs say
    batch_tokens: int = 16384  # an optimiser step, over all ranks and micro-batches
    micro_batch_tokens: int = 8192  # at most, in a forward on one rank; rows are packed to it whole, without padding
    keep_features_mb: int = 1024  # of the target's features, kept over the epochs in memory; on a CPU only; 0 = none
    learning_rate: float = 1e-4
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    weight_decay: float = 0.0
    warmup: float = 0.05  # share of the steps
    min_lr: float = 0.1  # share of learning_rate at the end of the cosine
    clip: float = 0.5
    precision: str = "auto"  # auto = bf16 autocast over fp32 masters on a GPU, fp32 on a CPU; fast = bf16 where faster
    save_every: int = 200  # steps; the end of an epoch always saves
    keep: int = 2  # checkpoints kept besides best
    log_every: int = 10
    tracker: str = "wandb"  # wandb | none; metrics.jsonl is always written


@dataclass(frozen=True)
class EvalConfig:
    prompts: str = "report"  # report (ships with Espalier) | humaneval | mtbench | gsm8k | FILE.jsonl | hub id
    limit: int = 0  # prompts; 0 = all
    decoders: list[str] = field(default_factory=lambda: ["ar", "chain", "eagle", "graft"])
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    batch_size: int = 1
    batch_sizes: list[int] = field(default_factory=list)  # of a sweep besides: every decoder, and `ar`, at each size
    dtype: str = "auto"  # as target.dtype
    chain_length: int = 7  # draft tokens of `chain`
    verifier: str = "auto"  # of `chain`: one of eval/rules.py, match (drafts need no laws), auto = the best measured
    paths: int = 1  # sampled chains a round, judged as one tree
    draft_temperature: float | None = None  # of `chain`; 0 = greedy drafts; empty = the target's if the rule needs laws
    draft_top_p: float = 1.0
    depth: int = 8  # of the tree
    branch: int = 10  # children a node, and frontier nodes a level (EAGLE's top-k)
    nodes: int = 60  # candidates, root not counted
    gates: list[float] = field(default_factory=list)  # after draft depths 1, 2, 6; empty = calibrated, else published
    matrix: str = "warm-5"  # cold | carried | warm-N | FILE.safetensors, which eval.calibrate writes
    tune: bool = False  # choose decoder, depth, nodes by a measured cost curve on validation prompts first
    lossless: int = 0  # prompts whose greedy output is checked in fp32 against ar and transformers; 0 = all, -1 = none
    each_epoch: bool = True  # evaluate after each epoch of training
    max_prompt: int = 2048  # tokens; longer prompts are refused by id and counted


@dataclass(frozen=True)
class Recipe:
    recipe: str = ""
    run_dir: str = ""  # empty = runs/NAME
    seed: int = 0
    device: str = "auto"  # auto | cpu | cuda
    dry_run: bool = False
    target: TargetConfig = field(default_factory=TargetConfig)
    data: DataConfig = field(default_factory=DataConfig)
    eagle: EagleConfig = field(default_factory=EagleConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    # of `eval.run` and `data_prep.inspect` alone
    drafter: str = ""  # drafter folder
    decoder: str = ""  # one decoder instead of eval.decoders
    verifier: str = ""  # instead of eval.verifier, and checked there
    prompts: str = ""  # instead of eval.prompts
    out: str = ""
    rows: int = 3
    unroll: bool = False  # of `data_prep.inspect`: show what every unroll step predicts


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """The question after the nearest known word, a space before it; '' where none is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f" Did you mean {near[0]!r}?" if near else ""


def known_keys(cls: type = Recipe, prefix: str = "") -> list[str]:
    """Every dotted key of the tree, groups included."""
    keys: list[str] = []
    for f in dataclasses.fields(cls):
        keys.append(prefix + f.name)
        if isinstance(f.type, type) and dataclasses.is_dataclass(f.type):
            keys += known_keys(f.type, f"{prefix}{f.name}.")
    return keys


def load(argv: list[str]) -> Recipe:
    """Resolve `recipe=NAME key=value ...` into a Recipe. Raises UserError, naming the key and the nearest known one."""
    bad = [a for a in argv if "=" not in a.lstrip("=")]
    if bad:
        raise UserError(f"argument {bad[0]!r} is not of the form key=value. Example: recipe=smollm2 train.epochs=2")
    given = [a.split("=", 1)[1] for a in argv if a.startswith("recipe=")]
    if not given:
        raise UserError(f"no recipe=NAME given. Recipes here: {', '.join(recipe_names())}")
    path = recipe_path(given[-1])
    file = _read(path)
    try:
        # `key=` is meant as empty text, which OmegaConf would read as null
        overrides = OmegaConf.from_dotlist([a + "''" if a.endswith("=") else a for a in argv])
        layers = OmegaConf.merge(file, overrides)
    except Exception as error:  # YAML and OmegaConf each raise their own families
        raise UserError(f"the command line cannot be read: {_first_line(error)}") from error
    sources = OmegaConf.select(layers, "data.sources", default={})
    names = list(sources) if isinstance(sources, DictConfig) else []
    groups = [f.name for f in dataclasses.fields(Recipe) if dataclasses.is_dataclass(f.type)]
    for group in [*groups, "data.sources", *(f"data.sources.{name}" for name in names)]:
        if not isinstance(OmegaConf.select(layers, group, default=DictConfig({})), DictConfig):
            raise UserError(
                f"{_origin(group, argv, path)}: key {group!r} is a group: give its keys, as {group}.KEY=VALUE"
            )
    base = OmegaConf.structured(Recipe(data=DataConfig(sources={str(name): SourceConfig() for name in names})))
    _unlock(base)
    try:
        merged = OmegaConf.merge(base, layers)
    except OmegaConfBaseException as error:
        key = str(error.full_key or "").replace("[", ".").replace("]", "")
        raise UserError(_explain(_origin(key, argv, path), key, error)) from error
    try:
        recipe = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:  # an interpolation that leads nowhere, for one
        raise UserError(f"{_origin(str(error.full_key or ''), argv, path)}: {_first_line(error)}") from error
    assert isinstance(recipe, Recipe)
    if recipe.verifier:
        recipe = dataclasses.replace(recipe, eval=dataclasses.replace(recipe.eval, verifier=recipe.verifier))
    validate(recipe)
    return recipe


def validate(recipe: Recipe) -> None:
    """Refuse values that no command could honour, all of them in one message; nothing is loaded or looked up."""
    wrong = [f"  {key}={_value(recipe, key)!r}: must be {rule}" for key, rule in _broken_rules(recipe)]
    for name, source in recipe.data.sources.items():
        broken = _broken_source_rules(source)
        wrong += [f"  data.sources.{name}.{key}={getattr(source, key)!r}: must be {rule}" for key, rule in broken]
    if wrong:
        raise UserError("\n".join([f"recipe {recipe.recipe}:", *wrong]))


def _broken_rules(r: Recipe) -> list[tuple[str, str]]:
    rules = [(key, _one_of([_value(r, key)], known), _value(r, key) in known) for key, known in CHOICES.items()]
    for least, groups in ((1, AT_LEAST_ONE), (0, AT_LEAST_ZERO)):
        keys = [f"{group}.{leaf}" for group, leaves in groups.items() for leaf in leaves]
        rules += [(key, f"{least} or more", _value(r, key) >= least) for key in keys]
    rules += [(f"eval.{key}", f"at most {most}", getattr(r.eval, key) <= most) for key, most in AT_MOST.items()]
    rules += [
        ("train.learning_rate", "above 0", r.train.learning_rate > 0),
        ("train.clip", "above 0", r.train.clip > 0),
        ("train.warmup", "from 0 up to 1", 0 <= r.train.warmup < 1),
        ("train.min_lr", "from 0 to 1", 0 <= r.train.min_lr <= 1),
        (
            "train.betas",
            "two numbers from 0 up to 1",
            len(r.train.betas) == 2 and all(0 <= b < 1 for b in r.train.betas),
        ),
        ("eagle.step_decay", "above 0 and at most 1", 0 < r.eagle.step_decay <= 1),
        ("eval.top_p", "above 0 and at most 1", 0 < r.eval.top_p <= 1),
        ("eval.draft_top_p", "above 0 and at most 1", 0 < r.eval.draft_top_p <= 1),
        ("eval.draft_temperature", "0 to 10, or empty", 0 <= (r.eval.draft_temperature or 0) <= 10),
        ("eval.lossless", "-1 (none), 0 (all) or a number of prompts", r.eval.lossless >= -1),
        (
            "eval.gates",
            "three numbers from 0 to 1, or none",
            len(r.eval.gates) in (0, 3) and all(0 <= g <= 1 for g in r.eval.gates),
        ),
        (
            "eval.decoders",
            _one_of(r.eval.decoders, DECODERS, "some"),
            bool(r.eval.decoders) and set(r.eval.decoders) <= {*DECODERS},
        ),
        ("eval.batch_sizes", "numbers of 1 or more", all(size >= 1 for size in r.eval.batch_sizes)),
        (
            "eval.matrix",
            "cold, carried or warm-N, or a FILE.safetensors",
            re.fullmatch(r"cold|carried|warm-\d+|.+\.safetensors", r.eval.matrix) is not None,
        ),
        ("data.temperatures", "numbers from 0 up", bool(r.data.temperatures) and min(r.data.temperatures) >= 0),
        ("data.server.url", "a web address", re.fullmatch(r"|https?://[^/\s]+\S*", r.data.server.url) is not None),
        ("data.server.timeout", "above 0", r.data.server.timeout > 0),
        ("rows", "1 or more", r.rows >= 1),
    ]
    return [(key, rule) for key, rule, holds in rules if not holds]


def _broken_source_rules(source: SourceConfig) -> list[tuple[str, str]]:
    by_itself = source.kind == "self"
    rules = [
        ("kind", _one_of([source.kind], KINDS), source.kind in KINDS),
        ("path", "given for this kind of source", by_itself or bool(source.path)),
        ("rows", "0 (all) or more; at least 1 when the target writes them", source.rows >= int(by_itself)),
        ("answers", "keep or regenerate", source.answers in ("keep", "regenerate")),
        ("answers", "regenerate where the target writes the questions", not (by_itself and source.answers == "keep")),
        ("openings", "at least one text (an empty one will do)", bool(source.openings)),
        ("max_tokens", "1 or more", source.max_tokens >= 1),
        ("temperatures", "numbers from 0 up", bool(source.temperatures) and min(source.temperatures) >= 0),
        ("subjects", "0 (none) or more", source.subjects >= 0),
    ]
    return [(key, rule) for key, rule, holds in rules if not holds]


def _one_of(given: Sequence[str], choices: Sequence[str], quantity: str = "one") -> str:
    """The rule in words, with the choice that is nearest to the first that is none."""
    known = [choice for choice in choices if choice]
    wrong = next((word for word in given if word not in choices), "")
    return f"{quantity} of {', '.join(known)}{', or empty' * ('' in choices)}.{did_you_mean(wrong, known)}".rstrip(".")


def _value(recipe: Recipe, key: str) -> Any:
    return functools.reduce(getattr, key.split("."), recipe)


def save(recipe: Recipe, path: Path) -> None:
    """Write the resolved tree as YAML that `load` reads back."""
    text = OmegaConf.to_yaml(OmegaConf.structured(recipe))
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.replace(path)


def recipe_names() -> list[str]:
    return sorted(p.stem for p in HERE.glob("*.yaml"))


def recipe_path(name: str) -> Path:
    for candidate in (HERE / f"{name}.yaml", Path(name)):
        if candidate.is_file() and candidate.suffix == ".yaml":
            return candidate
    hint = did_you_mean(name, recipe_names(), 0.4)
    raise UserError(f"no recipe {name!r}: neither a name ({', '.join(recipe_names())}) nor a .yaml file.{hint}")


def _unlock(node: Any) -> None:
    """Frozen dataclasses make OmegaConf nodes read-only, level by level; merging needs them open."""
    if isinstance(node, DictConfig):
        OmegaConf.set_readonly(node, False)
        for key in node:
            _unlock(node[key])


def _read(path: Path) -> Any:
    try:
        file = OmegaConf.load(path)
    except Exception as error:  # YAML, UTF-8 and OmegaConf each raise their own families
        raise UserError(f"{path}: cannot be read as YAML: {error}") from error
    if not isinstance(file, DictConfig):
        raise UserError(f"{path}: must be a YAML mapping, as the recipes in {HERE} are")
    return file


def _origin(key: str, argv: list[str], path: Path) -> str:
    """Where the value of `key` was given."""
    typed = any(f"{key}.".startswith(a.split("=", 1)[0] + ".") for a in argv)
    return "the command line" if typed else str(path)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _explain(where: str, key: str, error: OmegaConfBaseException) -> str:
    reason = _first_line(error)
    if "ListConfig" in reason:
        return f"{where}: key {key!r} is a list: write it as {key}=[a,b]"
    if "not in" not in reason:
        return f"{where}: key {key!r}: {reason}"
    group, _, leaf = key.rpartition(".")
    if group == "eval" and any(word in leaf for word in NOT_LOSSLESS):
        return (
            f"{where}: {key!r} is refused: no decoder here can honour it losslessly (temperature, top_p and top_k, yes)"
        )
    if group.startswith("data.sources."):
        known = [f"{group}.{f.name}" for f in dataclasses.fields(SourceConfig)]
    else:
        known = known_keys()
    siblings = [k for k in known if k.rpartition(".")[0] == group]
    near = (
        difflib.get_close_matches(key, siblings, n=1, cutoff=0.5)
        or [k for k in known if k.rpartition(".")[2] == leaf]
        or difflib.get_close_matches(key, known, n=1, cutoff=0.4)
    )
    hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(siblings or known)}"
    return f"{where}: unknown key {key!r}. {hint}"

"""From `recipe=NAME key=value ...` to a Recipe, and back to YAML.

Unknown keys are refused with the nearest known one named.
"""

import dataclasses
import difflib
import json
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recipes.files import user_path, write_text
from recipes.rules import validate
from recipes.schema import DataConfig, Recipe, SourceConfig, UserError, did_you_mean

HERE = Path(__file__).parent
# sampling habits that depend on more than the next token's law, or change it along the path: refused by name
NOT_LOSSLESS = ("penalty", "logit_bias", "min_p", "typical_p", "no_repeat", "beam", "bad_words", "guidance", "min_new")


def text_keys(cls: type = Recipe, prefix: str = "") -> set[str]:
    """Every dotted key of the tree whose value is text; `*` stands for the name of a source of data."""
    keys = {prefix + f.name for f in dataclasses.fields(cls) if f.type is str}
    for f in dataclasses.fields(cls):
        if isinstance(f.type, type) and dataclasses.is_dataclass(f.type):
            keys |= text_keys(f.type, f"{prefix}{f.name}.")
    return keys | (text_keys(SourceConfig, "data.sources.*.") if cls is Recipe else set())


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
        overrides = OmegaConf.from_dotlist([_quoted(a) for a in argv])
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
        where = _origin(key, argv, path) if key else f"the command line or {path}"
        raise UserError(_explain(where, key, error)) from error
    try:
        recipe = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:  # an interpolation that leads nowhere, for one
        raise UserError(f"{_origin(str(error.full_key or ''), argv, path)}: {_first_line(error)}") from error
    assert isinstance(recipe, Recipe)
    if recipe.verifier:
        recipe = dataclasses.replace(recipe, eval=dataclasses.replace(recipe.eval, verifier=recipe.verifier))
    validate(recipe)
    return recipe


def save(recipe: Recipe, path: Path) -> None:
    """Write the resolved tree as YAML that `load` reads back."""
    write_text(path, OmegaConf.to_yaml(OmegaConf.structured(recipe)))


def recipe_names() -> list[str]:
    return sorted(p.stem for p in HERE.glob("*.yaml"))


def recipe_path(name: str) -> Path:
    for candidate in (user_path(str(HERE / f"{name}.yaml")), user_path(name)):
        if candidate.is_file() and candidate.suffix == ".yaml":
            return candidate
    hint = did_you_mean(name, recipe_names(), 0.4)
    raise UserError(f"no recipe {name!r}: neither a name ({', '.join(recipe_names())}) nor a .yaml file.{hint}")


def _quoted(argument: str) -> str:
    """KEY=VALUE with text as it was typed: YAML would read `out=yes` as true, and `run_dir=` as null."""
    key, value = argument.split("=", 1)
    parts = key.split(".")
    inside = ".".join([*parts[:2], "*", *parts[3:]]) if parts[:2] == ["data", "sources"] else key
    typed = inside in text_keys() and "${" not in value and value[:1] not in ("'", '"')
    return f"{key}={json.dumps(value)}" if typed or not value else argument


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
    if "Cannot merge" in reason:
        return f"{where}: a list and a group were mixed up: a list is written KEY=[a,b], a group's key GROUP.KEY=VALUE"
    if "of type 'ListConfig'" in reason:
        return f"{where}: key {key!r} takes one value, no list"
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

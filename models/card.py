"""The model card that goes with an exported drafter: README.md, made of its provenance and config and nothing else.

It can be published as it stands: paths of this machine are reduced to their last part.
"""

import importlib.metadata
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from models.serving import DRAFTS, sglang_command, vllm_command
from models.source import on_the_hub
from recipes.files import read_json, user_path, write_json, write_text
from recipes.schema import Recipe, TargetConfig, UserError

FOLDER = "path/to/this/folder"
FLEX = "flexdraft_config"  # in the config of one
WRITTEN = ("target", "data", "eagle", "flex", "train")  # parts of the recipe that a card shows
PRIVATE = {"server", "cache", "keep_features_mb", "tracker", "log_every", "save_every", "keep"}  # of this machine
WORDS = {"openings", "template_args"}  # said to a model, not paths whatever they begin with
UNKNOWN = "not known here"
FEWEST = 6  # timings that a verdict rests on
TAPS = "eagle_aux_hidden_state_layer_ids"


def write_card(folder: Path, more: dict[str, Any] | None = None) -> None:
    """Put README.md into a drafter's folder, and `more` into its provenance.json first; each file whole."""
    papers = {**read_json(folder / "provenance.json", "drafter"), **(more or {})}
    if more:
        write_json(folder / "provenance.json", papers)
    try:
        page = card(papers, read_json(folder / "config.json", "drafter"))
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # of papers that nobody could have written here
        why = f"{type(error).__name__}: {error}"
        raise UserError(f"drafter={folder}: provenance.json is damaged, no card can be made of it ({why})") from error
    write_text(folder / "README.md", page)


def card(papers: dict[str, Any], config: dict[str, Any]) -> str:
    """`papers` as train/run.py writes them into provenance.json, or the little that an export knows of a drafter that
    another tool trained; `config` the drafter's config.json."""
    name = public_name(target_path(papers)) or "a target that is not named here"
    by = "trained with Espalier" if "versions" in papers else "trained with another tool and exported by Espalier"
    kind = "FlexDraft" if FLEX in config else "EAGLE-3"
    sections = [
        front_matter(papers, kind),
        f"# {kind} drafter for {name}",
        f"A drafter for speculative decoding of {name}, {by}. It proposes tokens that the target "
        "verifies; the output stays the target's own. It fits this target alone: weights altered by fine-tuning, "
        "merging or another conversion make it accept less.",
        "## What it is worth\n\n" + worth(papers),
        "## How to serve it\n\n" + serving(papers, config),
        "## Licences\n\n" + licences(papers),
        "## Where it comes from\n\n" + origin(papers, config),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def target_path(papers: dict[str, Any]) -> str:
    """ "" where nobody said."""
    return str((papers.get("target") or {}).get("path") or "")


def front_matter(papers: dict[str, Any], kind: str) -> str:
    """What model hubs read."""
    path, licence = target_path(papers), (papers.get("target") or {}).get("licence") or ""
    lines = ["---", "tags:", "- speculative-decoding", f"- {kind.lower().replace('-', '')}", "- espalier"]
    if on_the_hub(path):
        lines += [f"base_model: {path}"]
    if licence and " " not in licence:
        lines += [f"license: {licence.lower()}"]
    return "\n".join([*lines, "---"])


def worth(papers: dict[str, Any]) -> str:
    tau, rows = papers.get("validation_tau"), papers.get("measured") or []
    chosen = f"Its checkpoint was chosen by tau {tau:.3f} of greedy chains on validation prompts." if tau else ""
    if not rows:
        return " ".join(["Not measured on any other prompts yet.", chosen]).strip()
    table = [
        "| decoder | draft | tau [95 %] | tokens/s | speed-up over plain decoding [95 %] | tau without loops |",
        "|---|---|---|---|---|---|",
        *(f"| {' | '.join(measured_cells(row))} |" for row in rows),
    ]
    e, s = rows[0]["environment"], rows[0]["settings"]
    conditions = (
        f"{rows[0]['prompts']} prompts (`{rows[0]['prompt_set']}`), disjoint from training and from the choice; "
        f"temperature {s['temperature']:g}, top-p {s['top_p']:g}, batch {s['batch_size']}, max_new_tokens "
        f"{s['max_new_tokens']}; {e['hardware']} ({e['device']}), {e['dtype']}, {e['threads']} threads, torch "
        f"{e['torch']}, {e['date'][:10]}; Espalier's own decoders, so a serving engine's speed will differ."
    )
    kinds = {row["settings"]["decoder"] for row in rows}
    serves_chains = "chain" in kinds and "flex" not in kinds  # a FlexDraft's lines no engine drafts
    meaning = (
        "tau = tokens a round of verification emits, the target's own included. Loops are outputs that repeat "
        f"themselves ({rows[0]['loops']} of these prompts). `ar` is plain decoding. "
        + ("`chain` is what the commands below make an engine do; other" if serves_chains else "The other")
        + " decoders are Espalier's."
    )
    return "\n\n".join(part for part in ["\n".join(table), verdict(rows), conditions, meaning, chosen] if part)


def verdict(rows: list[dict[str, Any]]) -> str:
    """Whether chains, which engines serve, are shown to be faster than plain decoding; '' where none was timed."""
    timed = timed_chains(rows)
    if not timed:
        return ""
    if not spans(timed):
        return "So few timings do not show whether chains of drafts are faster there than plain decoding."
    if faster(timed):
        return "Chains of drafts are faster there than plain decoding: the whole interval lies above 1."
    return "Chains of drafts are not shown to be faster there than plain decoding: the interval holds 1 or lies below."


def spans(timed: list[dict[str, Any]]) -> list[list[float]]:
    """The intervals of speed-ups that rest on enough timings."""
    return [r["speedup_ci95"] for r in timed if r["speedup_ci95"] and (r.get("clocks") or r["prompts"]) >= FEWEST]


def faster(timed: list[dict[str, Any]]) -> bool:
    return any(span[0] > 1 for span in spans(timed))


def measured_cells(row: dict[str, Any]) -> list[str]:
    def ranged(value: float | None, interval: list[float] | None, unit: str = "") -> str:
        if not value:
            return "-"
        span = f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else ""
        return f"{value:.2f}{unit}{span}"

    speed = f"{row['tokens_per_s']:.1f}" if row["tokens_per_s"] else "not timed"
    gain = ranged(row["speedup"], row["speedup_ci95"], "x")
    tau = ranged(row["tau"], row["tau_ci95"])
    return [f"`{row['decoder']}`", row["shape"], tau, speed, gain, ranged(row["tau_without_loops"], None)]


def measured(result: dict[str, Any], prompt_set: str) -> dict[str, Any]:
    """Of one results.json, what a card and provenance.json keep: figures with their conditions."""
    overall = result["overall"]
    figures = (
        "tau",
        "tau_ci95",
        "tokens_per_s",
        "baseline_tokens_per_s",
        "speedup",
        "speedup_ci95",
        "prompts",
        "clocks",
    )
    return {
        "decoder": result["decoder"],
        "shape": result["shape"],
        **{key: overall.get(key) for key in figures},
        "loops": overall["loops"]["flagged"],
        "tau_without_loops": overall["loops"]["without"].get("tau"),
        "lossless": overall.get("lossless"),
        "prompt_set": public_name(prompt_set),
        "settings": result["settings"],
        "environment": result["environment"],
    }


def serving(papers: dict[str, Any], config: dict[str, Any]) -> str:
    """Commands for the engines that can serve this form."""
    if FLEX in config:
        return (
            f"No engine reads FlexDraft. Espalier decodes with it: `python -m eval.run recipe=FILE drafter={FOLDER}`."
        )
    path = target_path(papers)
    target = path if on_the_hub(path) else "path/to/the/target"
    found = best_chain(papers.get("measured") or [])
    drafts = int(found["settings"]["depth"]) if found else DRAFTS
    blocks = [vllm_command(target, FOLDER, drafts=drafts), sglang_command(target, FOLDER, drafts=drafts)]
    text = "The commands draft chains"
    for_vllm, for_sglang = TAPS in config, "eagle_config" in config  # where each looks for taps that are no default
    if for_sglang and not for_vllm:
        text, blocks = "This layout is SGLang's: vLLM would read other taps. The command drafts chains", blocks[1:]
    elif why := no_sglang(config) or ("would read other taps" if for_vllm and not for_sglang else ""):
        text, blocks = f"This folder is not for SGLang, which {why}. The command drafts chains", blocks[:1]
    chosen = f"of {drafts}, {said_of(found)}" if found else f"of {drafts}, a length that was not measured"
    fenced = "\n\n".join(f"```sh\n{block}\n```" for block in blocks)
    check = f"```sh\npython -m models.doctor {FOLDER} target={target}\n```"
    return f"{text} {chosen}.\n\n{fenced}\n\nTo check the folder against the target first (in Espalier's):\n\n{check}"


def no_sglang(config: dict[str, Any]) -> str:
    if "speculators_model_type" in config:
        return "does not read this layout (speculators)"
    odd = config.get("norm_before_residual") or "Qwen3" in str(config.get("architectures"))
    return "cannot express its block" if odd else ""


def best_chain(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The drafts in a row that were fastest; None where none was timed."""
    return max(timed_chains(rows), key=lambda row: row["speedup"], default=None)


def timed_chains(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["settings"]["decoder"] == "chain" and row["speedup"]]


def said_of(row: dict[str, Any]) -> str:
    """What the table above shows of that length."""
    times = f"{row['speedup']:.2f}x"
    if row["speedup"] <= 1:
        return f"the best of those timed above, which was slower there than plain decoding ({times})"
    if not faster([row]):
        return f"the fastest of those timed above ({times}), which was not shown to beat plain decoding there"
    return f"as measured above ({times})"


def licences(papers: dict[str, Any]) -> str:
    target = papers.get("target") or {}
    name, licence = public_name(target_path(papers)) or "not named", target.get("licence") or UNKNOWN
    start = str(papers.get("init_from") or "")
    if "versions" not in papers:
        terms = f"The terms of the drafter itself, which another tool trained, and of its data are {UNKNOWN}."
    elif start:
        terms = "The drafter was trained on its outputs, so its terms apply to the drafter too."
    else:
        terms = "The drafter started from its weights and was trained on its outputs, so its terms apply to it too."
    stated = f"see https://huggingface.co/{start}" if on_the_hub(start) else UNKNOWN
    lines = [
        f"- Target, {name}: {licence}. {terms}",
        *([f"- The drafter that training started from, `{public_name(start)}`: {stated}."] if start else []),
        *(f"- Data, `{source['name']}`: {source['licence']}" for source in papers.get("sources") or []),
    ]
    return "\n".join(lines)


def origin(papers: dict[str, Any], config: dict[str, Any]) -> str:
    data, vocabulary = papers.get("data") or {}, papers.get("vocabulary") or {}
    covered = (vocabulary.get("coverage_validation") or {}).get("overall")
    block = config.get("transformer_layer_config") or config
    kept = f"{config.get('draft_vocab_size')} of {block.get('vocab_size') or vocabulary.get('target')} tokens"
    template, exported = (papers.get("target") or {}).get("template"), papers.get("exported") or {}
    rows = {
        "target's fingerprint": f"`{papers.get('fingerprint')}`",
        "chat template": f"`{template}`" if template else "",
        "its arguments": f"`{papers['template_args']}`" if "template_args" in papers else "",
        "training data": f"`{data['hash']}`" if "hash" in data else "",
        "draft vocabulary": "the target's"
        if FLEX in config
        else kept + (f", which cover {covered:.1%} of validation answers" if covered else ""),
        "checkpoint": f"step {papers['step']}, seed {papers.get('seed')}" if "step" in papers else "",
        "versions": ", ".join(f"{name} {version}" for name, version in (papers.get("versions") or {}).items()),
        "exported": f"for `{exported['layout']}` from `{public_name(exported['from'])}`" if exported else "",
    }
    rows = {key: value for key, value in rows.items() if value}
    table = "\n".join(["| what | value |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows.items())])
    recipe = papers.get("recipe")
    if not recipe:
        return table
    shown = OmegaConf.to_yaml(OmegaConf.create(public({key: recipe[key] for key in WRITTEN if key in recipe})))
    return f"{table}\n\nThe recipe, without what is this machine's own:\n\n```yaml\n{shown}```"


def public(value: Any) -> Any:
    """Without what is this machine's own: absolute paths become names."""
    if isinstance(value, dict):
        said = {key: inner if key in WORDS else public(inner) for key, inner in value.items()}
        return {key: inner for key, inner in said.items() if key not in PRIVATE}
    if isinstance(value, list):
        return [public(inner) for inner in value]
    return public_name(value) if isinstance(value, str) else value


def publishable(papers: dict[str, Any]) -> dict[str, Any]:
    """What provenance.json of an exported drafter holds: the same without this machine's paths. A target's hub id and a
    package's file stay, a local folder goes by its name; the fingerprint says which it was."""
    found = {**papers, "init_from": public_name(str(papers["init_from"]))} if papers.get("init_from") else dict(papers)
    if isinstance(papers.get("data"), dict):
        found["data"] = {key: value for key, value in papers["data"].items() if key != "folder"}
    if path := target_path(papers):
        found["target"] = {**papers["target"], "path": target_name(path)}
    if exported := papers.get("exported"):
        found["exported"] = {**exported, "from": public_name(str(exported["from"]))}
    return found


def target_name(path: str) -> str:
    return path if on_the_hub(path) or path.startswith("package:") else Path(path).name


def public_name(text: str) -> str:
    """A local path or a package's file by its last part; a hub id and ordinary text as they are."""
    return Path(text).name if text.startswith(("/", "~", "./", "../", "package:")) else text


def sources(recipe: Recipe) -> list[dict[str, str]]:
    """{name, licence} of each source of training prompts: what can be said, and no more."""
    said = []
    for name, source in recipe.data.sources.items():
        if source.kind == "self":
            told = "questions and answers written by the target itself."
        elif source.kind == "hub":
            told = f"{source.path}, see https://huggingface.co/datasets/{source.path} for its licence."
        else:
            told = f"`{public_name(source.path)}`, a file whose licence is {UNKNOWN}."
        if source.kind != "self":
            told += " Answers kept as they stood." if source.answers == "keep" else " Answers written by the target."
        said.append({"name": name, "licence": told})
    return said


def target_licence(cfg: TargetConfig, folder: Path) -> str:
    """As the target states it: its package, its GGUF file, its model card; '' where none does."""
    if cfg.path.startswith("package:"):
        module = cfg.path.removeprefix("package:").split("/")[0]
        names = importlib.metadata.packages_distributions().get(module, [])
        return str(importlib.metadata.metadata(names[0]).json.get("license", "")) if names else ""
    if cfg.path.endswith(".gguf"):
        if not user_path(cfg.path).is_file():
            return ""
        from gguf import GGUFReader

        field = GGUFReader(user_path(cfg.path)).get_field("general.license")
        return str(field.contents()) if field is not None else ""
    if on_the_hub(cfg.path):
        return f"see https://huggingface.co/{cfg.path}"
    page = folder / "README.md"
    if not page.is_file():
        return ""
    _, _, head = page.read_text(encoding="utf-8", errors="replace").partition("---")
    lines = [line for line in head.partition("\n---")[0].splitlines() if line.startswith("license:")]
    return lines[0].partition(":")[2].strip() if lines else ""

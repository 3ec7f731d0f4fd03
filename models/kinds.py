"""Which tool's drafter a folder holds, and the form in which an engine would read it.

`Draft` is the one view that all checks look at: the native layout's config and tensor names, whatever the folder's own.
"""

from dataclasses import dataclass
from typing import Any

from models.facts import PICKLED, Facts, Stored
from models.layout_tables import FLAGS, OLD_NORMS

ARCHITECTURES = {  # EAGLE-3 architectures that vLLM knows; SGLang knows the first
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3Qwen3ForCausalLM",
    "PEagleDraftModel",
    "PeagleLlamaForCausalLM",
    "PeagleQwen3ForCausalLM",
    "Eagle3MiniMaxM2ForCausalLM",
    "Eagle3Qwen2_5vlForCausalLM",
    "Eagle3Qwen3vlForCausalLM",
}
NAMES = {
    "native": "EAGLE-3, native layout of vLLM and SGLang",
    "peagle": "P-EAGLE (parallel drafting), native layout of vLLM",
    "speculators": "speculators",
    "specforge": "EAGLE-3 as SpecForge saves it (native layout)",
    "safeailab": "EAGLE-3 of SafeAILab/EAGLE",
    "eagle": "EAGLE or EAGLE-2 (one tap, no vocabulary map)",
    "dflash": "DFlash, native layout",
    "flexdraft": "FlexDraft",
    "": "not a drafter",
}
MOST = 256  # layers and captured states that are looked at, whatever a config claims


@dataclass(frozen=True)
class Draft:
    """`kind` is a key of NAMES. `config` is flat, with the defaults that vLLM lays under it; `stray` are other files
    of weights; `tensors` go without `model.`; `prefixed` are those that had it, `twice` those that are there twice,
    `old` what goes by a name that SGLang alone still knows."""

    kind: str
    config: dict[str, Any]
    tensors: dict[str, Stored]
    prefixed: tuple[str, ...] = ()
    stray: tuple[str, ...] = ()
    twice: tuple[str, ...] = ()
    pickled: tuple[str, ...] = ()
    old: tuple[str, ...] = ()

    @property
    def eagle3(self) -> bool:
        """Served as EAGLE-3, so that all the checks of it hold."""
        speculators = self.kind == "speculators" and self.config["speculators_model_type"] in ("eagle3", "peagle")
        return speculators or self.kind in ("native", "peagle", "specforge", "safeailab")

    @property
    def peagle(self) -> bool:
        """All drafts of a round come from one pass."""
        return self.kind == "peagle" or self.config.get("speculators_model_type") == "peagle"

    @property
    def mask_token(self) -> object:
        """The id that vLLM feeds a parallel drafter for tokens not yet known; None where nothing says it."""
        inner = self.config.get("dflash_config")
        places = [self.config.get(key) for key in ("pard_token", "ptd_token_id", "mask_token_id")]
        given = [*places, inner.get("mask_token_id") if isinstance(inner, dict) else None]
        return next((value for value in given if isinstance(value, int)), None)

    @property
    def dflash(self) -> bool:
        return self.kind == "dflash" or self.config.get("speculators_model_type") in ("dflash", "dflash2")

    def number(self, key: str, default: int = 0) -> int:
        """A whole number of the config; `default` where it is absent, null or something else."""
        value = self.config.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else default

    @property
    def hidden(self) -> int:
        return self.number("hidden_size")

    @property
    def target_hidden(self) -> int:
        return self.number("target_hidden_size", self.hidden)

    @property
    def draft_vocab(self) -> int:
        return self.number("draft_vocab_size", self.number("vocab_size"))

    @property
    def reduced(self) -> bool:
        return self.draft_vocab < self.number("vocab_size")

    @property
    def layers(self) -> int:
        return min(self.number("num_hidden_layers", 1), MOST)

    @property
    def head_dim(self) -> int:
        return self.number("head_dim") or self.hidden // max(1, self.number("num_attention_heads", 1))

    @property
    def nested(self) -> dict[str, Any]:
        inner = self.config.get("eagle_config")
        return inner if isinstance(inner, dict) else {}

    @property
    def aux(self) -> int:
        """Captured states that `fc` takes, as both engines count them."""
        ids = self.nested.get("eagle_aux_hidden_state_layer_ids")
        return min(self.number("num_aux_hidden_states", len(ids) if isinstance(ids, list) and ids else 3), MOST)


def look(facts: Facts) -> Draft:
    """Pure: what the facts show."""
    stray = _stray(facts)
    own = {name: stored for name, stored in facts.tensors.items() if stored.file not in stray}
    prefixed = tuple(name for name in own if name.startswith("model."))
    tensors = {_plain(name): stored for name, stored in own.items()}
    pickled = tuple(sorted({stored.file for stored in own.values() if stored.file.endswith(PICKLED)}))
    kind, plain = _kind(facts, tensors), [_plain(name) for name in own]
    twice = tuple(sorted({name for name in plain if plain.count(name) > 1}))
    config = _flat(facts.config, kind)
    old = tuple(name for name in own if name.removeprefix("model.") in OLD_NORMS)
    if "use_aux_norm" in config and "fc_norm" not in config:
        old, config = (*old, "use_aux_norm"), config | {"fc_norm": config["use_aux_norm"]}
    return Draft(kind, config, tensors, prefixed, stray, twice, pickled, old)


def _plain(name: str) -> str:
    name = name.removeprefix("model.").replace("midlayer.", "layers.0.")
    return OLD_NORMS.get(name, name)


def _stray(facts: Facts) -> tuple[str, ...]:
    """Files that engines load beside model.safetensors, though no index names them."""
    if "model.safetensors" not in facts.files or any(f.endswith(".index.json") for f in facts.files):
        return ()
    return tuple(f for f in facts.files if f.endswith(".safetensors") and f != "model.safetensors")


def architectures(config: dict[str, Any]) -> list[str]:
    given = config.get("architectures")
    return [str(name) for name in given] if isinstance(given, list) else []


def _kind(facts: Facts, tensors: dict[str, Stored]) -> str:
    config, names = facts.config, architectures(facts.config)
    if not config:
        return ""
    if "speculators_model_type" in config:
        return "speculators"
    if any("peagle" in name.lower() for name in names):
        return "peagle"
    released = "mask_embedding" in tensors  # by FlexDraft's authors, under dflash_config
    if released or "flexdraft_config" in config or any("FlexDraft" in name for name in names):
        return "flexdraft"
    if "dflash_config" in config or any("DFlash" in name for name in names):
        return "dflash"
    fused = "fc.weight" in tensors
    eagle3 = any("Eagle3" in name for name in names)
    if eagle3 or (
        fused and ("draft_vocab_size" in config or "d2t" in tensors or "layers.0.hidden_norm.weight" in tensors)
    ):
        if not eagle3:
            return "safeailab"
        full = config.get("draft_vocab_size") in (None, config.get("vocab_size"))
        trained = any(f.startswith("training_state") for f in facts.files)
        return "specforge" if trained or (full and "d2t" in tensors) else "native"
    if fused or any("Eagle" in name for name in names):
        return "eagle"
    return ""


def _flat(config: dict[str, Any], kind: str) -> dict[str, Any]:
    if kind != "speculators":
        return config
    block = config.get("transformer_layer_config")
    defaults = {"norm_before_residual": config.get("speculators_model_type") != "peagle", "tie_word_embeddings": False}
    top = {k: v for k, v in config.items() if k not in ("transformer_layer_config", "architectures", "model_type")}
    # vLLM reads the flags at the top level only; `model_type` stays the block's
    inside = {k: v for k, v in block.items() if k not in FLAGS} if isinstance(block, dict) else {}
    return {**inside, **defaults, **top}

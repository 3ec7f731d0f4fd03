"""An exported drafter as a serving engine reads it: config.json and model.safetensors, and nothing of models/.

The equations of vLLM and of SGLang for one request, keys and values in a growing list; each with its own habits about
keys, names and layers. H width, A taps, V target vocabulary.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

LAYER = {f"layers.0.{part}.weight" for part in (
    "input_layernorm", "hidden_norm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
)}  # fmt: skip
QK = {"layers.0.self_attn.q_norm.weight", "layers.0.self_attn.k_norm.weight"}
DEFAULT = "the default layers"


class Reader:
    """What both engines do alike. `g` is what a step receives: fc of the taps, then what the step before left."""

    c: dict[str, Any]
    w: dict[str, Tensor]
    embedding: Tensor
    normed_residual: bool
    qk_norm: bool
    ids: list[int] | str  # to capture, in h[L] numbering

    def __init__(self, folder: Path, target_embedding_VH: Tensor) -> None:
        self.c = json.loads((folder / "config.json").read_text())
        with safe_open(folder / "model.safetensors", "pt") as file:
            stored = {name: file.get_tensor(name).float() for name in list(file.keys()) if name not in ("d2t", "t2d")}
            self.d2t = file.get_tensor("d2t") if "d2t" in list(file.keys()) else None
        self.read(stored, target_embedding_VH)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def read(self, stored: dict[str, Tensor], target_embedding_VH: Tensor) -> None:
        raise NotImplementedError

    def fuse(self, aux: Tensor) -> Tensor:
        raise NotImplementedError

    def captured(self, target_layers: int) -> list[int]:
        """h[L] of the states to capture."""
        ids = [2, target_layers // 2, target_layers - 3] if isinstance(self.ids, str) else self.ids
        assert len(ids) == self.c["num_aux_hidden_states"]
        return sorted(set(ids))

    def norm(self, x: Tensor, name: str) -> Tensor:
        scaled = x.float() * (x.float().pow(2).mean(-1, keepdim=True) + self.c["rms_norm_eps"]).rsqrt()
        return scaled * self.w[name]

    def linear(self, x: Tensor, name: str) -> Tensor:
        return torch.nn.functional.linear(x, self.w[f"layers.0.{name}.weight"])

    def rotary(self, x_ND: Tensor, position: int) -> Tensor:
        D = x_ND.shape[-1]
        frequencies = self.c["rope_theta"] ** (-torch.arange(0, D, 2, dtype=torch.float32) / D)
        cos, sin = (position * frequencies).cos().repeat(2), (position * frequencies).sin().repeat(2)
        half = torch.cat([-x_ND[:, D // 2 :], x_ND[:, : D // 2]], -1)
        return x_ND * cos + half * sin

    def combined(self, aux: Tensor) -> Tensor:
        """Norms of the taps, then fc."""
        width = self.c.get("target_hidden_size") or self.c["hidden_size"]
        if self.c.get("fc_norm"):
            parts = [self.norm(part, f"fc_norm.{i}.weight") for i, part in enumerate(aux.split(width, -1))]
            aux = torch.cat(parts, -1)
        if self.c.get("norm_before_fc"):
            aux = self.norm(aux, "input_norm.weight")
        return torch.nn.functional.linear(aux, self.w["fc.weight"])

    def forward(self, g_H: Tensor, token: int) -> tuple[Tensor, Tensor]:
        """One token through the layer at the next position: (final-normed, what the next step receives)."""
        position, D = len(self.keys), self.c["head_dim"]
        e = self.norm(self.embedding[token], "layers.0.input_layernorm.weight")
        normed = self.norm(g_H, "layers.0.hidden_norm.weight")
        x = torch.cat([e, normed])
        q, k, v = (self.linear(x, f"self_attn.{p}_proj").view(-1, D) for p in "qkv")
        if self.qk_norm:
            q = self.norm(q, "layers.0.self_attn.q_norm.weight")
            k = self.norm(k, "layers.0.self_attn.k_norm.weight")
        q = self.rotary(q, position)
        self.keys.append(self.rotary(k, position))
        self.values.append(v)
        groups = self.c["num_attention_heads"] // self.c["num_key_value_heads"]
        keys = torch.stack(self.keys).repeat_interleave(groups, 1)  # [S, N, D]
        values = torch.stack(self.values).repeat_interleave(groups, 1)
        weights = (torch.einsum("nd,snd->ns", q, keys) * D**-0.5).softmax(-1)
        attended = torch.einsum("ns,snd->nd", weights, values).flatten()
        residual = (normed if self.normed_residual else g_H) + self.linear(attended, "self_attn.o_proj")
        y = self.norm(residual, "layers.0.post_attention_layernorm.weight")
        act = torch.nn.functional.silu(self.linear(y, "mlp.gate_proj")) * self.linear(y, "mlp.up_proj")
        out = residual + self.linear(act, "mlp.down_proj")
        final = self.norm(out, "norm.weight")
        return final, final if self.c.get("norm_output") else out

    def logits(self, final_H: Tensor) -> Tensor:
        """A row over the target's vocabulary, minus infinity where the drafter can't speak [V]."""
        draft = torch.nn.functional.linear(final_H, self.w["lm_head.weight"])
        row = torch.full((self.c["vocab_size"],), float("-inf"))
        row[torch.arange(len(draft)) + (0 if self.d2t is None else self.d2t)] = draft
        return row

    def draft(self, aux_TC: Tensor, next_tokens: list[int], drafted: list[int]) -> tuple[list[Tensor], list[Tensor]]:
        """Logits [V] and next states [H] for each of 1 + len(drafted) draft positions after T committed slots."""
        self.keys, self.values = [], []
        final = state = torch.empty(0)
        for aux, token in zip(aux_TC, next_tokens, strict=True):
            final, state = self.forward(self.fuse(aux), token)
        rows, states = [self.logits(final)], [state]
        for token in drafted:
            final, state = self.forward(state, token)
            rows.append(self.logits(final))
            states.append(state)
        return rows, states


class VllmReader(Reader):
    """Prepends `model.` itself, so a name that has it is unknown; unknown names are fatal, missing ones stay as they
    were. Reads layer ids at the top only."""

    def read(self, stored: dict[str, Tensor], target_embedding_VH: Tensor) -> None:
        if "speculators_model_type" in self.c:
            self._map_speculators()
        c, kind = self.c, self.c["architectures"]
        assert kind in (["LlamaForCausalLMEagle3"], ["Eagle3Qwen3ForCausalLM"]) and c["num_hidden_layers"] == 1
        self.qk_norm = kind == ["Eagle3Qwen3ForCausalLM"]
        self.normed_residual = c.get("norm_before_residual", False)
        c["norm_before_fc"] = c.get("eagle_config", {}).get("norm_before_fc", c.get("norm_before_fc", False))
        self.ids = c.get("eagle_aux_hidden_state_layer_ids", DEFAULT)
        named = {name.replace("midlayer.", "layers.0."): t for name, t in stored.items()}
        known = LAYER | {"embed_tokens.weight", "fc.weight", "norm.weight", "lm_head.weight"}
        known |= QK if self.qk_norm else set()
        known |= {"input_norm.weight"} if c["norm_before_fc"] else set()
        known |= {f"fc_norm.{i}.weight" for i in range(c["num_aux_hidden_states"])} if c.get("fc_norm") else set()
        assert named.keys() <= known, named.keys() - known
        self.embedding = named.get("embed_tokens.weight", target_embedding_VH)
        reduced = c["draft_vocab_size"] < c["vocab_size"]
        assert reduced or self.d2t is None, "d2t has no parameter to land in"
        if reduced and self.d2t is None:
            self.d2t = torch.zeros(c["draft_vocab_size"], dtype=torch.int64)
        self.w = named

    def _map_speculators(self) -> None:
        """The format's own mapping; it demands a method with a token count and a verifier's name."""
        c = self.c
        assert c["speculators_model_type"] == "eagle3" and c["speculators_config"]["verifier"]["name_or_path"]
        assert c["speculators_config"]["proposal_methods"][0]["speculative_tokens"] > 0
        block = c["transformer_layer_config"]
        kinds = {"llama": "LlamaForCausalLMEagle3", "qwen3": "Eagle3Qwen3ForCausalLM"}
        taken = {key: c[key] for key in ABOVE if key in c}  # vLLM 0.32 takes no other key from the top level
        flags = {"norm_before_residual": c.get("norm_before_residual", True), "num_aux_hidden_states": 3}
        self.c = flags | block | taken | {"architectures": [kinds[block["model_type"]]]}

    def fuse(self, aux: Tensor) -> Tensor:
        return self.combined(aux)


ABOVE = (
    "draft_vocab_size",
    "target_hidden_size",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "eagle_aux_hidden_state_layer_ids",
)


class SglangReader(Reader):
    """Takes names with `model.` or without; passes over unknown and missing ones. Reads nested ids only, and adds 1.
    The residual is always un-normed, the embedding always the target's."""

    def read(self, stored: dict[str, Tensor], target_embedding_VH: Tensor) -> None:
        c = self.c
        assert c["architectures"] == ["LlamaForCausalLMEagle3"] and c["num_hidden_layers"] == 1
        assert "draft_vocab_size" in c
        self.qk_norm = self.normed_residual = False
        nested = c.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
        self.ids = DEFAULT if nested is None else [i + 1 for i in nested]
        self.w = {n.removeprefix("model.").replace("midlayer.", "layers.0."): t for n, t in stored.items()}
        self.embedding = target_embedding_VH
        if c["tie_word_embeddings"]:
            self.w["lm_head.weight"] = self.embedding

    def fuse(self, aux: Tensor) -> Tensor:
        return self.combined(aux) if aux.shape[-1] != self.embedding.shape[-1] else aux

"""An exported drafter as a serving engine reads it: config.json and model.safetensors, and nothing of models/.

The equations of vLLM and SGLang for one request, keys and values in a growing list. H width, V target vocabulary.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor


class EngineReader:
    def __init__(self, folder: Path, target_embedding_VH: Tensor) -> None:
        self.c: dict[str, Any] = json.loads((folder / "config.json").read_text())
        with safe_open(folder / "model.safetensors", "pt") as file:
            # an engine prepends `model.` itself, so a name that has it already is doubled and unknown
            self.w = {name: file.get_tensor(name) for name in list(file.keys())}
        assert self.c["architectures"] == ["LlamaForCausalLMEagle3"] and self.c["num_hidden_layers"] == 1
        for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "attention_bias"):
            assert self.c[flag] is False, flag
        assert self.c["tie_word_embeddings"] is False
        self.embedding = self.w.pop("embed_tokens.weight", target_embedding_VH)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def captured(self, target_layers: int) -> list[int]:
        """h[L] of the states to capture. The two places that engines read must agree."""
        default = [2, target_layers // 2, target_layers - 3]
        ids: list[int] = self.c.get("eagle_aux_hidden_state_layer_ids", default)
        nested = self.c.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids", [i - 1 for i in default])
        assert [i + 1 for i in nested] == sorted(set(ids)) and len(ids) == self.c["num_aux_hidden_states"]
        return ids

    def norm(self, x: Tensor, name: str) -> Tensor:
        scaled = x.float() * (x.float().pow(2).mean(-1, keepdim=True) + self.c["rms_norm_eps"]).rsqrt()
        return scaled * self.w[name]

    def linear(self, x: Tensor, name: str) -> Tensor:
        return torch.nn.functional.linear(x, self.w[f"midlayer.{name}.weight"])

    def rotary(self, x_ND: Tensor, position: int) -> Tensor:
        D = x_ND.shape[-1]
        frequencies = self.c["rope_theta"] ** (-torch.arange(0, D, 2, dtype=torch.float32) / D)
        cos, sin = (position * frequencies).cos().repeat(2), (position * frequencies).sin().repeat(2)
        half = torch.cat([-x_ND[:, D // 2 :], x_ND[:, : D // 2]], -1)
        return x_ND * cos + half * sin

    def forward(self, g_H: Tensor, token: int) -> Tensor:
        """One token through the layer at the next position; its state before the final norm goes into the next step."""
        position, D = len(self.keys), self.c["head_dim"]
        e = self.norm(self.embedding[token], "midlayer.input_layernorm.weight")
        x = torch.cat([e, self.norm(g_H, "midlayer.hidden_norm.weight")])
        q = self.rotary(self.linear(x, "self_attn.q_proj").view(-1, D), position)
        self.keys.append(self.rotary(self.linear(x, "self_attn.k_proj").view(-1, D), position))
        self.values.append(self.linear(x, "self_attn.v_proj").view(-1, D))
        groups = self.c["num_attention_heads"] // self.c["num_key_value_heads"]
        keys = torch.stack(self.keys).repeat_interleave(groups, 1)  # [S, N, D]
        values = torch.stack(self.values).repeat_interleave(groups, 1)
        weights = (torch.einsum("nd,snd->ns", q, keys) * D**-0.5).softmax(-1)
        attended = torch.einsum("ns,snd->nd", weights, values).flatten()
        residual = g_H + self.linear(attended, "self_attn.o_proj")
        y = self.norm(residual, "midlayer.post_attention_layernorm.weight")
        act = torch.nn.functional.silu(self.linear(y, "mlp.gate_proj")) * self.linear(y, "mlp.up_proj")
        return residual + self.linear(act, "mlp.down_proj")

    def logits(self, state_H: Tensor) -> Tensor:
        """A row over the target's vocabulary, minus infinity where the drafter can't speak [V]."""
        draft = torch.nn.functional.linear(self.norm(state_H, "norm.weight"), self.w["lm_head.weight"])
        if self.c["draft_vocab_size"] == self.c["vocab_size"]:
            assert "d2t" not in self.w  # has no parameter to land in
            return draft
        row = torch.full((self.c["vocab_size"],), float("-inf"))
        row[torch.arange(len(draft)) + self.w["d2t"]] = draft
        return row

    def draft(self, aux_TC: Tensor, next_tokens: list[int], drafted: list[int]) -> list[Tensor]:
        """Logits [V] for each of 1 + len(drafted) draft positions after T committed slots."""
        self.keys, self.values = [], []
        state = torch.empty(0)
        for aux, token in zip(aux_TC, next_tokens, strict=True):
            state = self.forward(torch.nn.functional.linear(aux, self.w["fc.weight"]), token)
        rows = [self.logits(state)]
        for token in drafted:
            state = self.forward(state, token)
            rows.append(self.logits(state))
        return rows

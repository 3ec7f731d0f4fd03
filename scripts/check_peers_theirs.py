"""A peer's half of scripts/check_peers.sh, run in the peer's own environment; knows nothing of Espalier.

    python check_peers_theirs.py speculators|specforge WORK

For each case of WORK: reads the folder that Espalier wrote for this library as the library does, runs its training
forward on the given inputs and writes PEER.safetensors with `logits` [S, T, Vd] and `loss` [S, T], one value a slot.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def shift_left(x, by=1):
    """Along the first axis; 0 past the end."""
    return torch.cat([x[by:], torch.zeros_like(x[:by])])


def watch(module):
    """What the module returns, call by call."""
    seen = []
    module.register_forward_hook(lambda _, __, out: seen.append(out[0].detach().clone()))
    return seen


def unlike(model, folder, given):
    """Tensors that only one of model and file has."""
    held, stored = set(model.state_dict()) - given, set(load_file(folder / "model.safetensors"))
    return {"missing": sorted(held - stored), "unknown": sorted(stored - held)}


def speculators(case, x, steps):
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    config = Eagle3SpeculatorConfig.from_pretrained(case / "speculators")
    config.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel.from_pretrained(case / "speculators", config=config, dtype=torch.float32)
    model.load_verifier_weights()
    model.eval()
    losses = []
    (kl_div, _), *_ = resolve_loss_config("kl_div", "eager").values()

    def kept(logits, targets):
        value = kl_div(logits, targets)
        losses.append(torch.nn.functional.pad(value[0].detach(), (0, len(x["ids"]) - value.shape[1])))
        return value

    seen = watch(model.lm_head)
    model(
        hidden_states=x["taps"][None],
        input_ids=shift_left(x["ids"])[None],
        document_ids=torch.zeros(1, len(x["ids"]), dtype=torch.long),
        position_ids=torch.arange(len(x["ids"]))[None],  # by default from 1: the same rotations but for rounding
        verifier_last_hidden_states=shift_left(x["before_norm"])[None],
        ttt_steps=steps,
        loss_config={"kl_div": (kept, 1.0)},
    )
    # frozen copies of the target's head and norm are read from the target
    return seen, losses, unlike(model, case / "speculators", {"verifier_lm_head.weight", "verifier_norm.weight"})


def specforge(case, x, steps):
    from specforge.algorithms.eagle3 import model as training
    from specforge.core.loss import _compute_loss
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
    from transformers import LlamaConfig

    # not by from_pretrained, which leaves its rotary tables and the maps of a full vocabulary uninitialised
    config = LlamaConfig.from_pretrained(case / "specforge")
    model = LlamaForCausalLMEagle3(config).float().eval()
    model.load_state_dict(load_file(case / "specforge" / "model.safetensors"), strict=False)
    model.embed_tokens.weight.data.copy_(load_file(case.parent / "embedding.safetensors")["embedding"])
    given = {"embed_tokens.weight"} | ({"d2t", "t2d"} if config.draft_vocab_size == config.vocab_size else set())
    losses = []

    class Slots:
        """Their own loss of one slot after another, in place of the kernel's mean over them."""

        @staticmethod
        def apply(logits, target_p, position_mask):
            slots = range(logits.shape[1])
            one = torch.ones_like(position_mask[:, :1])
            losses.append(
                torch.stack([_compute_loss(logits[:, p : p + 1], target_p[:, p : p + 1], one) for p in slots])
            )
            return losses[-1].mean()

    training.LogSoftmaxLoss = Slots
    seen = watch(model.lm_head)
    training.OnlineEagle3Model(model, length=steps, attention_backend="sdpa")(
        input_ids=shift_left(x["ids"])[None],
        attention_mask=torch.ones(1, len(x["ids"]), dtype=torch.bool),
        target=shift_left(x["teacher"])[None],
        loss_mask=torch.ones(1, len(x["ids"]), 1),
        hidden_states=x["taps"][None],
    )
    return seen, losses, unlike(model, case / "specforge", given)


@torch.no_grad()
def main(peer, work):
    run = {"speculators": speculators, "specforge": specforge}[peer]
    for name in json.loads((work / "cases.json").read_text())["names"]:
        case = work / name
        if (case / peer).is_dir():
            seen, losses, keys = run(case, load_file(case / "inputs.safetensors"), 3)
            save_file({"logits": torch.stack(seen), "loss": torch.stack(losses)}, case / f"{peer}.safetensors")
            (case / f"{peer}.json").write_text(json.dumps({"version": version(peer), "keys": keys}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

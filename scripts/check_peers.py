"""Espalier's half of scripts/check_peers.sh: write drafters and inputs down, then compare with what the peers computed.

    python scripts/check_peers.py write WORK recipe=smollm2 [DRAFTER ...]
    python scripts/check_peers.py compare WORK recipe=smollm2 [DRAFTER ...] [out=DIR]

Three unroll steps over one row of 32 tokens of the target's own, float32. Compared: the logits of every slot, and its
loss before mask, weights and normaliser: the cross-entropy against the teacher on the kept vocabulary for SpecForge,
the KL divergence for speculators, as each has it.
"""

import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from data_prep.prompts import load_prompts
from eval.outcome import encode
from models.attention import Documents
from models.eagle3 import Eagle3, Eagle3Config
from models.eagle3_layer import RMSNorm
from models.facts import read_facts
from models.kinds import look
from models.layout_tables import PORTABLE, SPECULATORS, why_not
from models.layouts import Verifier, load_drafter, save_drafter
from models.taps import engine_taps
from models.target import load_target
from models.vocab import VocabMap
from recipes.cli import told
from recipes.files import make_folder, read_json, write_json, write_text
from recipes.loading import load
from train.losses import Loss, judge

PEERS = {"speculators": "kl", "specforge": "soft_ce"}  # and their losses, as ours are called
TOKENS, STEPS, KEPT, BAR = 32, 3, 8192, 1e-5
COMMON: tuple[list[str], ...] = (
    [],
    ["fc_norm"],
)  # what SpecForge has too: with both vocabularies, default and other taps
FLAGGED = (
    ["fc_norm", "norm_output"],  # EAGLE 3.1
    ["norm_before_fc"],
    ["norm_before_residual"],
    ["qk_norm"],
    ["norm_before_residual", "norm_before_fc", "norm_output"],  # what speculators trains by default
    ["norm_before_residual", "fc_norm", "norm_output", "qk_norm"],
)


def cases() -> list[tuple[list[str], bool, bool]]:
    """(flags, full vocabulary, other taps)"""
    shapes = product(COMMON, (False, True), (False, True))
    return [*shapes, *((flags, i % 2 == 1, i % 3 == 1) for i, flags in enumerate(FLAGGED))]


def why_not_specforge(config: Eagle3Config) -> str:
    """What its drafter has no place for; "" if it can be one."""
    lacking = ("norm_before_residual", "norm_before_fc", "norm_output", "qk_norm")
    reasons = [flag for flag in lacking if getattr(config, flag)] + (["taps"] if len(config.taps) != 3 else [])
    return ", ".join(reasons)


def main(mode: str, work: Path, words: list[str]) -> None:
    out = next((word.partition("=")[2] for word in words if word.startswith("out=")), "")
    drafters = [str(Path(word).expanduser().resolve()) for word in words if "=" not in word]
    named = [word for word in words if "=" in word and not word.startswith("out=")]
    recipe = load([*named, "target.dtype=float32", "device=cpu"])
    if mode == "write":
        write(recipe, work, drafters)
        return
    rows = [compare(work / name, peer) for name in read_json(work / "cases.json", "cases")["names"] for peer in PEERS]
    text = table(rows)
    print(text)
    if out:
        write_text(make_folder(Path(out)) / "peers.md", text + "\n")
    if not all(row["good"] for row in rows):
        sys.exit(1)


def write(recipe: Any, work: Path, drafters: list[str]) -> None:
    """Every drafter in the layout that each peer reads, the inputs of all, and our own figures."""
    names: list[str] = []
    for folder in drafters:
        facts = read_facts(Path(folder))
        target = load_target(
            replace(recipe.target, taps=engine_taps(facts, look(facts))["vLLM"] or []), "cpu", torch.float32
        )
        names.append(write_case(work, len(names), folder, recipe, target, load_drafter(Path(folder), target)))
    if not drafters:
        taps = {custom: recipe.target.taps if not custom else [3, 12, 24] for custom in (False, True)}
        targets = {c: load_target(replace(recipe.target, taps=ids), "cpu", torch.float32) for c, ids in taps.items()}
        target = targets[False]
        for flags, full, custom in cases():
            drafter, said = made(targets[custom], full, flags), ", ".join(flags) or "no flags"
            told = f"{said}; {'full' if full else KEPT} tokens, taps {list(targets[custom].taps)}"
            names.append(write_case(work, len(names), told, recipe, targets[custom], drafter))
    save_file({"embedding": target.embed_weight.contiguous()}, work / "embedding.safetensors")
    write_json(work / "cases.json", {"names": names})


def made(target: Any, full: bool, flags: list[str]) -> Eagle3:
    """A random drafter, gains too, so that no norm can go unnoticed."""
    torch.manual_seed(0)
    kept = torch.randperm(target.vocab_size)[:KEPT]
    vocab = VocabMap.identity(target.vocab_size) if full else VocabMap.from_ids(kept, target.vocab_size)
    drafter = Eagle3(Eagle3Config.from_target(target, vocab, **dict.fromkeys(flags, True)), vocab)
    for module in drafter.modules():
        if isinstance(module, RMSNorm):
            nn.init.uniform_(module.weight, 0.5, 1.5)
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
    return drafter.eval()


@torch.no_grad()
def write_case(work: Path, number: int, told: str, recipe: Any, target: Any, drafter: Eagle3) -> str:
    case = make_folder(work / f"{number:02}")
    prompt = load_prompts("report")[0]
    ids_T = torch.tensor(encode(target, recipe, prompt)[:TOKENS])
    T, config = len(ids_T), drafter.config
    seen = target.features(ids_T[None])
    taps_TC, before_TH = seen.taps_BTC[0], before_final_norm(target, ids_T)
    states = drafter.unroll(taps_TC, target.embed(ahead(ids_T, 1, STEPS)), STEPS, Documents([T], ids_T.device))
    logits = torch.stack([drafter.logits(state_TH) for state_TH in states])
    teacher_TV = target.logits(seen.final_BTH[0])
    kept_TV = teacher_TV[:, drafter.vocab.kept_ids]
    ours = {"logits": logits}
    for name in PEERS.values():
        steps = [judge_step(logits[i], ahead(kept_TV, 1 + i), ahead(teacher_TV, 1 + i), name) for i in range(STEPS)]
        ours[name] = torch.stack(steps)
    save_file(ours, case / "ours.safetensors")
    inputs = {"ids": ids_T, "taps": taps_TC, "before_norm": before_TH, "teacher": teacher_TV}
    save_file({name: t.contiguous() for name, t in inputs.items()}, case / "inputs.safetensors")
    papers, refused = {"fingerprint": target.fingerprint}, why_not_specforge(config)
    architectures = read_json(target.folder / "config.json", "target")["architectures"]
    verifier = Verifier(str(target.folder.resolve()), architectures, target.embed_weight)
    save_drafter(drafter, case / "speculators", papers, layout=SPECULATORS, verifier=verifier)
    if not refused:
        assert not why_not(config, PORTABLE)
        save_drafter(drafter, case / "specforge", papers, layout=PORTABLE)
    write_json(case / "case.json", {"drafter": told, "refused": refused, "steps": STEPS})
    return case.name


def judge_step(logits_TV: torch.Tensor, kept_TV: torch.Tensor, teacher_TV: torch.Tensor, name: str) -> torch.Tensor:
    """Our loss of every slot [T]."""
    rows, scale = torch.arange(len(logits_TV)), torch.ones(len(logits_TV))
    return judge(logits_TV.clone(), kept_TV, rows, teacher_TV.logsumexp(-1), scale, Loss(name)).loss_n


def ahead(x: torch.Tensor, by: int, longer: int = 0) -> torch.Tensor:
    """out[p] = x[p + by], 0 past the end; `longer` than x."""
    return torch.cat([x[by:], x.new_zeros(by + longer, *x.shape[1:])])


def before_final_norm(target: Any, ids_T: torch.Tensor) -> torch.Tensor:
    """[T, H], of transformers' own forward."""
    seen: list[torch.Tensor] = []
    hook = target.model.get_decoder().norm.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    target.model(ids_T[None])
    hook.remove()
    return seen[0][0]


def compare(case: Path, peer: str) -> dict[str, Any]:
    """Largest differences over all slots that have a token to read and a teacher."""
    papers = read_json(case / "case.json", "case")
    row = {"drafter": papers["drafter"], "peer": peer, "good": True, "said": ""}
    if peer == "specforge" and papers["refused"]:
        return row | {"said": f"cannot express {papers['refused']}"}
    ours, theirs = load_file(case / "ours.safetensors"), load_file(case / f"{peer}.safetensors")
    by_step = []
    for i in range(STEPS):
        slots = slice(0, ours["logits"].shape[1] - 1 - i)
        wanted, scale = theirs["loss"][i, slots], ours["logits"][i, slots].abs().max()
        apart = (ours["logits"][i, slots] - theirs["logits"][i, slots]).abs().max() / scale
        loss_apart = ((ours[PEERS[peer]][i, slots] - wanted).abs() / wanted.abs().clamp(min=1)).max()
        by_step.append(torch.stack([apart, loss_apart]))
    logits, losses = torch.stack(by_step).amax(0).tolist()  # NaN, if there is one
    unread = read_json(case / f"{peer}.json", "peer")
    odd = "; ".join(f"{what}: {', '.join(names)}" for what, names in unread["keys"].items() if names)
    row |= {"logits": logits, "loss": losses, "said": odd, "version": unread["version"]}
    return row | {"good": logits <= BAR and losses <= BAR and not odd}


def table(rows: list[dict[str, Any]]) -> str:
    versions = ", ".join(sorted({f"{row['peer']} {row['version']}" for row in rows if "version" in row}))
    lines = [
        f"{versions} (CPU, float32) against Espalier: {STEPS} unroll steps over {TOKENS} tokens. Largest difference of "
        f"logits over the largest logit, and of a slot's loss over that loss (or 1); {BAR:.0e} is allowed.",
        "",
        "| drafter | library | logits | loss of a slot | |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        figures = f"{row['logits']:.1e} | {row['loss']:.1e}" if "logits" in row else "- | -"
        word = row["said"] if row["good"] else f"**WRONG** {row['said']}"
        lines.append(f"| {row['drafter']} | {row['peer']} | {figures} | {word} |")
    return "\n".join([*lines, "", "all as it must be" if all(row["good"] for row in rows) else "NOT AS IT MUST BE"])


if __name__ == "__main__":
    told(lambda: main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))

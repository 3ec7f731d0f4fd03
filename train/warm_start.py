"""Training that starts from another drafter, of any layout and any trainer, instead of from the target's last layer.

It may come from another target of the same sizes (say, before that was fine-tuned). Its flags and taps are the
recipe's; its vocabulary is kept, or replaced by the data's if `eagle.init_vocab` says so.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from data_prep.run import Prepared
from data_prep.vocabulary import coverage
from models import layout_tables
from models.eagle3 import Eagle3, Eagle3Config
from models.layouts import check_drafter, find_drafter, load_drafter, read_provenance
from models.source import Source, on_the_hub
from models.target import Target, check_taps
from models.vocab import VocabMap
from recipes.schema import EagleConfig, Recipe, UserError

FLAGS = (*layout_tables.FLAGS, "qk_norm")


def flags(cfg: EagleConfig) -> dict[str, bool]:
    return {name: getattr(cfg, name) for name in FLAGS}


def check_start(recipe: Recipe, source: Source | None) -> None:
    """Refuse, before data are made or weights load, a drafter that can't be gone on from as the recipe says. Without a
    source (a dry run fetches no target) only the drafter itself is looked at."""
    name, wanted = recipe.eagle.init_from, flags(recipe.eagle)
    if not name:
        return
    if recipe.dry_run and on_the_hub(name):
        print(f"eagle.init_from={name} will be fetched from the hub")
        return
    folder = find_drafter(name, "eagle.init_from")
    stored = check_drafter(folder, source, start=True)
    other = [
        f"eagle.{flag}={str(stored.fields[flag]).lower()}" for flag in FLAGS if stored.fields[flag] != wanted[flag]
    ]
    if other:
        raise UserError(
            f"eagle.init_from={name} was trained with other norms than the recipe says: give {' '.join(other)}"
        )
    if source is None:
        return
    own = stored.config(source.n_layers).taps
    if own != check_taps(recipe.target.taps, source.n_layers):
        taps = ",".join(map(str, own))
        raise UserError(f"eagle.init_from={name} reads the target's states [{taps}]: give target.taps=[{taps}]")


def make_drafter(recipe: Recipe, target: Target, prepared: Prepared) -> tuple[Eagle3, Prepared]:
    """The drafter to train, and the data with the vocabulary that it speaks."""
    cfg = recipe.eagle
    if not cfg.init_from:
        drafter = Eagle3(Eagle3Config.from_target(target, prepared.vocab, **flags(cfg)), prepared.vocab)
        drafter.init_from_target(target)
        return drafter, prepared
    folder = find_drafter(cfg.init_from, "eagle.init_from")
    drafter = load_drafter(folder, target, start=True).train()
    if cfg.init_vocab == "replace":
        return with_vocab(drafter, prepared.vocab, target), prepared
    return drafter, replace(prepared, vocab=drafter.vocab, report=_covered_by(prepared, drafter.vocab))


def with_vocab(drafter: Eagle3, vocab: VocabMap, target: Target) -> Eagle3:
    """The drafter with another vocabulary: a token's row of the head is its own if it could say it, else the
    target's."""
    changed = Eagle3(replace(drafter.config, draft_vocab_size=vocab.size), vocab).to(target.device)
    own = drafter.vocab.to_draft(vocab.kept_ids).to(target.device)
    theirs = target.head_weight[vocab.kept_ids.to(target.device)].float()
    with torch.no_grad():
        head = torch.where((own >= 0).unsqueeze(1), drafter.lm_head.weight[own.clamp(min=0)], theirs)
    changed.load_state_dict({**drafter.state_dict(), "lm_head.weight": head})
    return changed


def _covered_by(prepared: Prepared, vocab: VocabMap) -> dict[str, Any]:
    """The data's report with this vocabulary in it."""
    vocabulary = {
        "draft": vocab.size,
        "target": len(vocab.t2d),
        "hash": vocab.hash(),
        "coverage": coverage(prepared.train, vocab),
        "coverage_validation": coverage(prepared.validation, vocab),
    }
    return prepared.report | {"vocabulary": vocabulary}


def describe(recipe: Recipe, fingerprint: str, prepared: Prepared) -> str:
    """One line on where a warm start comes from and which tokens it can say."""
    folder: Path = find_drafter(recipe.eagle.init_from, "eagle.init_from")
    stated = read_provenance(folder).get("fingerprint")
    whose = {None: "of an unnamed target", fingerprint: "of this target"}.get(stated, "of another target")
    vocabulary = prepared.report["vocabulary"]
    return (
        f"starting from the drafter in {folder} ({whose}); vocabulary "
        f"{'kept' if recipe.eagle.init_vocab == 'keep' else 'replaced'}: {vocabulary['draft']:,} of "
        f"{vocabulary['target']:,} tokens, {vocabulary['coverage']['overall']:.2%} of the training tokens"
    )

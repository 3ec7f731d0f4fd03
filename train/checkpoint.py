"""Checkpoints that an exact resume needs and nothing more, in one format under every backend.

    checkpoints/step-N/model.safetensors       the drafter's fp32 parameters (and buffers), by name
                       optimizer.safetensors   exp_avg/NAME and exp_avg_sq/NAME in fp32
                       vocab.safetensors       the drafter's vocabulary map, where it has one
                       state.json              cursor, AdamW's step count, scores so far, identity of the run
    checkpoints/latest, best                   each names one of them

No pickle, nothing that depends on the number of ranks: a run may go on with another world size. RNG state is not there
because nothing draws from it: row order is a function of (seed, epoch), and no drafter uses dropout.
"""

import json
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.vocab import VocabMap, refuse_other_vocab, write_vocab
from recipes.files import make_folder, read_json, whole_folder, write_text
from recipes.schema import Recipe, UserError
from train.batches import Cursor

MOMENTS = ("exp_avg", "exp_avg_sq")
# what may change between a run and its continuation without changing what is learned (but in its last bits, as another
# number of ranks does: keep_features_mb=0)
FREE = {"data.cache", "data.slots", "target.shard", "train.recompute"}
FREE |= {f"train.{key}" for key in ("save_every", "keep", "log_every", "tracker", "keep_features_mb", "spike")}
STEP, TEACHER, ROWS = "dtype of the step", "dtype of the teacher", "data.rows"
RECORDED = {STEP, TEACHER, ROWS}  # runs that began before these were written down go on without
# not in the recipe
LATER = {"target.fingerprint", "target.template", "data.hash", "vocabulary.hash", "flexdraft.weights", *RECORDED}
PARTS = ("target", "data", "train")

Moments = dict[str, dict[str, Tensor]]  # exp_avg | exp_avg_sq -> parameter name -> fp32 tensor on the CPU


@dataclass
class State:
    """All of a checkpoint but its tensors."""

    cursor: Cursor = field(default_factory=Cursor)
    optimizer_step: int = 0
    scores: dict[int, float] = field(default_factory=dict)  # measured validation tau by step
    identity: dict[str, str] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)  # what train.guard compares with

    def best(self) -> int | None:
        """Step of the highest validation tau; the earlier of equals."""
        return max(sorted(self.scores), key=lambda step: self.scores[step], default=None)


class Store:
    """The checkpoints folder of one run. With a `vocab` each checkpoint holds it, and one with another is refused."""

    def __init__(self, run_dir: Path, vocab: VocabMap | None = None) -> None:
        self.folder, self.vocab = run_dir / "checkpoints", vocab

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step}"

    def steps(self) -> list[int]:
        """Whole checkpoints, in numeric order."""
        found = [p.parent.name.removeprefix("step-") for p in self.folder.glob("step-*/state.json")]
        return sorted(int(name) for name in found if name.isdigit())

    def named(self, pointer: str) -> int | None:
        """The step that `latest` or `best` names, when that checkpoint exists."""
        file = self.folder / pointer
        name = file.read_text(encoding="utf-8").strip().removeprefix("step-") if file.is_file() else ""
        return int(name) if name.isdigit() and int(name) in self.steps() else None

    def latest(self) -> int | None:
        """What to resume from. A kill between a save and its pointer leaves a newer whole checkpoint: it counts."""
        return max(self.steps(), default=None)

    def clean(self) -> None:
        """Drop what a kill left half-written."""
        for stale in self.folder.glob(".*"):
            if stale.is_dir():
                shutil.rmtree(stale, ignore_errors=True)
            else:
                stale.unlink(missing_ok=True)

    def save(self, state: State, model: dict[str, Tensor], moments: Moments, keep: int) -> None:
        """Write aside, fsync, rename, then move `latest`; older ones beyond `keep` go, `best` never."""
        step = state.cursor.step
        make_folder(self.folder)
        with whole_folder(self.path(step)) as aside:
            save_file(model, aside / "model.safetensors")
            save_file(
                {f"{kind}/{n}": t for kind in MOMENTS for n, t in moments[kind].items()},
                aside / "optimizer.safetensors",
            )
            if self.vocab is not None:
                write_vocab(self.vocab, aside / "vocab.safetensors")
            (aside / "state.json").write_text(json.dumps(asdict(state), indent=1) + "\n", encoding="utf-8")
        self.point("latest", step)
        kept = {step, *self.steps()[-max(1, keep) :], self.named("best"), state.best()}
        for old in self.steps():
            if old not in kept:
                # state.json first: a folder half-deleted by a kill is then no checkpoint any more
                (self.path(old) / "state.json").unlink()
                shutil.rmtree(self.path(old))

    def point(self, pointer: str, step: int) -> None:
        write_text(self.folder / pointer, f"step-{step}\n")

    def record(self, state: State) -> None:
        """Scores measured after a checkpoint was saved go into it, and `best` follows."""
        step = state.cursor.step
        write_text(self.path(step) / "state.json", json.dumps(asdict(state), indent=1) + "\n")
        self.follow(state)

    def follow(self, state: State) -> None:
        """`best` is the checkpoint with the best score of those that are there (damaged ones may have been deleted), or
        the newest where none has a score."""
        there = {step: score for step, score in state.scores.items() if step in self.steps()}
        best = State(scores=there).best()
        self.point("best", state.cursor.step if best is None else best)

    def state(self, step: int) -> State:
        file = self.path(step) / "state.json"
        raw = read_json(file, "damaged checkpoint, delete its folder")
        try:
            scores = {int(k): float(v) for k, v in raw["scores"].items()}
            losses = [float(loss) for loss in raw.get("losses", [])]
            return State(Cursor(**raw["cursor"]), int(raw["optimizer_step"]), scores, dict(raw["identity"]), losses)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"damaged checkpoint, delete its folder: {file} lacks what it should hold: {error!r}"
            ) from error

    def identity(self) -> dict[str, str]:
        """What the run here was begun as; empty before its first checkpoint."""
        step = self.latest()
        return {} if step is None else self.state(step).identity

    def model(self, step: int) -> dict[str, Tensor]:
        return _read(self.path(step) / "model.safetensors")

    def moments(self, step: int) -> Moments:
        flat = _read(self.path(step) / "optimizer.safetensors")
        return {
            kind: {n.removeprefix(f"{kind}/"): t for n, t in flat.items() if n.startswith(f"{kind}/")}
            for kind in MOMENTS
        }

    def resume(self, identity: dict[str, str]) -> State | None:
        """The state to go on from, or None for a fresh run. Refused when the run is another one."""
        step = self.latest()
        if step is None:
            return None
        state = self.state(step)
        refuse_change(state.identity, identity, self.folder.parent)
        state.identity = identity  # of an older run, with what it lacks
        if self.vocab is not None:
            refuse_other_vocab(self.vocab, self.path(step) / "vocab.safetensors")
        return state


def run_identity(recipe: Recipe, family: str, **hashes: str) -> dict[str, str]:
    """What must not change under a resumed run: the recipe's parts and the family's, key by key, the seed, and given
    hashes."""
    flat = {"seed": repr(recipe.seed)}
    for part in (*PARTS, family):
        flat |= _flatten(part, asdict(getattr(recipe, part)))
    return {k: v for k, v in flat.items() if k not in FREE} | hashes


def refuse_change(old: dict[str, str], new: dict[str, str], run_dir: Path) -> None:
    """UserError with every difference, one a line."""
    keys = sorted(old.keys() | new.keys() - RECORDED)
    changed = [
        f"  {k}: was {old.get(k, '(absent)')}, now {new.get(k, '(absent)')}" for k in keys if old.get(k) != new.get(k)
    ]
    if changed:
        raise UserError(
            f"{run_dir} holds a run that differs from the one asked for:\n"
            + "\n".join(changed)
            + "\nUndo the change to go on with that run, or start another with run_dir=DIR."
        )


def refuse_other_run(run_dir: Path, known: dict[str, str]) -> None:
    """UserError when the run in the folder, finished or not, differs from the one asked for in what is known of it
    before the target is fetched and the data are prepared."""
    summary = run_dir / "summary.json"
    if summary.is_file():
        stored = read_json(summary, "run folder (delete the file to redo the evaluation)")["identity"]
    else:
        stored = Store(run_dir).identity()
    if stored:
        refuse_change({k: v for k, v in stored.items() if k in known or k not in LATER}, known, run_dir)


def _flatten(prefix: str, value: Any) -> dict[str, str]:
    if isinstance(value, dict) and value:
        return {k: v for key, inner in value.items() for k, v in _flatten(f"{prefix}.{key}", inner).items()}
    return {prefix: repr(value)}


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"damaged checkpoint, delete its folder: {path} cannot be read: {error}") from error

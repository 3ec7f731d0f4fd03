"""What more data buys: a training of `recipe` on so many of the answer tokens at hand; a table and a plot of several.

    python scripts/study_data.py train answer_tokens=8000000 [also=FOLDER,FOLDER] recipe=smollm2-gpu [key=value ...]
    python scripts/study_data.py show RUN RUN ... [out=FILE.png]

With answer_tokens=0 all are taken. `also` names folders of prepared rows (`rows-...`, as `python -m data_prep.run
recipe=NAME seed=N data.cache=DIR` ends by naming them) that come behind the recipe's own; a tenth of each is taken if
a tenth of all is wanted. Validation prompts and the draft vocabulary are the recipe's own. Trainings of the same
train.max_steps take the same time, whatever the data: rows come again until the steps are done. Taus, loops excluded,
are read from each run's folder.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from rich.console import Console
from rich.table import Table

from data_prep.rows import Rows, joined
from data_prep.run import Prepared
from data_prep.vocabulary import predicted
from recipes.cli import entry, told
from recipes.files import read_json, run_folder, sha256_json, write_json
from recipes.schema import Recipe, UserError
from train import run
from train.eagle import EagleFamily


class Study(EagleFamily):
    """EAGLE-3 on `wanted` answer tokens (0: all) of the recipe's rows and of those in `also`."""

    def __init__(self, wanted: int, also: list[Path]) -> None:
        for folder in also:
            if not (folder / "train").is_dir():
                raise UserError(f"also: {folder} holds no prepared rows; name the rows-... folders of data_prep.run")
        self.wanted, self.also = wanted, also

    def hashes(self, recipe: Recipe) -> dict[str, str]:
        """A folder that another study has trained in is refused."""
        also = sha256_json([folder.name for folder in self.also])[:16]
        return super().hashes(recipe) | {"study.answer_tokens": str(self.wanted), "study.also": also}

    def chosen(self, recipe: Recipe, prepared: Prepared) -> Prepared:
        parts = [prepared.train, *(Rows.load(folder / "train") for folder in self.also)]
        there = sum(int(predicted(part).sum()) for part in parts)
        if there < self.wanted:
            raise UserError(f"answer_tokens={self.wanted}, but the rows at hand hold {there}")
        share = (self.wanted or there) / there
        train = joined([share_of(part, share, recipe.seed) for part in parts])
        said = {"answer_tokens": int(predicted(train).sum()), "rows": len(train), "tokens": len(train.ids)}
        print(f"study: {said}", flush=True)
        write_json(run_folder(recipe) / "study.json", said)
        changed = sha256_json([prepared.report["hash"], self.wanted, [folder.name for folder in self.also]])
        return replace(prepared, train=train, report={**prepared.report, "hash": changed})


def share_of(rows: Rows, share: float, seed: int) -> Rows:
    """So much of the rows, drawn without regard to their order: sources stand one behind the other."""
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    return rows.subset(sorted(order[: round(share * len(rows))].tolist()))


def taus(folder: Path) -> tuple[dict[str, Any], dict[str, float]]:
    """What was trained on, and of each decoder tau without the prompts flagged as loops."""
    if not (folder / "summary.json").is_file():
        raise UserError(f"{folder} holds no finished run")
    summary = read_json(folder / "summary.json", "the summary of a finished run")
    found = {}
    for path in sorted((folder / "eval" / f"step-{summary['best_step']}").glob("results-*.json")):
        result = read_json(path, "results")
        found[str(result["decoder"])] = float(result["overall"]["loops"]["without"]["tau"])
    return read_json(folder / "study.json", "what the study trained on"), found


def show(folders: list[str], out: str) -> None:
    if out and not Path(out).absolute().parent.is_dir():
        raise UserError(f"out={out}: there is no folder {Path(out).absolute().parent}")
    rows = sorted((taus(Path(folder)) for folder in folders), key=lambda row: int(row[0]["answer_tokens"]))
    decoders = [name for name in rows[0][1] if name != "ar"]
    table = Table("answer tokens", "rows", *(f"{name} tau" for name in decoders))
    for said, found in rows:
        table.add_row(f"{said['answer_tokens']:,}", f"{said['rows']:,}", *(f"{found[name]:.2f}" for name in decoders))
    Console().print(table)
    if out:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6, 4))
        axes = figure.add_subplot(xscale="log", xlabel="answer tokens", ylabel="tau, loops excluded")
        for name in decoders:
            axes.plot([t["answer_tokens"] for t, _ in rows], [found[name] for _, found in rows], "o-", label=name)
        axes.legend()
        figure.savefig(out, dpi=120, bbox_inches="tight")


def main(argv: list[str]) -> None:
    command, *rest = argv or ["--help"]
    if {"-h", "--help"} & set(argv) or not argv:
        print(str(__doc__).strip())
        return
    own = {key: value for key, _, value in (a.partition("=") for a in rest) if key in ("answer_tokens", "also", "out")}
    others = [a for a in rest if a.partition("=")[0] not in own]
    if command == "show" and others:
        show(others, own.get("out", ""))
    elif command == "train" and own.get("answer_tokens", "").isdigit():
        also = [Path(folder) for folder in own.get("also", "").split(",") if folder]
        entry(run.one_screen(lambda recipe: run.main(recipe, Study(int(own["answer_tokens"]), also))), others)
    else:
        wrong = "train needs answer_tokens=N, 0 or more" if command == "train" else "show needs the folders of runs"
        wrong = wrong if command in ("train", "show") else f"no such command: {command}"
        raise UserError(f"{wrong} (--help tells more)")


if __name__ == "__main__":
    told(lambda: main(sys.argv[1:]))

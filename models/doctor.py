"""What a drafter's folder is, whether vLLM and SGLang would serve it as it was trained, and what they would get wrong.

    python -m models.doctor DIR [target=ID|FOLDER|FILE.gguf] [engine=vllm|sglang] [--json]

For a drafter of any tool. With a target its sizes, fingerprint and RoPE are compared, and greedy chains are simulated
on ten prompts that ship with Espalier. `engine=` leaves the other engine's faults out. Nothing in the folder is run; of
pickled weights (.bin) tensors alone are read. Exit code: 0 = nothing fatal, 1 = something fatal, 2 = wrong use.
"""

import contextlib
import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from models.facts import Facts, read_facts, with_weights
from models.fault import BOTH, Finding, listed
from models.findings import diagnose
from models.kinds import NAMES, Draft, look
from models.layout_tables import FLAGS
from models.serving import sglang_command, vllm_command
from models.simulate import Simulated, simulate
from models.source import resolve
from models.taps import engine_taps
from recipes.cli import told
from recipes.files import user_path
from recipes.schema import TargetConfig, UserError

NO_TARGET = "not simulated: no target= was given, so that nothing was compared with one"
WORTHLESS = 1.05  # tau below which drafting costs more than it saves on any machine


@dataclass(frozen=True)
class Reading:
    """What one engine makes of the folder. `taps` in h[L] numbering, None = the target's default ones."""

    engine: str
    verdict: str  # serves | refuses | drafts wrongly
    taps: list[int] | None
    residual: str
    vocabulary: str
    positions: int
    command: str


@dataclass(frozen=True)
class Report:
    folder: str
    kind: str
    findings: list[Finding]
    readings: list[Reading]
    tau: Simulated | None = None
    no_tau: str = ""  # why there is none, where a target was given

    @property
    def fatal(self) -> bool:
        unread = not any(reading.verdict == "serves" for reading in self.readings)
        return any(finding.fatal for finding in self.findings) or unread

    @property
    def verdict(self) -> str:
        doubtful = any(finding.loud for finding in self.findings)
        return "fatal" if self.fatal else "doubtful, see the warnings" if doubtful else "fit to serve"


def examine(folder: Path, cfg: TargetConfig | None = None, engines: tuple[str, ...] = BOTH) -> Report:
    """Everything but the printing. Raises UserError where the target is none; never for what the folder holds."""
    facts = replace(read_facts(folder), target=resolve(cfg) if cfg else None)
    draft = look(facts)
    if (draft.eagle3 or draft.dflash) and not facts.unreadable:
        facts = with_weights(folder, facts)
    found = [f for f in diagnose(facts, draft) if set(f.engines) & set(engines)]
    known = bool(draft.kind) and not facts.unreadable
    readings = [read_as(engine, folder, facts, draft, found) for engine in engines] if known else []
    report = Report(str(folder), kind_of(draft), found, readings)
    if cfg is None or not known:
        return report
    if report.fatal:
        first = next((f.what for f in found if f.fatal), "no engine serves it")
        why = f"not simulated: a fatal fault comes first ({first})"
        others = any(reading.verdict == "serves" for reading in readings)
        return replace(report, no_tau=f"{why}; engine= leaves the faults of the other engine out" if others else why)
    try:
        tau = measure(folder, cfg, facts, draft)
    except UserError as error:
        return replace(report, no_tau=f"not simulated: {error}")
    return replace(report, tau=tau, findings=[*worthless(tau), *found])


def worthless(simulated: Simulated) -> list[Finding]:
    """What the weights' headers can't show: an untrained drafter, a head or a vocabulary map of another one."""
    if simulated.tau >= WORTHLESS:
        return []
    what = f"simulated tau {simulated.tau:.2f}: of {simulated.length} drafts a round next to none is accepted"
    cure = "serve it only if it is untrained on purpose; else its head, d2t, norms or target are not those of training"
    return [Finding(False, BOTH, what, cure, loud=True)]


def kind_of(draft: Draft) -> str:
    inner = draft.config.get("speculators_model_type")
    return f"{inner}, speculators layout" if draft.kind == "speculators" else NAMES[draft.kind]


def measure(folder: Path, cfg: TargetConfig, facts: Facts, draft: Draft) -> Simulated:
    from models.device import choose_device
    from models.layouts import load_drafter
    from models.target import load_target

    taps = engine_taps(facts, draft)["vLLM"]
    target = load_target(replace(cfg, taps=taps or []), choose_device())
    return simulate(target, load_drafter(folder, target))


def read_as(engine: str, folder: Path, facts: Facts, draft: Draft, found: list[Finding]) -> Reading:
    mine = [finding for finding in found if engine in finding.engines]
    stops = any(engine in finding.stops for finding in mine)
    wrong = any(finding.fatal for finding in mine)
    normed = engine == "vLLM" and bool(draft.config.get("norm_before_residual"))
    others = [flag for flag in FLAGS[1:] if draft.config.get(flag)]
    whole, kept = draft.number("vocab_size"), draft.draft_vocab
    form = "normed" if normed else "un-normed"
    return Reading(
        engine,
        "refuses" if stops else "drafts wrongly" if wrong else "serves",
        engine_taps(facts, draft)[engine],
        ", ".join([form, *others]) if draft.eagle3 else "",
        "full" if kept >= whole else f"{kept} of {whole}",
        draft.number("max_position_embeddings"),
        command(engine, folder, facts, draft),
    )


def command(engine: str, folder: Path, facts: Facts, draft: Draft) -> str:
    """How to serve it; empty where the engine has no way to."""
    target, where = target_name(facts), str(folder.resolve())
    if draft.dflash:
        drafts = max(1, draft.number("block_size", 16) - 1)
        serve = vllm_command(target, where, "dflash", drafts)
        return serve if engine == "vLLM" else sglang_command(target, where, "DFLASH", drafts)
    if engine == "vLLM":
        return vllm_command(target, where, parallel=draft.peagle) if draft.eagle3 else ""
    served = draft.eagle3 and not draft.peagle and draft.kind != "speculators"
    return sglang_command(target, where) if served else ""


def target_name(facts: Facts) -> str:
    """What engines call the target: the one given, else the one that the folder names, else TARGET."""
    if facts.target is not None:
        name = facts.target.name
        return str(facts.target.folder.resolve()) if name.startswith("package:") else name
    papers, inner = facts.provenance.get("target"), facts.config.get("speculators_config")
    verifier = inner.get("verifier") if isinstance(inner, dict) else None
    named = [place.get(key) for place, key in ((papers, "path"), (verifier, "name_or_path")) if isinstance(place, dict)]
    found = next((str(n) for n in named if n and not str(n).startswith("package:")), "TARGET")
    return found if "/" in found or found == "TARGET" else f"path/to/{found}"  # papers keep a local folder's name alone


def clean(text: str) -> str:
    """What a folder's files say, fit for a terminal: no markup, no control characters."""
    from rich.markup import escape

    return escape("".join(c if c.isprintable() else "?" for c in text))


def show(report: Report) -> None:
    """One screen, the fatal first; a line where the folder is no drafter."""
    from rich.console import Console
    from rich.table import Column, Table

    console = Console(highlight=False)
    colour = {"fatal": "red", "fit to serve": "green"}.get(report.verdict, "yellow")
    if not report.readings:
        for finding in report.findings:
            console.print(f"[bold red]fatal[/] {clean(report.folder)}: {clean(finding.what)}", soft_wrap=True)
        return
    head = f"[bold {colour}]{report.verdict}[/] {clean(report.folder)}: {clean(report.kind)}"
    console.print(head, soft_wrap=True)
    if report.findings:
        wide = [Column(head, overflow="fold") for head in ("what is wrong", "what to do")]  # keys must stay whole
        table = Table("", "engine", *wide)
        for f in report.findings:
            mark = "[bold red]fatal[/]" if f.fatal else "[bold yellow]warning[/]" if f.loud else "[yellow]note[/]"
            table.add_row(mark, " ".join(f.engines), clean(f.what), clean(f.cure))
        console.print(table)
    table = Table("engine", "verdict", "taps h\\[L]", "residual stream", "vocabulary", "positions")
    for r in report.readings:
        paint = "green" if r.verdict == "serves" else "red"
        taps = "2, n//2, n-3" if r.taps is None else listed(r.taps)
        table.add_row(r.engine, f"[{paint}]{r.verdict}[/]", taps, r.residual, r.vocabulary, str(r.positions or "?"))
    console.print(table)
    for r in report.readings:
        if r.command and r.verdict == "serves":
            print(r.command)
    if report.tau is not None:
        t = report.tau
        console.print(f"simulated tau [bold]{t.tau:.2f}[/]: greedy chains of {t.length} drafts, {t.prompts} prompts, "
            f"{t.rounds} rounds, max_new_tokens {t.max_new_tokens}", soft_wrap=True)  # fmt: skip
        console.print("accepted by position: " + " ".join(f"{share:.2f}" for share in t.by_position), soft_wrap=True)
    else:
        console.print(f"tau {clean(report.no_tau or NO_TARGET)}", soft_wrap=True)


def as_json(report: Report) -> dict[str, Any]:
    return {"fatal": report.fatal, "verdict": report.verdict, **asdict(report)}


def main(argv: list[str]) -> int:
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        return 0
    try:
        folder, cfg, engines, machine = arguments(argv)
        with contextlib.redirect_stdout(sys.stderr):  # a target may be converted or fetched, which is told
            report = examine(folder, cfg, engines)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if machine:
        print(json.dumps(as_json(report), indent=1))
    else:
        show(report)
    return int(report.fatal)


def arguments(argv: list[str]) -> tuple[Path, TargetConfig | None, tuple[str, ...], bool]:
    usage = "python -m models.doctor DIR [target=ID|FOLDER|FILE.gguf] [engine=vllm|sglang] [--json]"
    folders = [word for word in argv if "=" not in word and word != "--json"]
    named = dict(word.split("=", 1) for word in argv if "=" in word)
    unknown = [*(named.keys() - {"target", "engine"}), *(w for w in folders if w.startswith("-"))]
    if unknown or len(folders) != 1:
        wrong = f"unknown argument {unknown[0]!r}" if unknown else f"one folder is wanted, {len(folders)} were given"
        raise UserError(f"{wrong}. Usage: {usage}")
    engines = {"vllm": ("vLLM",), "sglang": ("SGLang",), "": BOTH}.get(named.get("engine", ""))
    if engines is None:
        raise UserError(f"engine={named['engine']} is neither vllm nor sglang")
    folder = user_path(folders[0])
    if not folder.exists() and not folder.is_symlink():
        raise UserError(f"there is no folder {folder}")
    target = named.get("target", "")
    return folder, TargetConfig(path=target) if target else None, engines, "--json" in argv


def as_command() -> None:
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.exit(code)


if __name__ == "__main__":
    told(as_command)

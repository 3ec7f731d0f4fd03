"""Weak scaling of online EAGLE-3 training: tokens a second on one, two and four GPUs at the same batch a GPU.

    python scripts/bench_scale.py [shapes=smollm2,qwen3-8b] [backends=ddp,zero2] [processes=1,2,4] [tokens=0] [steps=30]
        [warm=10] [every=5] [starts=1] [work=FOLDER] [timeout=150] [device=auto] [out=FILE.json]

Each arm is a training of its own, started as a user starts it: `accelerate launch --config_file
recipes/accelerate/BACKEND.yaml --num_processes N train/eagle.py ...`, on a target of random weights and made-up rows of
`tokens` a GPU and step (0: 16384 for smollm2, 8192 for qwen3-8b), answers three quarters of them. Targets and data are
made once, in `work` (kept; without it a temporary folder), and nothing of that is timed. What is printed are medians of
the lines of metrics.jsonl behind the first `warm` steps, each over `every` steps; once `steps` are logged the training
is ended, before it would save and evaluate. A small target gets faster for some hundred steps, and one start may be
half as fast again as the next, its step being the host's: steps=200 warm=100 starts=3. All arms take turns `starts`
times then, and an arm's medians are over the lines of all its starts.
`other` is the share of the time in which neither model computes on the first process's card. A launch that fails or
takes longer than `timeout` seconds shows its last lines, the others go on, and the exit code is 1.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from omegaconf import OmegaConf

from models.device import choose_device
from recipes.cli import told, whole, words
from recipes.files import make_folder, write_json
from recipes.schema import UserError

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = (
    "{% for m in messages %}{{ '<s>' + m['role'] + '\n' + m['content'] + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)
BACKENDS = sorted(path.stem for path in (ROOT / "recipes" / "accelerate").glob("*.yaml"))
ENDS = (signal.SIGTERM, signal.SIGHUP)  # what asks this script to end, besides Ctrl-C
LEAST_TOKENS = 64  # of a step: rows are an eighth of it, and a row must hold a question and an answer
SHARD = 2**31  # elements of a file of weights, at most: 4 GiB


@dataclass(frozen=True)
class Shape:
    """A target, and what is trained on it."""

    family: str
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head: int
    layers: int
    vocab: int
    tied: bool
    kept: int  # draft vocabulary
    tokens: int  # a GPU and step

    @property
    def row(self) -> int:
        """Tokens of a row, on average."""
        return min(1024, self.tokens // 8)


SHAPES = {
    "smollm2": Shape("llama", 576, 1536, 9, 3, 64, 30, 49152, True, 8192, 16384),
    "qwen3-8b": Shape("qwen3", 4096, 12288, 32, 8, 128, 36, 151936, False, 32000, 8192),
    "tiny": Shape("llama", 64, 128, 4, 2, 16, 8, 512, True, 256, 256),
}


def make_target(shape: Shape, folder: Path, device: torch.device) -> None:
    """Random bf16 weights in transformers' layout, made on the GPU where there is one. The head says little but tokens
    of the draft vocabulary, so that every slot counts."""
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        shape.family, vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head, max_position_embeddings=8192, bos_token_id=0, eos_token_id=1, pad_token_id=1,
        tie_word_embeddings=shape.tied,
    )  # fmt: skip
    with torch.device("meta"):
        sizes = {n: p.shape for n, p in AutoModelForCausalLM.from_config(config).named_parameters()}
    config.architectures = [{"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[shape.family]]
    head = "model.embed_tokens.weight" if shape.tied else "lm_head.weight"
    shards: list[list[str]] = [[]]
    for name, size in sizes.items():
        if shards[-1] and sum(sizes[n].numel() for n in shards[-1]) + size.numel() > SHARD:
            shards.append([])
        shards[-1].append(name)

    def tensor(name: str) -> torch.Tensor:
        if len(sizes[name]) == 1:
            return torch.ones(sizes[name], dtype=torch.bfloat16)
        made = torch.randn(sizes[name], dtype=torch.bfloat16, device=device) * (shape.hidden**-0.5)
        if name == head:
            made[shape.kept :] *= 0.05
        return made.cpu()

    def write(number: int) -> None:
        save_file({n: tensor(n) for n in shards[number]}, folder / f"model-{number}.safetensors", {"format": "pt"})

    torch.manual_seed(0)
    config.save_pretrained(folder)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(len(shards))))
    placed = {name: f"model-{number}.safetensors" for number, names in enumerate(shards) for name in names}
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": placed})


def make_tokenizer(vocab: int, folder: Path) -> None:
    """A word a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<s>", "</s>", "<unk>", *(f"w{i}" for i in range(3, vocab))]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


def make_rows(shape: Shape, tokens: int, file: Path) -> None:
    """At least so many tokens in dialogues of half to one and a half times the mean; the first quarter of each asks."""
    draw, words = random.Random(0), [f"w{i}" for i in range(3, shape.kept)]
    with file.open("w", encoding="utf-8") as out:
        while tokens > 0:
            length = draw.randint(shape.row // 2, shape.row * 3 // 2)
            said = draw.choices(words, k=length)
            parts = (("user", said[: length // 4]), ("assistant", said[length // 4 :]))
            out.write(json.dumps({"messages": [{"role": r, "content": " ".join(part)} for r, part in parts]}) + "\n")
            tokens -= length


def make_recipe(shape: Shape, place: Path, device: str) -> Path:
    """No more evaluation than a recipe must have: the training is ended before it."""
    values = {
        "device": device,
        "target": {"path": str(place / "target")},
        "data": {
            "sources": {"made": {"kind": "file", "path": str(place / "rows.jsonl"), "answers": "keep"}},
            "max_length": 2 * shape.row,
            "answer_tokens": 2,
            "drop_loops": False,
            "validation_rows": 1,
            "cache": str(place / "data"),
        },
        "eagle": {"draft_vocab": shape.kept},
        "train": {"tracker": "none", "spike": 0.0, "save_every": 10**6, "epochs": 1},
        "eval": {"limit": 1, "decoders": ["ar"], "max_new_tokens": 1, "lossless": -1, "each_epoch": False},
    }
    path = place / "recipe.yaml"
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(values)), encoding="utf-8")
    return path


def environment(work: Path) -> dict[str, str]:
    mine = {"HF_HUB_OFFLINE": "1", "ESPALIER_CACHE": str(work / "cache"), "TOKENIZERS_PARALLELISM": "false"}
    kept = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return kept | mine | {"PATH": path}


def prepare(name: str, shape: Shape, work: Path, tokens: int, options: dict[str, str]) -> Path:
    """The recipe, with everything that trainings of it read made and prepared; what is there from before is kept."""
    begun, device = time.perf_counter(), choose_device(options["device"])
    place = work / name
    place.mkdir(parents=True, exist_ok=True)
    if not (place / "target").is_dir():
        aside = place / "target.part"  # not worth the wait until it is on the disk
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        make_target(shape, aside, device)
        make_tokenizer(shape.vocab, aside)
        aside.rename(place / "target")
    if device.type == "cuda":
        torch.cuda.empty_cache()  # it is the trainings' from here on
    made = time.perf_counter()
    make_rows(shape, tokens, place / "rows.jsonl")
    recipe = make_recipe(shape, place, options["device"])
    command = [sys.executable, "-m", "data_prep.run", f"recipe={recipe}"]
    done = subprocess.run(command, cwd=ROOT, env=environment(work), capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"{name}: the data could not be prepared:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    took = f"target {made - begun:.0f} s, data {time.perf_counter() - made:.0f} s"
    print(f"{name}: {tokens:,} tokens of rows; {took} (not timed)", flush=True)
    return recipe


def lines_of(metrics: Path) -> list[dict[str, Any]]:
    """Whole lines of a file that is being written."""
    if not metrics.is_file():
        return []
    whole = metrics.read_text(encoding="utf-8").rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


def end(process: subprocess.Popen[str]) -> None:
    """The launcher and what it started: asked first, since it passes that on to those that left its group."""
    for sign, patience in ((signal.SIGTERM, 20), (signal.SIGKILL, 20)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)


def leave(*_: Any) -> None:
    """Asked to end: the training that is under way is ended too, once and in peace."""
    for sign in ENDS:
        signal.signal(sign, signal.SIG_IGN)
    sys.exit("asked to end")


class Start(NamedTuple):
    """What one training logged, and after how many seconds first."""

    lines: list[dict[str, Any]]
    seconds: float


def launch(recipe: Path, shape: Shape, backend: str, count: int, work: Path, options: dict[str, str]) -> Start:
    """One training, or UserError with its last words."""
    steps, run_dir = int(options["steps"]), work / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    config = ROOT / "recipes" / "accelerate" / f"{backend}.yaml"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    command += ["--num_processes", str(count), str(ROOT / "train" / "eagle.py"), f"recipe={recipe}"]
    command += [f"run_dir={run_dir}", f"train.batch_tokens={count * shape.tokens}"]
    command += [f"train.micro_batch_tokens={shape.tokens}", f"train.log_every={options['every']}"]
    command += [f"train.max_steps={10 * steps}"]  # it is ended long before, and never owes a save
    begun, first = time.perf_counter(), 0.0
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        process = subprocess.Popen(
            command, stdout=said, stderr=subprocess.STDOUT, text=True, cwd=work, env=environment(work),
            start_new_session=True,
        )  # fmt: skip
        try:
            while time.perf_counter() - begun < float(options["timeout"]):
                lines = lines_of(run_dir / "metrics.jsonl")
                if lines and not first:
                    first = time.perf_counter() - begun
                if lines and lines[-1]["step"] >= steps:
                    return Start(lines, first)
                if process.poll() is not None:
                    break
                time.sleep(0.1)
            why = "took too long" if process.poll() is None else f"ended with code {process.returncode}"
        finally:
            end(process)
        said.seek(0)
        output = said.read().splitlines()
        errors = [line for line in output if line.startswith("error:")]  # a launcher's traces come behind it
        raise UserError("\n".join([f"the training {why}", *dict.fromkeys(errors), "its last lines:", *output[-40:]]))


def figures(starts: list[Start], shape: Shape, count: int, warm: int) -> dict[str, Any]:
    """Medians over the lines behind the warm-up, of all starts of an arm; a step is one micro-batch of each process."""
    behind = [[line for line in one.lines if line["step"] > warm] for one in starts]
    steady = [line for lines in behind for line in lines]

    def middle(key: str) -> float:
        return statistics.median(line[key] for line in steady)

    speeds = [line["tokens_per_s"] for line in steady]
    ms = [1e3 * line["filled"] * count * shape.tokens / line["tokens_per_s"] for line in steady]
    outside = [1 - line["target_time"] - line["drafter_time"] for line in steady]
    return {
        "tokens_per_s": middle("tokens_per_s"),
        "low_high": [min(speeds), max(speeds)],
        "ms_a_step": round(statistics.median(ms), 2),
        "target": middle("target_time"),
        "drafter": middle("drafter_time"),
        "other": round(statistics.median(outside), 4),
        "data": middle("data_time"),
        "filled": middle("filled"),
        "of_peak": middle("of_peak") if "of_peak" in steady[0] else None,
        "peak_gib": max(line["peak_gib"] for line in steady),
        "loss": steady[-1]["loss"],
        "starts": [statistics.median(line["tokens_per_s"] for line in lines) for lines in behind],
        "start_s": round(statistics.median(one.seconds for one in starts), 1),
        "lines": [line for one in starts for line in one.lines],
    }


def show(results: list[dict[str, Any]]) -> None:
    head = f"{'shape':>10}{'backend':>9}{'N':>3}{'tokens/s':>12}{'of N=1':>8}{'of ddp 1':>9}{'ms/step':>10}"
    print(f"\n{head}{'target':>8}{'drafter':>9}{'other':>7}{'peak GiB':>10}{'start s':>9}  tokens/s of each start")
    alone = {(r["shape"], r["backend"]): r["tokens_per_s"] for r in results if r["processes"] == 1}
    for r in results:
        bases = [alone.get((r["shape"], backend)) for backend in (r["backend"], "ddp")]
        r["of_one"], r["of_ddp_one"] = (round(r["tokens_per_s"] / base, 3) if base else None for base in bases)
        ratios = f"{r['of_one'] or '-':>8}{r['of_ddp_one'] or '-':>9}"
        shares = f"{r['target']:>8.1%}{r['drafter']:>9.1%}{r['other']:>7.1%}"
        print(
            f"{r['shape']:>10}{r['backend']:>9}{r['processes']:>3}{r['tokens_per_s']:>12,.0f}{ratios}"
            f"{r['ms_a_step']:>10,.1f}{shares}{r['peak_gib']:>10.1f}{r['start_s']:>9.0f}"
            f"  {', '.join(f'{speed:,.0f}' for speed in r['starts'])}"
        )


def hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(device)}"
    return f"CPU, {os.cpu_count()} cores"


def counts_of(words: str, device: torch.device) -> list[int]:
    """The wanted numbers of processes that this machine has a card, or a core, each for; UserError where it has for
    none."""
    there = torch.cuda.device_count() if device.type == "cuda" else os.cpu_count() or 1
    wrong = [word for word in words.split(",") if not whole(word, 1)]
    if wrong:
        raise UserError(f"processes={words}: {wrong[0]!r} must be a whole number, 1 or more")
    counts = [count for count in map(int, words.split(",")) if count <= there]
    have = f"there are {there} {'GPUs' if device.type == 'cuda' else 'cores'} here"
    if not counts:
        raise UserError(f"processes={words}: {have}. Give numbers up to that.")
    if more := [word for word in words.split(",") if int(word) > there]:
        print(f"processes={','.join(more)} left out: {have}", flush=True)
    return counts


def bench(options: dict[str, str], counts: list[int], work: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """What was measured, and which arms failed. One arm runs at a time."""
    steps, warm, results, failed = int(options["steps"]), int(options["warm"]), [], []
    for name in options["shapes"].split(","):
        shape = SHAPES[name]
        if int(options["tokens"]):
            shape = replace(shape, tokens=int(options["tokens"]))
        recipe = prepare(name, shape, work, int(max(counts) * shape.tokens * (1.1 * steps + 8)), options)
        arms = [(backend, count) for backend in options["backends"].split(",") for count in counts]
        started: dict[tuple[str, int], list[Start]] = {arm: [] for arm in arms}
        for backend, count in arms * int(options["starts"]):
            label = f"{name} {backend} {count}"
            try:
                one = launch(recipe, shape, backend, count, work, options)
            except UserError as error:
                print(f"{label}: {error}", flush=True)
                failed.append(label)
                continue
            started[backend, count].append(one)
            found = figures([one], shape, count, warm)
            speed = f"{found['tokens_per_s']:,.0f} tokens/s, {found['ms_a_step']:,.1f} ms a step"
            print(f"{label}: {speed}, other {found['other']:.1%}, first line after {one.seconds:.0f} s", flush=True)
        for (backend, count), starts in started.items():
            if starts:
                arm = {"shape": name, "backend": backend, "processes": count, "tokens": shape.tokens}
                results.append(arm | figures(starts, shape, count, warm))
    return results, failed


def main(argv: list[str]) -> None:
    gpu = torch.cuda.is_available()
    options = {
        "shapes": "smollm2,qwen3-8b" if gpu else "tiny", "backends": "ddp,zero2", "processes": "1,2,4", "tokens": "0",
        "steps": "30", "warm": "10", "every": "5", "starts": "1", "work": "", "timeout": "150", "device": "auto",
        "out": "",
    }  # fmt: skip
    known = {"shapes": [*SHAPES], "backends": BACKENDS, "device": ("auto", "cpu", "cuda")}
    options = words(argv, options, str(__doc__), known, "steps every starts timeout")
    if int(options["steps"]) < int(options["warm"]) + int(options["every"]):
        raise UserError("steps must be at least warm + every: else no line is left to take the median of")
    if 0 < int(options["tokens"]) < LEAST_TOKENS:
        raise UserError(f"tokens={options['tokens']}: a step needs at least {LEAST_TOKENS} tokens (0: the shape's own)")
    if options["work"]:
        make_folder(Path(options["work"]))
    device = choose_device(options["device"])
    counts, card = counts_of(options["processes"], device), hardware(device)
    print(f"{card}, torch {torch.__version__}", flush=True)
    with contextlib.ExitStack() as stack:
        place = options["work"] or stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-scale-"))
        results, failed = bench(options, counts, Path(place).resolve())
    show(results)
    if options["out"]:
        written = {"hardware": card, "torch": torch.__version__, **options, "failed": failed, "results": results}
        write_json(Path(options["out"]), written)
        print(json.dumps({"written": options["out"]}))
    if failed:
        sys.exit(f"failed: {', '.join(dict.fromkeys(failed))}")


if __name__ == "__main__":
    for sign in ENDS:
        signal.signal(sign, leave)
    told(lambda: main(sys.argv[1:]))

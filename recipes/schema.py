"""The recipe: one frozen dataclass tree that every room may know.

A recipe is a YAML file in `recipes/` (or a path to one) laid over these defaults, then dotted `key=value` overrides
(recipes/loading.py). What values a key may have: recipes/rules.py.
"""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

DECODERS = ("ar", "chain", "eagle", "talon", "prune", "recycle", "lookup", "suffix", "graft", "splice", "flex")
DRAFTED = ("chain", "flex", "eagle", "talon", "prune", "graft", "splice")  # those that ask a drafter
VERIFIERS = (
    "match", "tree", "token", "block", "greedy_block", "spectr", "multipath", "traversal", "promoted", "spectr_gbv"
)  # fmt: skip
KINDS = ("file", "hub", "self")  # of data.sources
OBJECTIVES = ("soft_ce", "kl", "lk_alpha", "lk_lambda")  # train/losses.py
NORMALISERS = ("slots", "per_row")
BLOCK_SIZES = range(2, 65)  # masks of a group; one alone drafts nothing
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


class UserError(Exception):
    """A mistake the user can mend: what was wrong, where (file, line, key), and what to do about it."""


@dataclass(frozen=True)
class TargetConfig:
    path: str = ""  # hub id, local folder, GGUF file, or `package:NAME/FILE.gguf` for a file that a package ships
    sha256: str = ""  # of the GGUF file; refused when it differs; empty = not checked
    taps: list[int] = field(default_factory=list)  # h[L] numbering; empty = [2, n // 2, n - 3]
    dtype: str = "auto"  # auto = bfloat16 on a GPU, float32 on a CPU
    shard: str = "auto"  # each process of a training keeps a part of it: always | never | auto = under ZeRO-3
    template_args: dict[str, Any] = field(default_factory=dict)  # passed to the chat template, recorded with the run
    trust_remote_code: bool = False


@dataclass(frozen=True)
class SourceConfig:
    kind: str = "file"  # file | hub | self
    path: str = ""  # file (.jsonl, .json, .parquet; .gz and .zst too), or hub dataset id
    split: str = "train"  # hub only
    column: str = ""  # the one column or key to read; empty = what its keys show (data_prep/schemas.py)
    rows: int = 0  # at most this many prompts; 0 = all (self-synthesis needs a number)
    answers: str = "regenerate"  # by the target | keep those that stand there (file and hub)
    openings: list[str] = field(default_factory=lambda: [""])  # self only: the first words of the user turn, in turn
    max_tokens: int = 96  # self only: longest question; longer ones are truncations and fall
    temperatures: list[float] = field(default_factory=lambda: [1.0])  # self only: dealt out in turn
    subjects: int = 0  # self only: drawn from the target, for every other question to be about one; 0 = none


@dataclass(frozen=True)
class ServerConfig:
    """An OpenAI-compatible server of the target (vLLM, SGLang). Its key, if it wants one: OPENAI_API_KEY."""

    url: str = ""  # up to and with /v1, e.g. http://localhost:8000/v1; empty = the target writes on this machine
    model: str = ""  # the name that it is served by; empty = the only one there
    concurrency: int = 64  # requests in flight
    requests_per_minute: int = 0  # at most; 0 = as fast as it takes them (429 and Retry-After are heeded anyway)
    timeout: float = 600.0  # seconds for one answer


@dataclass(frozen=True)
class DataConfig:
    sources: dict[str, SourceConfig] = field(default_factory=dict)
    max_length: int = 1024  # tokens a row; longer rows are cut and counted
    answer_tokens: int = 256  # max_new_tokens of the target's answers
    temperatures: list[float] = field(default_factory=lambda: [0.0])  # of the answers, dealt out row by row
    drop_loops: bool = True  # answers that repeat themselves
    drop_truncated: bool = False  # answers that answer_tokens or max_length cut off
    slots: int = 32  # rows decoded side by side
    dtype: str = "auto"  # of generation; auto = bfloat16 where this device is faster with it, else float32
    server: ServerConfig = field(default_factory=ServerConfig)
    validation_rows: int = 32  # held out, by prompt; the best checkpoint is chosen on them
    states: str = "none"  # the target's hidden states of the training rows, written to disk first: none | bf16 | fp8
    cache: str = ""  # folder of prepared data, keyed by content; empty = ~/.cache/espalier


@dataclass(frozen=True)
class EagleConfig:
    draft_vocab: int = 32000  # most frequent supervised tokens; 0 = the target's full vocabulary
    unroll_steps: int = 7
    step_decay: float = 0.8  # weight of unroll step i is step_decay ** i over their sum
    objective: str = "soft_ce"  # soft_ce | kl | lk_alpha | lk_lambda (train/losses.py)
    lk_scale: float = 1.0  # of lk_lambda: KL weighs lk_scale exp(-lk_decay A), and 1 - A the rest
    lk_decay: float = 1.0
    normaliser: str = "slots"  # every supervised slot of an optimiser step weighs the same | per_row: every row does
    # norms, as engines understand them; fc_norm with norm_output is EAGLE 3.1
    fc_norm: bool = False  # of each tap before they are fused
    norm_output: bool = False  # the next step receives the final-normed state
    norm_before_fc: bool = False  # one norm over all taps instead of fc_norm
    norm_before_residual: bool = False  # SGLang can't serve it
    qk_norm: bool = False  # a Qwen3 block; SGLang can't serve it
    init_from: str = ""  # drafter folder or hub id of any layout to start from, with the same flags; empty = the target
    init_vocab: str = "keep"  # keep = of init_from's drafter | replace = by the data's draft_vocab


@dataclass(frozen=True)
class FlexConfig:
    """Of FlexDraft: the target's last layers draft a block with attention of their own."""

    layers: int = 0  # tuned ones, the last of the target; 0 = a third of them
    parametrisation: str = "full"  # copies of q, k, v, o | lora = adapters on them | layers = copies of whole layers
    lora_rank: int = 16  # of the adapters
    block_size: int = 16  # masks of a group, one more than it drafts
    anchors: int = 32  # groups a row, drawn anew each epoch
    gamma: float = 7.0  # weight of mask j is exp(-(j - 1) / gamma) over their sum
    loss: str = "soft"  # cross-entropy against the target's distribution | hard = against the row's own tokens
    calibrator: bool = False  # learned with the rest; else train/calibrator.py fits it afterwards
    calibrator_rank: int = 256


@dataclass(frozen=True)
class TrainConfig:
    epochs: int = 1
    max_steps: int = 0  # optimiser steps; 0 = as the epochs say
    batch_tokens: int = 16384  # an optimiser step, over all ranks and micro-batches
    micro_batch_tokens: int = 8192  # at most, in a forward on one rank; rows are packed to it whole, without padding
    keep_features_mb: int = 1024  # of the target's features, kept over the epochs in memory; on a CPU only; 0 = none
    learning_rate: float = 1e-4
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    weight_decay: float = 0.0
    warmup: float = 0.05  # share of the steps
    min_lr: float = 0.1  # share of learning_rate at the end of the cosine
    clip: float = 0.5
    spike: float = 3.0  # stop where a step's loss is above so many times the median of the 50 before; 0 = never
    recompute: bool = False  # run every unroll step again in the backward: slower, but far fewer activations are held
    precision: str = "auto"  # auto = bf16 autocast over fp32 masters on a GPU, fp32 on a CPU; fast = bf16 where faster
    save_every: int = 200  # steps; the end of an epoch always saves
    keep: int = 2  # checkpoints kept besides best
    log_every: int = 10
    tracker: str = "wandb"  # wandb | none; metrics.jsonl is always written


@dataclass(frozen=True)
class EvalConfig:
    prompts: str = "report"  # report (ships with Espalier) | humaneval | mtbench | gsm8k | FILE.jsonl | hub id
    limit: int = 0  # prompts; 0 = all
    decoders: list[str] = field(default_factory=lambda: ["ar", "chain", "eagle", "graft"])
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    batch_size: int = 1
    batch_sizes: list[int] = field(default_factory=list)  # of a sweep besides: every decoder, and `ar`, at each size
    dtype: str = "auto"  # as target.dtype
    chain_length: int = 7  # draft tokens of `chain`
    verifier: str = "auto"  # of `chain`: one of eval/rules.py, match (drafts need no laws), auto = the best measured
    paths: int = 1  # sampled chains a round, judged as one tree
    draft_temperature: float | None = None  # of `chain`; 0 = greedy drafts; empty = the target's if the rule needs laws
    draft_top_p: float = 1.0
    depth: int = 8  # of the tree
    branch: int = 10  # children a node, and frontier nodes a level (EAGLE's top-k)
    nodes: int = 60  # candidates, root not counted
    gates: list[float] = field(default_factory=list)  # after draft depths 1, 2, 6; empty = calibrated, else published
    graft_fill: str = "auto"  # freed places are filled while retrieval wins enough tokens | always, as published
    matrix: str = "warm-5"  # cold | carried | warm-N | FILE.safetensors, which eval.calibrate writes
    flex_mode: str = "auto"  # sequential | parallel = drafts the next block in the verification | auto = as tuned
    flex_threshold: float = 0.01  # of `flex`: drafts are verified until their probabilities' product falls below it
    # depth, nodes and gates by a measured cost curve: true = measured first, on validation prompts, unless python -m
    # eval.tune left its findings beside the drafter; empty = those findings, if there are any; false = the recipe's own
    tune: bool | None = None
    lossless: int = 0  # prompts whose greedy output is checked in fp32 against ar and transformers; 0 = all, -1 = none
    each_epoch: bool = True  # evaluate after each epoch of training
    max_prompt: int = 2048  # tokens; longer prompts are refused by id and counted


@dataclass(frozen=True)
class Recipe:
    recipe: str = ""
    run_dir: str = ""  # empty = runs/NAME
    seed: int = 0
    device: str = "auto"  # auto | cpu | cuda
    dry_run: bool = False
    target: TargetConfig = field(default_factory=TargetConfig)
    data: DataConfig = field(default_factory=DataConfig)
    eagle: EagleConfig = field(default_factory=EagleConfig)
    flex: FlexConfig = field(default_factory=FlexConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    flexdraft: str = ""  # of `train/calibrator.py` alone: the run folder, or drafter folder, that it goes on from
    # of `eval.run` and `data_prep.inspect` alone
    drafter: str = ""  # drafter folder
    decoder: str = ""  # one decoder instead of eval.decoders
    verifier: str = ""  # instead of eval.verifier, and checked there
    prompts: str = ""  # instead of eval.prompts
    out: str = ""
    rows: int = 3
    unroll: bool = False  # of `data_prep.inspect`: show what every unroll step predicts


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """The question after the nearest known word, a space before it; '' where none is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f" Did you mean {near[0]!r}?" if near else ""

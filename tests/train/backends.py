"""Several runs in turn in the same processes, each under the backend that its accelerate file names: starting a process
takes longest.

accelerate launch --config_file recipes/accelerate/FIRST.yaml backends.py MODEL_FOLDER PLAN.json
"""

import json
import math
import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.state import AcceleratorState
from accelerate.utils.launch import prepare_deepspeed_cmd_env
from torch import Tensor

import train.loop
from models.attention import Documents
from models.generate import generate
from models.sharded import Shards, led, load_sharded
from models.target import Target, load_target
from recipes.schema import TargetConfig, UserError
from tests.train import tiny_run
from train.checkpoint import Moments, State, Store

RECIPES = Path(__file__).resolve().parents[2] / "recipes" / "accelerate"


def switch(config: str) -> None:
    """Give this process the environment that `accelerate launch` with this file would, and forget the old backend."""
    for key in [k for k in os.environ if k.startswith("ACCELERATE_DEEPSPEED_")]:
        del os.environ[key]
    file = str(RECIPES / config)
    given = launch_command_parser().parse_args(["--config_file", file, "--num_cpu_threads_per_process", "1", "none"])
    args, defaults, _ = _validate_launch_command(given)
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "false"
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = list(defaults.deepspeed_config)
        told = prepare_deepspeed_cmd_env(args)[1]
        os.environ.update({k: v for k, v in told.items() if k.startswith("ACCELERATE_")})
    AcceleratorState._reset_state(reset_partial_state=True)


class KilledStore(Store):
    """Dies in its second save, with the new checkpoint half written."""

    def save(self, state: State, model: dict[str, Tensor], moments: Moments, keep: int) -> None:
        if self.steps():
            half = self.folder / f".step-{state.cursor.step}.{os.getpid()}"
            half.mkdir()
            (half / "model.safetensors").write_bytes(b"\x10\x00")
            os.kill(os.getpid(), signal.SIGKILL)
        super().save(state, model, moments, keep)


def sharded(cfg: TargetConfig) -> Target:
    tiny_run.accelerator()  # the processes know each other from here on
    return load_sharded(cfg, torch.device("cpu"), torch.float32, int(os.environ["LOCAL_RANK"]), 2)


def compare(cfg: TargetConfig) -> None:
    """A sharded target says what a whole one does, bit for bit: in passes of both processes, and led by the first."""
    whole, cut = load_target(cfg), sharded(cfg)
    main, draw = int(os.environ["RANK"]) == 0, torch.Generator().manual_seed(0)
    ids = torch.randint(0, tiny_run.VOCAB, (37,), generator=draw)
    documents = Documents([20, 17], torch.device("cpu"))

    def passes(target: Target) -> list[torch.Tensor]:
        packed = target.packed_features(ids, documents)
        found = [packed.taps_BTC, packed.final_BTH, target.logits(packed.final_BTH), target.embed(ids)]
        kept = torch.arange(0, tiny_run.VOCAB, 3)
        return [*found, target.logits(packed.final_BTH, target.head_weight[kept]), target.head_weight.clone()]

    def answer(target: Target) -> list[list[int]]:
        prompts = [ids[:9].tolist(), ids[:5].tolist()]
        options: dict[str, Any] = {"max_new_tokens": 12, "temperatures": [0.0, 0.0], "slots": 2, "seed": 0}
        return generate(target, prompts, stop_ids=frozenset(), **options)

    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(passes(whole), passes(cut), strict=True))
        answers = led(cut, main, lambda: answer(cut))
        assert answers == (answer(whole) if main else None)
    held = sum(part.nbytes for part in cut.weights.parts) if isinstance(cut.weights, Shards) else 0
    assert held < 0.6 * sum(p.nbytes for p in whole.model.parameters())


def main(folder: Path, plan: list[dict[str, Any]]) -> None:
    """A refusal goes to RUN_DIR/refused, for the test to read."""
    for entry in plan:
        switch(entry["config"])
        if entry.get("kill"):
            vars(train.loop)["Store"] = KilledStore
        run_dir, settings = Path(entry["run_dir"]), entry.get("train", {})
        identity = entry.get("identity", tiny_run.IDENTITY)
        cfg = TargetConfig(path=entry.get("model", str(folder)))
        if entry.get("compare"):
            compare(cfg)
            continue
        try:
            loop = tiny_run.run(
                sharded(cfg) if entry.get("shard") else load_target(cfg),
                run_dir,
                stop_after=entry.get("stop_after", 0),
                identity=identity,
                spoil={int(step): math.nan for step in entry.get("spoil", [])},
                **settings,
            )
            assert loop.accelerator.num_processes == 2
        except UserError as error:
            (run_dir / "refused").write_text(str(error))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()))

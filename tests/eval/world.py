"""What a command line needs: a tiny target, a drafter for it, a recipe and prompts, as files."""

import json
from pathlib import Path

import torch

from models.eagle3 import Eagle3, Eagle3Config
from models.layouts import save_drafter
from models.target import load_target
from models.vocab import VocabMap
from recipes.schema import TargetConfig
from tests.tiny import tiny_model_folder


class World:
    """A tiny target, a drafter of random weights for it, a recipe and a prompt file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        tiny_model_folder(folder / "target")
        target = load_target(TargetConfig(path=str(folder / "target")), "cpu", torch.float32)
        drafter = Eagle3(
            Eagle3Config.from_target(target, VocabMap.identity(target.vocab_size)), VocabMap.identity(target.vocab_size)
        )
        save_drafter(drafter, folder / "drafter", {"fingerprint": target.fingerprint})
        (folder / "tiny.yaml").write_text(
            f"target: {{path: {folder / 'target'}}}\n"
            "eval: {max_new_tokens: 10, matrix: warm-2, nodes: 4, depth: 2, branch: 2, chain_length: 2, lossless: 2}\n"
        )
        lines = [{"id": f"p{i}", "category": "abc"[i % 3], "turns": ["the quick fox " * (i + 1)]} for i in range(4)]
        lines[0]["turns"] = ["a b c", "d e f"]
        (folder / "prompts.jsonl").write_text("\n".join(json.dumps(line) for line in lines))

    def arguments(self, *extra: str) -> list[str]:
        given = [f"recipe={self.folder / 'tiny.yaml'}", f"drafter={self.folder / 'drafter'}"]
        given += [f"prompts={self.folder / 'prompts.jsonl'}", f"out={self.folder / 'out'}"]
        names = {argument.partition("=")[0] for argument in extra}
        return [argument for argument in given if argument.partition("=")[0] not in names] + list(extra)

    def beside(self, *extra: str) -> list[str]:
        """For the commands that measure prompts of their own, and write beside the drafter or nowhere."""
        return [argument for argument in self.arguments(*extra) if not argument.startswith(("prompts=", "out="))]

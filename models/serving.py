"""How the two engines are told to serve a drafter. Paste as they stand."""

import json
import shlex
from typing import Any

DRAFTS = 3  # draft tokens a round, where nothing better is known


def vllm_command(target: str, folder: str, method: str = "eagle3", drafts: int = DRAFTS, parallel: bool = False) -> str:
    said: dict[str, Any] = {"method": method, "model": folder, "num_speculative_tokens": drafts}
    if parallel:
        said["parallel_drafting"] = True
    return f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(json.dumps(said))}"


def sglang_command(target: str, folder: str, algorithm: str = "EAGLE3", drafts: int = DRAFTS) -> str:
    """A chain, as vLLM drafts it. Algorithm EAGLE instead of EAGLE3 would accept nothing, in silence."""
    chain = f"--speculative-num-steps {drafts} --speculative-eagle-topk 1 --speculative-num-draft-tokens {drafts + 1}"
    if algorithm == "DFLASH":
        chain = f"--speculative-num-draft-tokens {drafts + 1}"
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(target)} --speculative-algorithm {algorithm} "
        f"--speculative-draft-model-path {shlex.quote(folder)} {chain}"
    )

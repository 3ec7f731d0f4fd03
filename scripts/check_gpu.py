"""Checks that need a GPU: the decoding kernels and captured decoding against the plain layers, in fp32.

    python scripts/check_gpu.py

Prints one line a check and exits 1 when one fails. The tests compare the same functions without kernels and capture.
"""

import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from eval.decode import decode
from eval.engine import Engines
from eval.settings import Settings
from models.target import Target, load_target
from recipes.schema import DECODERS, TargetConfig
from tests.tiny import tiny_drafter, tiny_model_folder

NEW = 40


def tree_is_verified_alike(target: Target, lengths: tuple[int, ...]) -> bool:
    source = torch.Generator().manual_seed(0)
    prompts = torch.randint(2, 320, (len(lengths), max(lengths)), generator=source).cuda()
    tree = torch.randint(2, 320, (len(lengths), 9), generator=source).cuda()
    seen = torch.rand(len(lengths), 9, 9, generator=source).cuda() < 0.5
    seen |= torch.eye(9, dtype=torch.bool, device="cuda")
    found = []
    for bucket in (0, 512):  # the plain way, and the kernels
        cache = target.new_cache(len(lengths), 512)
        target.prefill(prompts, list(lengths), cache)
        cache.bucket = bucket
        found.append(target.forward(tree, cache, seen.sum(2) - 1, seen))
    pairs = ((found[0].taps_BTC, found[1].taps_BTC), (found[0].final_BTH, found[1].final_BTH))
    return all(torch.allclose(one, other, atol=2e-4, rtol=2e-4) for one, other in pairs)


def captured_decoding_says_the_same(target: Target, decoder: str) -> bool:
    """Three times: as it stands, recorded, replayed."""
    drafter = tiny_drafter(target, noise=0.0).cuda()
    prompts = [[5, 9, 3], [7] * 40, [11, 12]]
    settings = Settings(decoder, NEW, depth=4, branch=4, nodes=20, gates=(0.3, 0.1, 0.5))
    plain = decode(target, drafter, prompts, settings, engines=Engines(fixed=False))
    engines = Engines()
    return all(decode(target, drafter, prompts, settings, engines=engines).rows == plain.rows for _ in range(3))


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("no GPU here")
    failed = 0
    for family in ("llama", "qwen3", "mistral", "gemma3_text"):
        folder = tiny_model_folder(Path(tempfile.mkdtemp()), family, head_dim=16)
        target = load_target(TargetConfig(path=str(folder)), "cuda", torch.float32)
        kernels = "fused kernels" if target.fusable else "plain layers"
        results = {f"tree behind {n}": tree_is_verified_alike(target, n) for n in ((5, 70, 3), (300,))}
        results |= {d: captured_decoding_says_the_same(target, d) for d in DECODERS}
        failed += sum(not held for held in results.values())
        for what, held in results.items():
            print(f"{family} ({kernels}), {what}: {'equal' if held else 'DIFFERENT'}", flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()

"""Checks that need a GPU: the decoding kernels and captured decoding against the plain layers, in fp32.

    python scripts/check_gpu.py

Prints one line a check and exits 1 when one fails. The tests compare the same functions without kernels and capture.
"""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from eval.decode import decode
from eval.engine import Engines
from eval.settings import Settings
from eval.tree import FIELDS, DraftTree
from eval.verify import follow
from models.sampling import draw, law, sample
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


def captured_decoding_says_the_same(target: Target, decoder: str, temperature: float) -> bool:
    """Three times: as it stands, recorded, replayed; with batches of another size in between, since what one engine
    recorded must outlive the next."""
    drafter = tiny_drafter(target, noise=0.0).cuda()
    prompts = [[5, 9, 3], [7] * 40, [11, 12]]
    settings = Settings(decoder, NEW, depth=4, branch=4, nodes=20, gates=(0.3, 0.1, 0.5), temperature=temperature)
    engines, held = Engines(), []
    for batch in (prompts, prompts[:1]) * 3:
        plain = decode(target, drafter, batch, settings, engines=Engines(fixed=False))
        held.append(decode(target, drafter, batch, settings, engines=engines).rows == plain.rows)
    return all(held)


def draws_are_the_laws() -> bool:
    """Of 20,000 rows, all but the few whose noise falls between two tokens within rounding."""
    source = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(20000, 5000, generator=source)).cuda()
    noise = torch.rand(len(logits), dtype=torch.float64, generator=source).cuda()
    found = sample(logits, 0.7, 0, 1.0, noise)
    return bool((found != draw(law(logits.double(), 0.7), noise)).sum() <= 20)


def walks_are_alike() -> bool:
    source = torch.Generator().manual_seed(0)
    B, N = 64, 24
    parents = torch.stack([torch.randint(0, max(1, n), (B,), generator=source) for n in range(N)], 1)
    tokens, chosen = (torch.randint(0, 4, (B, N), generator=source) for _ in range(2))
    valid = torch.rand(B, N, generator=source) < 0.9
    tree = DraftTree(tokens, parents, torch.zeros(B, N), torch.zeros_like(tokens), valid, N - 1)
    there = replace(tree, **{name: getattr(tree, name).cuda() for name in FIELDS})
    pairs = zip(follow(tree, chosen), follow(there, chosen.cuda()), strict=True)
    return all(torch.equal(one, other.cpu()) for one, other in pairs)


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("no GPU here")
    alone = {"draws": draws_are_the_laws(), "walks": walks_are_alike()}
    failed = sum(not held for held in alone.values())
    print(", ".join(f"{what}: {'equal' if held else 'DIFFERENT'}" for what, held in alone.items()))
    for family in ("llama", "qwen3", "mistral", "gemma3_text"):
        folder = tiny_model_folder(Path(tempfile.mkdtemp()), family, head_dim=16)
        target = load_target(TargetConfig(path=str(folder)), "cuda", torch.float32)
        kernels = "fused kernels" if target.kernels else "plain layers"
        results = {f"tree behind {n}": tree_is_verified_alike(target, n) for n in ((5, 70, 3), (300,))}
        results |= {
            f"{d} at T = {t}": captured_decoding_says_the_same(target, d, t) for d in DECODERS for t in (0, 0.8)
        }
        failed += sum(not held for held in results.values())
        for what, held in results.items():
            print(f"{family} ({kernels}), {what}: {'equal' if held else 'DIFFERENT'}", flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()

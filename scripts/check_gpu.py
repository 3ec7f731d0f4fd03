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
from eval.rules import RULES, TABLE, Rule, faults, verify
from eval.rules_traversal import by_kernels
from eval.settings import Settings
from eval.tree import FIELDS, DraftTree
from eval.verify import Drafts, Stops, follow
from models.sampling import draw, law, sample
from models.target import Target, load_target
from recipes.schema import DECODERS, TargetConfig
from scripts.bench_rules import random_drafts
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
    recorded must outlive the next; and with prompts that wait for a place."""
    drafter = tiny_drafter(target, noise=0.0).cuda()
    prompts = [[5, 9, 3], [7] * 40, [11, 12]]
    settings = Settings(decoder, NEW, depth=4, branch=4, nodes=20, gates=(0.3, 0.1, 0.5), temperature=temperature)
    engines, held = Engines(), []
    for batch, slots in ((prompts, 3), (prompts[:1], 1), (prompts * 3, 3)) * 3:
        plain = decode(target, drafter, batch, settings, slots=slots, engines=Engines(fixed=False))
        held.append(decode(target, drafter, batch, settings, slots=slots, engines=engines).rows == plain.rows)
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


def rule_judges_alike(rule: Rule) -> bool:
    """Stops, the path and the token after it, on a CPU and by the kernels, on drafts whose paths part here and there;
    says what differs. Multi-path verification ranks nearly equal ratios by fewer bits there."""
    held, most = [], 1e-3 if rule.name == "multipath" else 1e-6
    for paths, length, vocab in ((1, 5, 3000), (4, 3, 5), (3, 4, 3), (2, 2, 9000)):
        for seed in range(2 if rule.several or paths == 1 else 0):
            here, _ = random_drafts(seed, 3, paths, length, vocab, torch.device("cpu"))
            there = Drafts(*(x.cuda() for x in (here.tokens, here.draft, here.target, here.coins)))
            noise = torch.rand(3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
            laws = [rule.stops(drafts).law.cpu() for drafts in (here, there)]
            apart = float((laws[0] - laws[1]).abs().max())
            pairs = zip(verify(rule, here, noise), verify(rule, there, noise.cuda()), strict=True)
            same = [apart <= most, *(torch.equal(one, other.cpu()) for one, other in pairs), not faults(there).any()]
            held.append(all(same))
            if not all(same):
                what = f"stops {apart:.1e} apart; path, accepted, token equal and no fault: {same[1:]}"
                print(f"  {rule.name}, K {paths}, L {length}, V {vocab}, seed {seed}: {what}", flush=True)
    return all(held)


def promoted_by_kernels(drafts: Drafts) -> Stops:
    return by_kernels(drafts, promote=True) if drafts.tokens.is_cuda else RULES["promoted"].stops(drafts)


def sampled_drafts_are_judged_the_same_when_captured(target: Target, verifier: str, paths: int) -> bool:
    """As it stands, recorded, replayed, and replayed."""
    drafter = tiny_drafter(target, [i for i in range(320) if i % 5], noise=0.0).cuda()
    settings = Settings("chain", NEW, 1.0, depth=4, verifier=verifier, paths=paths, draft_temperature=0.9)
    engines = Engines()
    found = [decode(target, drafter, [[5, 9, 3], [7] * 40, [11, 12]], settings, engines=engines).rows for _ in range(3)]
    return found[0] == found[1] == found[2] and sum(row.rounds for row in found[0]) > 3


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("no GPU here")
    alone = {"draws": draws_are_the_laws(), "walks": walks_are_alike()}
    alone |= {f"rule {rule.name}": rule_judges_alike(rule) for rule in TABLE}
    alone["promoted by kernels (not in use)"] = rule_judges_alike(replace(RULES["promoted"], stops=promoted_by_kernels))
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
        results |= {
            f"{rule.name}, {k} sampled paths": sampled_drafts_are_judged_the_same_when_captured(target, rule.name, k)
            for rule in TABLE
            for k in (3 if rule.several else 1,)
            if family == "llama" and not rule.text_alone
        }
        failed += sum(not held for held in results.values())
        for what, held in results.items():
            print(f"{family} ({kernels}), {what}: {'equal' if held else 'DIFFERENT'}", flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()

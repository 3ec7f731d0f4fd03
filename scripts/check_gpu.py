"""Checks that need a GPU: the kernels of decoding and training, and captured decoding, against the plain layers.

    python scripts/check_gpu.py

Prints one line a check and exits 1 when one fails. The tests compare the same functions without kernels and capture.
"""

import itertools
import sys
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from eval.decode import RowResult, decode
from eval.drafting import UNGATED, Candidates, rerank
from eval.engine import Engines, remember
from eval.filling import Filling
from eval.matrix import SuccessorMatrix
from eval.rules import TABLE, Rule, faults, verify
from eval.settings import Settings
from eval.tree import FIELDS
from eval.verify import Drafts, accept
from models import lean
from models.attention import Documents
from models.packed import Keys, PackedForward
from models.sampling import best_and_mass, draw, law, sample
from models.target import States, Target, load_target
from models.unroll_attention import Asking, causal_plus_diagonals, reference_causal_plus_diagonals
from recipes.schema import DECODERS, OBJECTIVES, TargetConfig
from scripts.bench_rules import random_drafts
from tests.tiny import tiny_drafter, tiny_model_folder
from train.losses import Loss, judge, plainly

NEW = 30


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, atol=2e-4, rtol=2e-4)


def tree_is_verified_alike(plain: Target, target: Target, lengths: tuple[int, ...]) -> bool:
    """The states of prompts' last tokens, and of a tree behind them: the plain layers', and what the kernels make."""
    source = torch.Generator().manual_seed(0)
    prompts = torch.randint(2, 320, (len(lengths), max(lengths)), generator=source).cuda()
    tree = torch.randint(2, 320, (len(lengths), 9), generator=source).cuda()
    seen = torch.rand(len(lengths), 9, 9, generator=source).cuda() < 0.5
    seen |= torch.eye(9, dtype=torch.bool, device="cuda")
    found = []
    for one in (plain, target):
        cache = one.new_cache(len(lengths), 512)
        found.append([one.prefill(prompts, list(lengths), cache), one.forward(tree, cache, seen.sum(2) - 1, seen)])
    pairs = [*zip(*found, strict=True)]
    return all(close(x.taps_BTC, y.taps_BTC) and close(x.final_BTH, y.final_BTH) for x, y in pairs)


def packed_rows_are_alike(folder: Path) -> bool:
    """States, and the keys and values of late layers, of packed rows in bf16: as they stand, recorded, replayed, by the
    kernels where the family has them, against fp32's, from which bf16 strays 4 % in models as small as these."""
    exact, rough = (load_target(TargetConfig(path=str(folder)), "cuda", d) for d in (torch.float32, torch.bfloat16))
    forward, plain, held = PackedForward(rough, 1, fills=True), PackedForward(exact, 1, fills=False), []
    source = torch.Generator().manual_seed(0)
    for lengths in ([70, 3, 200], [5], [9, 800, 1, 1], [130], [600, 420]):
        documents = Documents(lengths, torch.device("cuda"))
        ids = torch.randint(2, 320, (documents.total,), generator=source)
        (one, keys), (other, others) = plain.read(ids, documents), forward.read(ids, documents)
        pairs = [*zip(one_by_one(one, keys), one_by_one(other, others), strict=True)]
        held += [bool((x - y.float()).norm() <= 8e-2 * x.norm()) for x, y in pairs]
    return all(held)


def one_by_one(states: States, keys: Keys) -> list[torch.Tensor]:
    return [states.taps_BTC, states.final_BTH, *itertools.chain.from_iterable(keys.values())]


def drafter_steps_alike(target: Target) -> bool:
    """A prompt's slots, and two levels of a tree behind them: before the drafter's weights are packed, and after."""
    source, drafter = torch.Generator().manual_seed(0), tiny_drafter(target, noise=0.0).cuda()
    sizes, width = (70, 4, 4), drafter.config.hidden_size
    states, embeds = ([torch.randn(2, n, width, generator=source).cuda() for n in sizes] for _ in range(2))
    seen, found = torch.eye(4, dtype=torch.bool, device="cuda").expand(2, 4, 4), []
    for _ in range(2):
        cache = drafter.new_cache(2, 128)
        out = [drafter.step(states[0], embeds[0], cache)]
        cache.set_lengths([70, 33])
        out.append(drafter.step(states[1], embeds[1], cache, 0, seen))
        out.append(drafter.step(states[2], embeds[2], cache, 1, torch.cat((seen, seen), 2)))
        found.append(out)
        drafter.pack()
    return all(close(*pair) for pair in zip(*found, strict=True))


def captured_decoding_says_the_same(plain: Target, target: Target, decoder: str, temperature: float) -> bool:
    """As the plain layers do, uncaptured, three times: as it stands, recorded, replayed; with batches of another size
    in between, since what one engine recorded must outlive the next; and with prompts that wait for a place. Graft's
    freed places are empty at first. Nothing but order could make two runs teach a matrix differently."""
    drafter = tiny_drafter(target, noise=0.0).cuda()
    prompts = [[5, 9, 3], [7] * 40, [11, 12]]
    settings = Settings(decoder, NEW, depth=4, branch=4, nodes=20, gates=(0.3, 0.1, 0.5), temperature=temperature)
    engines, batches = Engines(), ((prompts, 3), (prompts[:1], 1), (prompts * 3, 3))

    def run(
        model: Target, batch: list[list[int]], slots: int, engines: Engines
    ) -> tuple[list[RowResult], torch.Tensor]:
        matrix = SuccessorMatrix(model.vocab_size, model.device)
        matrix.filling = Filling(rest=6)
        return decode(model, drafter, batch, settings, matrix, slots=slots, engines=engines).rows, matrix.rows

    meant = [run(plain, b, s, Engines(fixed=False))[0] for b, s in batches]
    found = [[run(target, b, s, engines) for b, s in batches] for _ in "123"]
    taught = [[matrix for _, matrix in each] for each in found[1:]]
    return all([rows for rows, _ in each] == meant for each in found) and all(map(torch.equal, *taught))


def waits_of_a_round(target: Target, decoder: str) -> int:
    """How often the host waits for the device in a replayed round, at most; the last one, in which the row ends, is
    left out."""
    drafter, engines, counts = tiny_drafter(target, noise=0.0).cuda(), Engines(), list[int]()
    settings = Settings(decoder, NEW, depth=6, branch=4, nodes=20, gates=(0.3, 0.1, 0.5))
    for _ in range(3):
        counts.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            decode(target, drafter, [[5, 9, 3]], settings, engines=engines, watch=lambda _: counts.append(len(caught)))
            torch.cuda.set_sync_debug_mode("default")
    return max(after - before for before, after in itertools.pairwise(counts[:-1]))


def draws_are_the_laws() -> bool:
    """Of 20,000 rows, all but the few whose noise falls between two tokens within rounding."""
    source = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(20000, 5000, generator=source)).cuda()
    noise = torch.rand(len(logits), dtype=torch.float64, generator=source).cuda()
    found = sample(logits, 0.7, 0, 1.0, noise)
    return bool((found != draw(law(logits.double(), 0.7), noise)).sum() <= 20)


def random_candidates(source: torch.Generator, rows: int, layers: int) -> Candidates:
    """Of a drafter that expands its four best nodes a layer; scores that are equal, and rows that a gate stopped."""
    scores = [-torch.rand(rows, 4, generator=source)]
    parents, best, first = [torch.zeros(rows, 4, dtype=torch.int64)], torch.arange(4).expand(rows, 4), 1
    for layer in range(layers - 1):
        above = scores[-1].gather(1, best - first + 1).unsqueeze(2)
        first += scores[-1].shape[1]
        parents.append((best + 1).unsqueeze(2).expand(rows, 4, 4).flatten(1))
        scores.append((above - torch.rand(rows, 4, 4, generator=source).round(decimals=1)).flatten(1))
        scores[-1][0, :] = scores[-1][0, :] if layer else float("-inf")
        best = first - 1 + scores[-1].sort(dim=1, descending=True, stable=True).indices[:, :4]
    flat, stage = torch.cat(scores, 1), torch.full((rows,), UNGATED)
    return Candidates(torch.randint(0, 40, flat.shape, generator=source), torch.cat(parents, 1), flat, stage, layers)


def trees_are_alike() -> bool:
    """What is chosen of drafted candidates, its outline, the path that is walked and what it teaches a matrix: plainly
    on a CPU, and by the kernels."""
    source, held = torch.Generator().manual_seed(0), []
    for rows, layers, nodes in ((1, 1, 8), (3, 2, 12), (64, 6, 60), (5, 4, 100)):
        found, roots = random_candidates(source, rows, layers), torch.randint(0, 40, (rows,), generator=source)
        budgets = torch.randint(0, nodes + 2, (rows,), generator=source)
        there = replace(found, **{f: getattr(found, f).cuda() for f in ("tokens", "parents", "scores", "stage")})
        one, other = rerank(found, roots, budgets, nodes), rerank(there, roots.cuda(), budgets.cuda(), nodes)
        held += [torch.equal(getattr(one, f)[one.valid], getattr(other, f).cpu()[one.valid]) for f in FIELDS[:-1]]
        held += [torch.equal(one.valid, other.valid.cpu())]
        outlines = one.outline(), other.outline()
        chosen = torch.randint(0, 40, one.tokens.shape, generator=source)
        merged = torch.randint(0, 9, (rows,), generator=source)
        walked = accept(one, chosen, outlines[0][1], found.stage, merged)
        follows = accept(other, chosen.cuda(), outlines[1][1], there.stage, merged.cuda())
        held += [
            torch.equal(x, y.cpu()) for x, y in zip((*outlines[0], *walked), (*outlines[1], *follows), strict=True)
        ]
        logits, alive = torch.randn(*chosen.shape, 40, generator=source), torch.rand(rows, generator=source) < 0.8
        matrices = [SuccessorMatrix(40, device) for device in ("cpu", "cuda")]
        remember(matrices[0], one, walked[0], logits, alive)
        remember(matrices[1], other, follows[0], logits.cuda(), alive.cuda())
        held += [torch.equal(matrices[0].rows, matrices[1].rows.cpu()), bool((matrices[1].owner == -1).all())]
    return all(held)


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


def sampled_drafts_are_judged_the_same_when_captured(target: Target, verifier: str, paths: int) -> bool:
    """As it stands, recorded, replayed, and replayed."""
    drafter = tiny_drafter(target, [i for i in range(320) if i % 5], noise=0.0).cuda()
    settings = Settings("chain", NEW, 1.0, depth=4, verifier=verifier, paths=paths, draft_temperature=0.9)
    engines = Engines()
    found = [decode(target, drafter, [[5, 9, 3], [7] * 40, [11, 12]], settings, engines=engines).rows for _ in range(3)]
    return found[0] == found[1] == found[2] and sum(row.rounds for row in found[0]) > 3


def losses_are_judged_alike(name: str) -> bool:
    """Values, arg-maxima, overlaps and gradients, in plain torch and by the kernel; bf16 logits round the gradient."""
    source, held = torch.Generator("cuda").manual_seed(0), []
    for dtype, most in ((torch.float32, 1e-4), (torch.bfloat16, 1e-2)):
        for n, c, vocab in ((40, 9, 32000), (7, 3, 320), (5, 5, 7)):
            logits, teacher = (
                (3 * torch.randn(rows, vocab, generator=source, device="cuda")).to(dtype) for rows in (n, c)
            )
            rows = torch.randint(0, c, (n,), generator=source, device="cuda")
            lse = teacher.float().logsumexp(-1) + 0.2
            best, mass = best_and_mass(logits)
            held.append(torch.allclose(mass, logits.float().logsumexp(-1), rtol=1e-5, atol=1e-5))
            held.append(torch.equal(logits.gather(1, best[:, None])[:, 0], logits.max(-1).values))
            given = (teacher, rows, lse, torch.rand(n, generator=source, device="cuda"), Loss(name, 0.8, 1.5))
            one, other = logits.clone(), logits.clone()
            found = plainly(one, *given), judge(other, *given)
            held += [torch.allclose(x.float(), y.float(), rtol=1e-4, atol=1e-4) for x, y in zip(*found, strict=True)]
            held.append(torch.allclose(one.float(), other.float(), rtol=most, atol=1e-6))
    return all(held)


def asking_slots_attend_alike(dtype: torch.dtype, squares: bool) -> bool:
    """Queries of some slots of packed documents, one of them with none, and three diagonals: the kernels for runs, or
    those for squares, and the scores written out, outputs and gradients. fp32 has neither: the reference itself."""
    torch.manual_seed(0)
    documents = Documents([130, 1, 300, 7, 64], torch.device("cuda"))
    slots = torch.cat([torch.arange(40, 120), torch.arange(140, 200), torch.arange(260, 431), torch.arange(440, 490)])
    (asking,) = Asking.nested([slots], documents, squares)
    shapes = [(8, len(slots), 64), *[(2, documents.total, 64)] * 2, *[(2, len(slots), 64)] * 6]
    exact = [torch.randn(shape, device="cuda").to(dtype).float().requires_grad_() for shape in shapes]
    rough = [t.detach().to(dtype).requires_grad_() for t in exact]
    found = []
    for leaves, attention in ((exact, reference_causal_plus_diagonals), (rough, causal_plus_diagonals)):
        q, k, v, *flat = leaves
        out = attention(q, k, v, list(zip(flat[::2], flat[1::2], strict=True)), documents, asking)
        weight = torch.linspace(-1, 1, out.numel(), device="cuda").view_as(out).to(out.dtype)
        found.append([out, *torch.autograd.grad((out * weight).sum(), leaves)])
    most = 1e-4 if dtype == torch.float32 else 2e-2
    return all(bool((x - y.float()).norm() <= most * x.norm()) for x, y in zip(*found, strict=True))


def trained_layer_parts_are_alike() -> bool:
    """Norms, the gated product and rotation, outputs and gradients, by the kernels in bf16 and plainly in fp32."""
    torch.manual_seed(0)
    gain = (torch.rand(576, device="cuda") + 0.5).requires_grad_()
    angles = torch.randn(1, 300, 32, device="cuda").repeat(1, 1, 2)

    def parts(x: torch.Tensor, up: torch.Tensor) -> list[torch.Tensor]:
        heads = x.unflatten(-1, (9, 64)).transpose(0, 1).unsqueeze(0)
        turned = lean.rotate(heads, angles.cos().to(x.dtype), angles.sin().to(x.dtype))
        apart = lean.windows(x, [slice(7, 250), torch.arange(299, 0, -2, device="cuda")])
        frozen = lean.rms_norm(x, gain.detach(), 1e-5)
        return [lean.rms_norm(x, gain, 1e-5), frozen, *apart, lean.gated(x, up), turned]

    rough = [torch.randn(300, 576, device="cuda").bfloat16().requires_grad_() for _ in range(2)]
    exact = [t.detach().float().requires_grad_() for t in rough]
    found = []
    for leaves in (exact, rough):
        outs = parts(*leaves)
        weights = [torch.linspace(-1, 1, out.numel(), device="cuda").view_as(out).to(out.dtype) for out in outs]
        total = torch.stack([(out.float() * w.float()).sum() for out, w in zip(outs, weights, strict=True)]).sum()
        found.append([*outs, *torch.autograd.grad(total, [*leaves, gain])])
    return all(bool((x - y.float()).norm() <= 2e-2 * x.norm()) for x, y in zip(*found, strict=True))


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("no GPU here")
    alone = {"draws": draws_are_the_laws(), "trees": trees_are_alike()}
    alone |= {f"rule {rule.name}": rule_judges_alike(rule) for rule in TABLE}
    alone["layers in training"] = trained_layer_parts_are_alike()
    alone |= {f"loss {name}": losses_are_judged_alike(name) for name in OBJECTIVES}
    layouts = ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True))
    alone |= {
        f"unroll attention in {d}, {'squares' if s else 'runs'}": asking_slots_attend_alike(d, s) for d, s in layouts
    }
    failed = sum(not held for held in alone.values())
    print(", ".join(f"{what}: {'equal' if held else 'DIFFERENT'}" for what, held in alone.items()))
    for family in ("llama", "qwen3", "mistral", "gemma3_text"):
        folder = tiny_model_folder(Path(tempfile.mkdtemp()), family, head_dim=16)
        target = load_target(TargetConfig(path=str(folder)), "cuda", torch.float32)
        plain = load_target(TargetConfig(path=str(folder)), "cuda", torch.float32)
        kernels, plain.kernels = "fused kernels" if target.kernels else "plain layers", None
        results = {f"tree behind {n}": tree_is_verified_alike(plain, target, n) for n in ((5, 70, 3), (300,))}
        decoders = (
            [d for d in DECODERS if d != "flex"] if family == "llama" else ("ar", "eagle", "graft")
        )  # the layers alone differ
        results["drafter"] = drafter_steps_alike(target)
        results["packed rows"] = packed_rows_are_alike(folder)
        results |= {
            f"{d} at T = {t}": captured_decoding_says_the_same(plain, target, d, t) for d in decoders for t in (0, 0.8)
        }
        results |= {
            f"{rule.name}, {k} sampled paths": sampled_drafts_are_judged_the_same_when_captured(target, rule.name, k)
            for rule in TABLE
            for k in (3 if rule.several else 1,)
            if family == "llama" and not rule.text_alone
        }
        if family == "llama":
            for d, most in (("ar", 1), ("chain", 1), ("eagle", 1), ("recycle", 1), ("prune", 4), ("graft", 4)):
                waits = waits_of_a_round(target, d)
                results[f"{d}, {waits} waits of the host a round, {most} allowed"] = waits <= most
        failed += sum(not held for held in results.values())
        for what, held in results.items():
            print(f"{family} ({kernels}), {what}: {'equal' if held else 'DIFFERENT'}", flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()

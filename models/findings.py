"""From facts to findings: what vLLM and SGLang would refuse, and what they would silently get wrong.

Every check is pure: (facts, draft) -> findings. What is checked follows the engines' loaders (vLLM 0.32 and 0.33,
SGLang 0.5.23), whose worst habit is shared: a tensor that is missing stays at its initial value, and nothing is said.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from models.config_findings import FLOATS, counts, flags, positions, rotary, unusual
from models.facts import Facts, Stored, rope_of
from models.fault import BOTH, SGLANG, VLLM, Finding, listed
from models.kinds import ARCHITECTURES, Draft, architectures
from models.shapes import dflash_shapes, eagle3_shapes
from models.taps import tap_findings, target_layers, whole_numbers

OPTIONAL = ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d", "mask_hidden")
SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "partial_rotary_factor")
LONGEST = 400  # characters of a finding
FOREIGN = 0.5  # mean cosine of rows of two tables; below it one did not come from the other


def diagnose(facts: Facts, draft: Draft) -> list[Finding]:
    """Fatal ones first. SGLang is left out where it has no reader for the layout at all (`unserved` says so)."""
    if facts.unreadable:
        return [_cut(Finding(True, BOTH, line, "export or copy it again", BOTH)) for line in facts.unreadable]
    if not draft.kind:
        return [_cut(Finding(True, BOTH, _no_drafter(facts, draft), stops=BOTH))]
    checks = (
        files,
        unserved,
        peagle,
        dflash,
        names,
        shapes,
        dtypes,
        vocabulary,
        counts,
        flags,
        unusual,
        tap_findings,
        positions,
        rotary,
        against_target,
    )
    found = [finding for check in checks for finding in check(facts, draft)]
    if draft.kind == "speculators":
        kept = [f for f in found if f.engines != SGLANG or f.stops == SGLANG]
        found = [replace(f, engines=VLLM) if f.engines == BOTH else f for f in kept]
    return sorted(map(_cut, found), key=lambda f: (not f.fatal, not f.loud))


def _cut(finding: Finding) -> Finding:
    """A value of a config may be as long as the file."""
    what, cure = (t if len(t) <= LONGEST else f"{t[:LONGEST]} ..." for t in (finding.what, finding.cure))
    return replace(finding, what=what, cure=cure)


def _no_drafter(facts: Facts, draft: Draft) -> str:
    if "config.json" not in facts.files:
        return "not a drafter: no config.json"
    layers = f" of {draft.layers} layers" if draft.number("num_hidden_layers") else ""
    said = listed(architectures(facts.config), 4) or "no architecture"
    return f"not a drafter: config.json says {said}{layers}, and there is no fc.weight"


def files(facts: Facts, draft: Draft) -> Iterator[Finding]:
    for name in draft.stray:
        what = f"{name} lies beside model.safetensors: vLLM loads every .safetensors file and stops at unknown names"
        yield Finding(True, VLLM, what, "keep it in another folder", VLLM)
    if draft.pickled:
        what = f"weights are pickled ({listed(draft.pickled, 4)}): tensors alone were read, no code of theirs was run"
        yield Finding(False, BOTH, what, "python -m models.export writes safetensors")
    if not facts.tensors:
        yield Finding(True, BOTH, "there are no weights (model.safetensors)", "export or copy it again", BOTH)
    code = [f for f in facts.files if f.endswith(".py")]
    if code or "auto_map" in facts.config:
        yield Finding(False, BOTH, "the folder brings code of its own, which was not run", "serve it without that code")
    if facts.not_finite:
        what = f"NaN or infinity in {listed(facts.not_finite, 4)}"
        yield Finding(True, BOTH, what, "go back to a checkpoint from before training broke")
    empty = [name for name in facts.all_zero if not name.endswith(".bias") and "mask_hidden" not in name]
    if empty:
        what = f"all zeros: {listed(empty, 4)}: nobody filled it, or training never reached it"
        yield Finding(True, BOTH, what, "copy it again, or train again")


def unserved(facts: Facts, draft: Draft) -> Iterator[Finding]:
    """Layouts that an engine has no reader for, and what it then does."""
    named = architectures(facts.config)
    if draft.kind == "flexdraft":
        yield Finding(True, BOTH, "no engine reads FlexDraft's layout", "decode it with the tool that made it", BOTH)
    elif draft.kind == "eagle":
        yield Finding(False, BOTH, "EAGLE and EAGLE-2 are served by the method eagle; nothing more is checked here")
    elif draft.kind == "speculators":
        what = "SGLang has no reader for the speculators layout"
        yield Finding(False, SGLANG, what, "python -m models.export layout=sglang", SGLANG)
        yield from _speculators(facts, draft)
    elif draft.eagle3 and not named:
        cure = 'write "architectures": ["LlamaForCausalLMEagle3"]'
        yield Finding(True, BOTH, "config.json names no architectures", cure, BOTH)
    elif draft.eagle3 and named[0] == "LlamaForCausalLM":
        what = "architectures says LlamaForCausalLM: vLLM rewrites it, SGLang builds a plain Llama and ignores the rest"
        yield Finding(True, SGLANG, what, 'write "architectures": ["LlamaForCausalLMEagle3"]')
    elif draft.eagle3 and named[0] not in ARCHITECTURES:
        yield Finding(
            True, BOTH, f"no engine knows the architecture {named[0]}", "LlamaForCausalLMEagle3 is known", BOTH
        )
    elif draft.eagle3 and not draft.peagle and named[0] != "LlamaForCausalLMEagle3":
        yield Finding(False, SGLANG, f"SGLang does not know the architecture {named[0]}; vLLM does", stops=SGLANG)


def _speculators(facts: Facts, draft: Draft) -> Iterator[Finding]:
    known = ("eagle3", "peagle", "dflash", "dflash2", "dspark")
    kind, inner = facts.config["speculators_model_type"], facts.config.get("speculators_config")
    if kind not in known:
        yield Finding(True, VLLM, f"speculators_model_type={kind!r} is none of {', '.join(known)}", stops=VLLM)
    block = facts.config.get("transformer_layer_config")
    if not isinstance(block, dict):
        yield Finding(True, VLLM, "transformer_layer_config is missing", "it holds the block's sizes", VLLM)
    elif kind in ("eagle3", "peagle") and block.get("model_type") not in ("llama", "qwen3"):
        what = f"the block's model_type is {block.get('model_type')!r}: vLLM builds llama and qwen3 blocks only"
        yield Finding(True, VLLM, what, "write the type of the block that was trained", VLLM)
    try:
        assert isinstance(inner, dict)
        complete = bool(inner["proposal_methods"][0]["speculative_tokens"] and inner["verifier"]["name_or_path"])
    except (AssertionError, KeyError, IndexError, TypeError):
        complete = False
    if not complete:
        what = "speculators_config lacks proposal_methods[0].speculative_tokens or verifier.name_or_path"
        yield Finding(True, VLLM, what, "vLLM demands both", VLLM)
    if kind in ("dflash", "dflash2") and "mask_token_id" not in facts.config:
        yield Finding(True, VLLM, f"mask_token_id is missing, which {kind} needs", "write the id of training", VLLM)
    if kind == "eagle3" and "norm_before_residual" not in facts.config:
        what = "norm_before_residual is not written: vLLM takes true, the speculators library false"
        yield Finding(True, VLLM, what, "write the form that it was trained with")


def peagle(facts: Facts, draft: Draft) -> Iterator[Finding]:
    if not draft.peagle:
        return
    yield Finding(False, SGLANG, "SGLang cannot serve P-EAGLE", stops=SGLANG)
    if draft.mask_token is None:
        yield Finding(True, VLLM, "no mask token is named, which P-EAGLE needs", "write pard_token of training", VLLM)
    if draft.tensors and "mask_hidden" not in draft.tensors:
        yield Finding(True, VLLM, "mask_hidden is missing, which P-EAGLE needs", "export it again", VLLM)


def dflash(facts: Facts, draft: Draft) -> Iterator[Finding]:
    """What the native layout of block drafters must say, and where."""
    if draft.kind != "dflash":
        return
    given = facts.config.get("dflash_config")
    inner = given if isinstance(given, dict) else {}
    if not draft.number("block_size"):
        inside = " (it stands inside dflash_config)" if "block_size" in inner else ""
        what = f"block_size is not at the top level{inside}: some readers then take 16"
        yield Finding(True, BOTH, what, "write it at the top level")
    if not isinstance(inner.get("mask_token_id"), int):
        yield Finding(True, BOTH, "dflash_config.mask_token_id is missing", "write the id of training", BOTH)
    ids, n = whole_numbers(inner.get("target_layer_ids")), target_layers(facts)
    if ids is None:
        yield Finding(True, BOTH, "dflash_config.target_layer_ids is missing", "write outputs of layers", BOTH)
    elif n is not None and not 0 <= min(ids) <= max(ids) < n:
        what = f"target_layer_ids [{listed(ids)}] lie outside the target's {n} layers"
        yield Finding(True, BOTH, what, "each is one lower than in h[L] numbering", BOTH)
    if "mask_hidden" in draft.tensors:
        yield Finding(True, VLLM, "mask_hidden is there, which vLLM refuses in a DFlash drafter", "leave it out", VLLM)


def names(facts: Facts, draft: Draft) -> Iterator[Finding]:
    if draft.prefixed:
        first, more = draft.prefixed[0], len(draft.prefixed) - 1
        what = f"{first} and {more} more start with `model.`: vLLM prepends it again and stops"
        yield Finding(True, VLLM, what, "save them without the prefix (SGLang takes both)", VLLM)
    if draft.twice:
        what = f"{', '.join(draft.twice[:4])} is stored under two names: which one counts is up to chance"
        yield Finding(True, BOTH, what, "leave one of them")
    wanted = _expected(draft)
    if not wanted or not draft.tensors:
        return
    missing = sorted(wanted.keys() - draft.tensors.keys())
    if missing:
        what = f"{', '.join(missing[:4])}{f' and {len(missing) - 4} more' if len(missing) > 4 else ''} missing"
        yield Finding(True, BOTH, f"{what}: engines load anyway and leave the initial values", "export it again")
    unknown = sorted(draft.tensors.keys() - wanted.keys() - set(OPTIONAL))
    if unknown and draft.eagle3:
        what = f"unknown tensors {listed(unknown, 4)}: vLLM stops, SGLang ignores them in silence"
        yield Finding(True, BOTH, what, _cure_unknown(unknown), VLLM)
    if draft.eagle3 and "lm_head.weight" not in draft.tensors:
        yield from _no_head(facts, draft)
    if draft.eagle3 and "embed_tokens.weight" not in draft.tensors and draft.target_hidden != draft.hidden:
        what = (
            f"embed_tokens.weight is missing, and the target's is {draft.target_hidden} wide where {draft.hidden} fit"
        )
        yield Finding(True, BOTH, what, "write the drafter's own embedding")


def _cure_unknown(unknown: list[str]) -> str:
    for name, flag in (("fc_norm", "fc_norm"), ("input_norm", "norm_before_fc"), ("_proj.bias", "attention_bias")):
        if any(name in tensor for tensor in unknown):
            return f"set {flag} to true at the top level of config.json if it was trained so"
    return "remove or rename them"


def _no_head(facts: Facts, draft: Draft) -> Iterator[Finding]:
    if draft.reduced:
        what = "lm_head.weight is missing with a reduced vocabulary: SGLang drafts at random, vLLM from wrong rows"
        yield Finding(True, BOTH, what, "write the head's rows of the kept tokens")
    elif facts.config.get("draft_vocab_size") is not None:
        what = "lm_head.weight is missing: vLLM takes the target's head, SGLang a random one"
        yield Finding(True, SGLANG, what, "write the head, or draft_vocab_size: null to borrow the target's")


def _expected(draft: Draft) -> dict[str, tuple[int, ...]]:
    """Names and shapes that must be there; empty where the layout is not known to that point."""
    if draft.eagle3:
        return eagle3_shapes(draft)
    return dflash_shapes(draft) if draft.kind == "dflash" else {}


def shapes(facts: Facts, draft: Draft) -> Iterator[Finding]:
    wanted = _expected(draft)
    if draft.eagle3:
        if "d2t" not in draft.tensors or facts.config.get("draft_vocab_size") is not None:  # else `vocabulary` says it
            wanted |= {"lm_head.weight": (draft.draft_vocab, draft.hidden)}
        wanted |= {"embed_tokens.weight": (draft.number("vocab_size"), draft.hidden)}
    bad = [n for n, shape in wanted.items() if n in draft.tensors and draft.tensors[n].shape != shape]
    for name in bad[:3]:
        found, right = list(draft.tensors[name].shape), list(wanted[name])
        halved = name.endswith("_proj.weight") and len(found) == 2 and found[1] * 2 == right[1]
        why = " (attention reads embedding and state side by side)" if halved else ""
        yield Finding(True, BOTH, f"{name} is {found}, config.json makes it {right}{why}", "export it again", BOTH)
    if len(bad) > 3:
        yield Finding(True, BOTH, f"{len(bad) - 3} more tensors have wrong shapes", stops=BOTH)


def dtypes(facts: Facts, draft: Draft) -> Iterator[Finding]:
    def integral(name: str, stored: Stored) -> bool:
        return name not in ("d2t", "t2d") and stored.dtype not in FLOATS

    wrong = sorted(n for n, stored in draft.tensors.items() if integral(n, stored))
    if wrong:
        kinds = ", ".join(f"{n} is {draft.tensors[n].dtype}" for n in wrong[:3])
        yield Finding(
            True,
            BOTH,
            f"weights that are no plain floats: {kinds}",
            "quantised drafters are not checked",
        )
    floats = {s.dtype for n, s in draft.tensors.items() if n not in ("d2t", "t2d")} & set(FLOATS)
    if len(floats) > 1:
        yield Finding(False, BOTH, f"weights of several dtypes: {', '.join(sorted(floats))}")
    offsets = draft.tensors.get("d2t")
    if offsets is not None and offsets.dtype != "I64":
        yield Finding(offsets.dtype in FLOATS, BOTH, f"d2t is {offsets.dtype}", "store it as int64")


def vocabulary(facts: Facts, draft: Draft) -> Iterator[Finding]:
    whole, kept = draft.number("vocab_size"), draft.draft_vocab
    if not draft.eagle3 or not draft.tensors:
        return
    held = "d2t" in draft.tensors
    if held and facts.config.get("draft_vocab_size") is None:
        what = "d2t is there but draft_vocab_size is not in config.json: engines take the full vocabulary"
        yield Finding(True, BOTH, what, "write draft_vocab_size", VLLM)
    elif held and not draft.reduced:
        what = "d2t is there although the vocabulary is full: vLLM has no parameter for it and stops"
        yield Finding(True, VLLM, what, "leave d2t and t2d out", VLLM)
    elif draft.reduced and not held:
        what = f"d2t is missing with {kept} of {whole} tokens: draft id i is read as target id i"
        yield Finding(True, BOTH, what, "write d2t (offsets) from the training run")
    if kept > whole:
        yield Finding(True, BOTH, f"draft_vocab_size={kept} is above vocab_size={whole}", "put it right", BOTH)
    if held and draft.reduced and draft.tensors["d2t"].shape != (kept,):
        what = f"d2t is {list(draft.tensors['d2t'].shape)}, draft_vocab_size is {kept}"
        yield Finding(True, BOTH, what, "export it again", BOTH)
    elif facts.d2t is not None and draft.reduced:
        yield from _offsets(facts.d2t, facts.t2d_ids, whole)


def _offsets(d2t: list[int], marked: list[int] | None, whole: int) -> Iterator[Finding]:
    ids = [i + offset for i, offset in enumerate(d2t)]
    ascending = all(a < b for a, b in pairwise(ids))
    if ascending and ids and ids[0] >= 0 and ids[-1] < whole and (marked is None or marked == ids):
        if not any(d2t):  # a buffer that nobody filled looks the same
            what = f"d2t is all zeros: draft id i is target id i, so only the first {len(ids)} tokens can be said"
            yield Finding(False, BOTH, what, "make sure that it was trained so")
        return
    absolute = all(a < b for a, b in pairwise(d2t)) and d2t and d2t[0] >= 0 and d2t[-1] < whole
    if absolute and (marked is None or marked == d2t or ids[-1] >= whole):
        what = "d2t holds absolute ids where offsets are read: every draft id points at the wrong token"
        yield Finding(True, BOTH, what, "store d2t[i] - i")
    elif not ids or min(ids) < 0 or max(ids) >= whole:
        yield Finding(True, BOTH, f"d2t points outside the target's {whole} tokens", "export it again")
    elif len(set(ids)) < len(ids):
        yield Finding(True, BOTH, "d2t sends several draft ids to one target id", "export it again")
    elif marked is not None and sorted(ids) != marked:
        yield Finding(True, BOTH, "t2d and d2t mark different tokens; engines follow d2t", "find out which was trained")
    else:
        yield Finding(False, BOTH, "d2t is not ascending: engines follow it, Espalier's own reader does not")


def against_target(facts: Facts, draft: Draft) -> Iterator[Finding]:
    target = facts.target
    if target is None:
        return
    stated = facts.provenance.get("fingerprint")
    if stated is None:
        yield Finding(False, BOTH, "no fingerprint of its target: nobody can tell whether it was trained for this one")
    elif stated != target.fingerprint:
        what = f"trained for another target: fingerprint {stated}, this one's is {target.fingerprint}"
        yield Finding(True, BOTH, what, "serve it with its own target, or train one for this")
    if draft.target_hidden != target.hidden_size:
        what = f"made for a target of hidden size {draft.target_hidden}, this one has {target.hidden_size}"
        yield Finding(True, BOTH, what, "serve it with its own target", BOTH)
    if draft.number("vocab_size") not in (0, target.vocab_size):
        what = f"made for a vocabulary of {draft.number('vocab_size')}, this target has {target.vocab_size}"
        yield Finding(True, BOTH, what, "serve it with its own target", BOTH)
    yield from _embedding(facts)
    own, theirs = rope_of(draft.config), rope_of(target.config.to_dict())
    scales = [(own[k], theirs[k]) for k in SCALING if None not in (own.get(k), theirs.get(k))]
    if any(own.get(k) != theirs.get(k) for k in ("rope_theta", "rope_type")) or any(a != b for a, b in scales):
        what = f"RoPE {_rope(own)} where the target has {_rope(theirs)}"
        ours = stated is not None  # Espalier trains with the target's own
        yield Finding(
            ours, BOTH, what, "write the RoPE that it was trained with: nearly always the target's", loud=not ours
        )


def _embedding(facts: Facts) -> Iterator[Finding]:
    """Of the target's width, so that engines may take either: vLLM the drafter's own, SGLang always the target's."""
    found = facts.embedding
    if found is None or not found.differ or "embed_tokens.weight" in facts.all_zero:
        return
    what = f"embed_tokens.weight is not the target's in {found.differ} of {found.rows} rows "
    what += f"(mean cosine {found.cosine:.2f})"
    if found.cosine < FOREIGN:
        yield Finding(True, BOTH, f"{what}: another model's", "take it from the target, or leave it out")
    else:
        what += ": SGLang drafts with the target's in its place, vLLM with this one"
        yield Finding(
            True, SGLANG, what, "leave it out, unless the drafter was trained with it: then serve it with vLLM"
        )


def _rope(rope: dict[str, object]) -> str:
    more = [f"{key} {rope[key]}" for key in SCALING if rope.get(key) is not None]
    return ", ".join([str(rope.get("rope_type")), f"theta {rope.get('rope_theta')}", *more])

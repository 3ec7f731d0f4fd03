"""Which of the target's states each engine would hand a drafter. h[L]: 0 is the embedding output, L after L layers."""

from collections.abc import Iterator
from typing import Any

from models.facts import Facts
from models.fault import BOTH, SGLANG, VLLM, Finding, listed
from models.kinds import MOST, Draft
from models.layout_tables import default_taps

KEY = "eagle_aux_hidden_state_layer_ids"


def target_layers(facts: Facts) -> int | None:
    stated = facts.target.n_layers if facts.target else facts.provenance.get("target_layers")
    return stated if type(stated) is int and stated > 0 else None


def whole_numbers(value: Any) -> list[int] | None:
    good = isinstance(value, list) and value and all(isinstance(i, int) and not isinstance(i, bool) for i in value)
    return value if good else None


def engine_taps(facts: Facts, draft: Draft) -> dict[str, list[int] | None]:
    """{engine: taps in h[L], the first MOST}; None = the default ones of a target whose depth is not known."""
    n = target_layers(facts)
    default = list(default_taps(n)) if n else None
    if draft.dflash:
        inner = draft.config.get("dflash_config")
        ids = whole_numbers(inner.get("target_layer_ids")) if isinstance(inner, dict) else None
        outputs = [i + 1 for i in ids] if ids else whole_numbers(draft.config.get("aux_hidden_state_layer_ids"))
        outputs = outputs[:MOST] if outputs else None
        return {"vLLM": outputs, "SGLang": outputs}
    top, inner_ids = whole_numbers(draft.config.get(KEY)), whole_numbers(draft.nested.get(KEY))
    return {
        "vLLM": sorted(set(top))[:MOST] if top else default,
        "SGLang": [i + 1 for i in inner_ids][:MOST] if inner_ids else default,
    }


def _is_default(taps: list[int], n: int | None) -> bool:
    """Of this target; of a target of unknown depth, whether they could be its default ones."""
    return len(taps) == 3 and taps == list(default_taps(n or taps[-1] + 3))


def tap_findings(facts: Facts, draft: Draft) -> Iterator[Finding]:
    if not draft.eagle3:
        return
    n, nested_key = target_layers(facts), f"eagle_config.{KEY}"
    for where, given in ((KEY, draft.config.get(KEY)), (nested_key, draft.nested.get(KEY))):
        if given is not None and whole_numbers(given) is None:
            yield Finding(
                True, BOTH, f"{where} is not a list of whole numbers", "write a list such as [2, 15, 27]", VLLM
            )
    top = whole_numbers(draft.config.get(KEY))
    inner = whole_numbers(draft.nested.get(KEY))
    outputs = [i + 1 for i in inner] if inner else None
    yield from _places(top, outputs, n)
    taps = top or outputs
    if taps is None:
        if n is not None and len(set(default_taps(n))) < 3:
            what = f"the default taps {list(default_taps(n))} of a target of {n} layers collide, and none are written"
            yield Finding(True, BOTH, what, "train with explicit distinct taps")
        return
    if sorted(set(taps)) != taps:
        cure = "order fc's columns by depth, and write the ids so"
        yield Finding(
            True, VLLM, f"taps [{listed(taps)}] are not ascending and distinct: vLLM sorts them in silence", cure
        )
    if n is not None and (max(taps) > n or min(taps) < 0):
        yield Finding(
            True,
            BOTH,
            f"taps [{listed(taps)}] lie outside h[0..{n}] of a target of {n} layers",
            "name layers it has",
            VLLM,
        )
    if min(taps) == 0:
        yield Finding(True, SGLANG, "h[0] is tapped, which SGLang cannot capture", "train with taps from 1 on")
    if len(taps) != draft.aux:
        what = f"{len(taps)} taps are named, but num_aux_hidden_states says {draft.aux}"
        yield Finding(True, BOTH, what, "make num_aux_hidden_states their number", VLLM)


def _places(top: list[int] | None, outputs: list[int] | None, n: int | None) -> Iterator[Finding]:
    """The two places where ids may stand, each read by one engine alone."""
    if top and outputs and top != outputs:
        what = f"taps disagree: vLLM would capture h[{listed(top)}], SGLang h[{listed(outputs)}]"
        yield Finding(True, BOTH, what, f"in eagle_config each id is one lower than in the top-level {KEY}")
    elif top and not outputs and not _is_default(top, n):
        what = (
            f"taps [{listed(top)}] stand only at the top level: SGLang looks in eagle_config and takes the default ones"
        )
        cure = f'add "eagle_config": {{"{KEY}": [{listed([t - 1 for t in top])}]}}'
        yield Finding(True, SGLANG, what, cure)
    elif outputs and not top:
        fatal = not _is_default(outputs, n)
        takes = (
            "takes the default ones" if fatal else "takes the default ones (the same), runner V1 each one layer lower"
        )
        what = f"layer ids stand only inside eagle_config: vLLM's runner V2 never looks there and {takes}"
        yield Finding(fatal, VLLM, what, f'add "{KEY}": [{listed(outputs)}] at the top level')

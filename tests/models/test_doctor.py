"""The doctor on folders whose state is known: good ones of every layout, and broken ones with the fault named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models import doctor, facts
from models.doctor import examine
from models.layouts import save_drafter
from models.source import resolve
from models.target import Target
from recipes.schema import TargetConfig
from tests.tiny import tiny_drafter, tiny_model_folder

KEPT = [i for i in range(320) if i % 3]
Tensors = dict[str, Tensor]
Edit = Callable[[Path], Any]
H, D, HEADS, KV, INNER = 32, 8, 4, 2, 64  # of tests.tiny


@pytest.fixture(scope="module")
def target(tiny_target: Callable[..., Any]) -> Target:
    found: Target = tiny_target("llama")
    return found


def some(*shape: int) -> Tensor:
    """Weights that somebody filled."""
    return torch.full(shape, 0.01)


def export(target: Target, folder: Path, kept: list[int] | None = KEPT, **options: Any) -> Path:
    save_drafter(tiny_drafter(target, kept), folder, {"fingerprint": target.fingerprint}, **options)
    return folder


def config(folder: Path, **changes: Any) -> None:
    """Lay `changes` over config.json; None takes a key out."""
    merged = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in merged.items() if v is not None}))


def weights(folder: Path, change: Callable[[Tensors], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def rename(folder: Path, old: str, new: str) -> None:
    tensors = {(n.replace(old, new) if old else new + n): t for n, t in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")


def to_speculators(folder: Path, **changes: Any) -> None:
    """What the speculators library would have saved: the block's config inside, `layers.0.` for `midlayer.`."""
    flat = json.loads((folder / "config.json").read_text())
    keys = ("draft_vocab_size", "target_hidden_size", "norm_before_residual", "fc_norm", "norm_output")
    top = {k: flat[k] for k in keys if k in flat}
    verifier = {"name_or_path": "org/model", "architectures": ["LlamaForCausalLM"]}
    methods = [{"proposal_type": "greedy", "speculative_tokens": 3}]
    top |= {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3DraftModel"],
        "transformer_layer_config": {k: v for k, v in flat.items() if k not in top},
        "speculators_config": {"algorithm": "eagle3", "proposal_methods": methods, "verifier": verifier},
    }
    merged = top | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in merged.items() if v is not None}))
    rename(folder, "midlayer.", "layers.0.")


def to_eagle31(folder: Path) -> None:
    config(folder, fc_norm=True, norm_output=True)
    weights(folder, lambda t: t.update({f"fc_norm.{i}.weight": torch.ones(H) for i in range(3)}))


def to_qwen3(folder: Path) -> None:
    config(folder, architectures=["Eagle3Qwen3ForCausalLM"], model_type="qwen3")
    weights(folder, lambda t: t.update({f"midlayer.self_attn.{n}_norm.weight": torch.ones(D) for n in "qk"}))


def to_norm_before_fc(folder: Path) -> None:
    config(folder, norm_before_fc=True)
    weights(folder, lambda t: t.update({"input_norm.weight": torch.ones(3 * H)}))


def to_dflash(folder: Path) -> None:
    config(folder, architectures=["DFlashDraftModel"], model_type="qwen3", block_size=8, draft_vocab_size=None)
    config(folder, dflash_config={"mask_token_id": 5, "target_layer_ids": [1, 3, 4]}, num_hidden_layers=2)
    tensors = {"fc.weight": some(H, 3 * H), "norm.weight": torch.ones(H), "hidden_norm.weight": torch.ones(H)}
    shapes = {"q": (HEADS * D, H), "k": (KV * D, H), "v": (KV * D, H), "o": (H, HEADS * D)}
    for i in range(2):
        layer = {f"self_attn.{n}_proj.weight": some(*shape) for n, shape in shapes.items()}
        layer |= {f"self_attn.{n}_norm.weight": torch.ones(D) for n in "qk"}
        layer |= {f"mlp.{n}_proj.weight": some(INNER, H) for n in ("gate", "up")}
        layer |= {"mlp.down_proj.weight": some(H, INNER), "input_layernorm.weight": torch.ones(H)}
        layer["post_attention_layernorm.weight"] = torch.ones(H)
        tensors |= {f"layers.{i}.{name}": tensor for name, tensor in layer.items()}
    save_file(tensors, folder / "model.safetensors")


def dflash(folder: Path, **changes: Any) -> None:
    to_dflash(folder)
    config(folder, **changes)


def foreign(folder: Path) -> None:
    (folder / "provenance.json").unlink()
    rename(folder, "midlayer.", "layers.0.")


def nothing(folder: Path) -> None:
    pass


GOOD: dict[str, tuple[dict[str, Any], Edit, str]] = {
    # name: (how it is exported, what is made of it, its kind)
    "reduced": ({}, nothing, "EAGLE-3"),
    "full": ({"kept": None}, nothing, "EAGLE-3"),
    "custom taps": ({"taps": [1, 3, 6]}, nothing, "EAGLE-3"),
    "four taps, full": ({"taps": [1, 2, 4, 7], "kept": None}, nothing, "EAGLE-3"),
    "bfloat16": ({"dtype": torch.bfloat16}, nothing, "EAGLE-3"),
    "of another tool": ({}, foreign, "EAGLE-3"),
    "EAGLE 3.1": ({}, to_eagle31, "EAGLE-3"),
    "norm before fc": ({"kept": None}, to_norm_before_fc, "EAGLE-3"),
    "Qwen3 block": ({}, to_qwen3, "EAGLE-3"),
    "speculators": ({}, lambda f: to_speculators(f, norm_before_residual=True), "eagle3, speculators layout"),
    "DFlash": ({"kept": None}, to_dflash, "DFlash"),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_good_folder_is_fit_to_serve(tiny_target: Callable[..., Any], tmp_path: Path, name: str) -> None:
    options, change, kind = GOOD[name]
    options = dict(options)
    taps = options.pop("taps", None)
    target: Target = tiny_target("llama", taps=taps)
    folder = export(target, tmp_path / "d", **options)
    change(folder)
    report = examine(folder)
    assert not report.fatal and report.kind.startswith(kind), report.findings
    assert [r.verdict for r in report.readings if r.engine == "vLLM"] == ["serves"]
    captured = [1, 3, 6] if name == "custom taps" else [1, 2, 4, 7] if taps else [2, 4, 5]
    assert report.readings[0].taps in (captured, None)  # None: the default ones of a target that nobody names
    against = resolve(TargetConfig(path=str(target.folder)))
    known = doctor.replace(facts.read_facts(folder), target=against)
    assert not any(f.fatal for f in doctor.diagnose(known, doctor.look(known)))


def absolute_ids(tensors: Tensors) -> None:
    tensors["d2t"] += torch.arange(len(tensors["d2t"]))


def broken_number(tensors: Tensors) -> None:
    tensors["midlayer.mlp.up_proj.weight"][1, 2] = float("nan")


def without(*names: str) -> Edit:
    return lambda folder: weights(folder, lambda t: [t.pop(name) for name in names])


def truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def two_layers(folder: Path) -> None:
    config(folder, num_hidden_layers=2)

    def more(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.startswith("midlayer.")]:
            half = tensors[name][:, H:] if name.split(".")[2] in ("q_proj", "k_proj", "v_proj") else tensors[name]
            tensors[name.replace("midlayer", "layers.1")] = half.clone()

    weights(folder, more)


def narrow_query(tensors: Tensors) -> None:
    tensors["midlayer.self_attn.q_proj.weight"] = some(32, 32)


def to_gemma(folder: Path) -> None:
    config(folder, model_type="gemma")
    to_speculators(folder)


def another_target(folder: Path) -> None:
    (folder / "provenance.json").write_text('{"fingerprint": "of another"}')


def specforge(folder: Path) -> None:
    (folder / "training_state.pt").write_bytes(b"never opened")
    config(folder, norm_output=True)


IDS = "eagle_aux_hidden_state_layer_ids"
NESTED: dict[str, Any] = {"eagle_config": {IDS: [0, 2, 5]}}
BOTH_SAME: dict[str, Any] = {IDS: [1, 3, 6], "eagle_config": {IDS: [1, 3, 6]}}


def both(taps: list[int]) -> dict[str, Any]:
    return {IDS: taps, "eagle_config": {IDS: [t - 1 for t in taps]}}


IDENTITY = {"d2t": torch.zeros(320, dtype=torch.int64), "t2d": torch.ones(320, dtype=torch.bool)}
FULL: dict[str, Any] = {"kept": None}
IDS_OUT = "target_layer_ids"
PAST_END = {"mask_token_id": 5, IDS_OUT: [1, 3, 8]}
LONG_FC = {"fc.weight": some(H, 4 * H)}
NORMS = {f"fc_norm.{i}.weight": torch.ones(H) for i in range(3)}
BROKEN: dict[str, tuple[dict[str, Any], Edit, str, str]] = {
    # name: (how it is exported, what breaks it, engines that it hits, words that name the fault)
    "no head": ({}, without("lm_head.weight"), "vLLM SGLang", "lm_head.weight is missing with a reduced vocabulary"),
    "no head, full": ({"kept": None}, without("lm_head.weight"), "SGLang", "lm_head.weight is missing"),
    "doubled prefix": ({}, lambda f: rename(f, "", "model."), "vLLM", "`model.`"),
    "d2t at full": ({"kept": None}, lambda f: weights(f, lambda t: t.update(IDENTITY)), "vLLM", "although the"),
    "no d2t": ({}, without("d2t", "t2d"), "vLLM SGLang", "d2t is missing"),
    "absolute ids": ({}, lambda f: weights(f, absolute_ids), "vLLM SGLang", "absolute ids"),
    "d2t outside": ({}, lambda f: weights(f, lambda t: t["d2t"].add_(200)), "vLLM SGLang", "outside the target's 320"),
    "d2t of floats": ({}, lambda f: weights(f, lambda t: t.update(d2t=t["d2t"].float())), "vLLM SGLang", "d2t is F32"),
    "draft size gone": ({}, lambda f: config(f, draft_vocab_size=None), "vLLM SGLang", "draft_vocab_size is not in"),
    "nested ids": ({}, lambda f: config(f, **NESTED), "vLLM", "only inside eagle_config"),
    "top ids": ({"taps": [1, 3, 6]}, lambda f: config(f, eagle_config=None), "SGLang", "only at the top level"),
    "ids disagree": ({"taps": [1, 3, 6]}, lambda f: config(f, **BOTH_SAME), "vLLM SGLang", "taps disagree"),
    "ids reversed": ({}, lambda f: config(f, **both([5, 4, 2])), "vLLM", "not ascending"),
    "ids past the end": ({}, lambda f: config(f, **both([2, 4, 9])), "vLLM SGLang", "outside h[0..8]"),
    "fc too wide": ({}, lambda f: weights(f, lambda t: t.update(LONG_FC)), "vLLM SGLang", "fc.weight is [32, 128]"),
    "fc gone": ({}, without("fc.weight"), "vLLM SGLang", "fc.weight missing"),
    "norms gone": ({}, lambda f: config(f, fc_norm=True), "vLLM SGLang", "fc_norm.0.weight"),
    "norms unsaid": ({}, lambda f: weights(f, lambda t: t.update(NORMS)), "vLLM SGLang", "unknown tensors fc_norm.0"),
    "tied": ({}, lambda f: config(f, tie_word_embeddings=True), "SGLang", "tie_word_embeddings"),
    "residual": ({}, lambda f: config(f, norm_before_residual=True), "SGLang", "norm_before_residual"),
    "two layers": ({}, two_layers, "SGLang", "2 layers"),
    "not a number": ({}, lambda f: weights(f, broken_number), "vLLM SGLang", "NaN"),
    "narrow query": ({}, lambda f: weights(f, narrow_query), "vLLM SGLang", "side by side"),
    "gelu": ({}, lambda f: config(f, hidden_act="gelu"), "vLLM SGLang", "hidden_act is 'gelu'"),
    "a block of no kind": ({}, to_gemma, "vLLM", "model_type is 'gemma'"),
    "short": ({}, lambda f: config(f, max_position_embeddings=128), "SGLang", "max_position_embeddings=128"),
    "RoPE": ({}, lambda f: config(f, rope_theta=5e5, rope_parameters={"rope_theta": 5e5}), "vLLM SGLang", "RoPE"),
    "two RoPEs": ({}, lambda f: config(f, rope_theta=5e5), "vLLM SGLang", "disagree"),
    "another target": ({}, another_target, "vLLM SGLang", "another target"),
    "no architecture": ({}, lambda f: config(f, architectures=None), "vLLM SGLang", "architectures"),
    "SafeAILab's name": ({}, lambda f: config(f, architectures=["LlamaForCausalLM"]), "SGLang", "plain Llama"),
    "residual unsaid": ({}, lambda f: to_speculators(f, norm_before_residual=None), "vLLM", "norm_before_residual"),
    "no verifier": ({}, lambda f: to_speculators(f, speculators_config={}), "vLLM", "verifier.name_or_path"),
    "stray weights": ({}, lambda f: save_file(NORMS, f / "matrix.safetensors"), "vLLM", "matrix.safetensors lies"),
    "SpecForge's norm_output": ({}, specforge, "vLLM SGLang", "norm_output"),
    "flags nested": ({}, lambda f: config(f, eagle_config={"norm_output": True}), "vLLM SGLang", "inside eagle_config"),
    "block size inside": (FULL, lambda f: dflash(f, block_size=None), "vLLM SGLang", "block_size is not at the top"),
    "no mask token": (FULL, lambda f: dflash(f, dflash_config={IDS_OUT: [1, 3, 4]}), "vLLM SGLang", "mask_token_id"),
    "outputs past the end": (FULL, lambda f: dflash(f, dflash_config=PAST_END), "vLLM SGLang", "outside the target"),
    "truncated": ({}, truncated, "vLLM SGLang", "truncated or damaged"),
    "config no JSON": ({}, lambda f: (f / "config.json").write_text("{"), "vLLM SGLang", "config.json is not JSON"),
    "config a list": ({}, lambda f: (f / "config.json").write_text("[1]"), "vLLM SGLang", "no JSON object"),
    "weights gone": ({}, lambda f: (f / "model.safetensors").unlink(), "vLLM SGLang", "there are no weights"),
    "FlexDraft": ({}, lambda f: config(f, flexdraft_config={}), "vLLM SGLang", "no engine reads FlexDraft"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_has_its_one_fault_named(tiny_target: Callable[..., Any], tmp_path: Path, name: str) -> None:
    options, change, engines, words = BROKEN[name]
    options = dict(options)
    target: Target = tiny_target("llama", taps=options.pop("taps", None))
    folder = export(target, tmp_path / "d", **options)
    change(folder)
    report = examine(folder, TargetConfig(path=str(target.folder)))
    fatal = [f for f in report.findings if f.fatal]
    assert report.fatal and report.tau is None
    assert len(fatal) == 1, "\n".join(f.what for f in fatal)
    assert words in fatal[0].what and " ".join(fatal[0].engines) == engines, fatal[0]
    for reading in report.readings:
        unread = reading.engine == "SGLang" and "speculators" in report.kind
        assert (reading.verdict == "serves") == (reading.engine not in engines and not unread), reading


def run(*argv: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = doctor.main(list(argv))
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return code, out, err


def test_the_screen_says_what_it_is_and_how_to_serve_it(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = export(target, tmp_path / "d")
    code, out, _ = run(str(folder), f"target={target.folder}", capsys=capsys)
    assert code == 0 and out.startswith("fit to serve") and "2, 4, 5" in out and f"{len(KEPT)} of 320" in out
    vllm = next(line for line in out.splitlines() if line.startswith("vllm serve"))
    assert str(target.folder) in vllm and json.dumps(str(folder)) in vllm and '"eagle3"' in vllm
    assert "--speculative-algorithm EAGLE3" in out and "simulated tau" in out
    config(folder, tie_word_embeddings=True)
    code, out, _ = run(str(folder), capsys=capsys)
    assert code == 1 and out.startswith("fatal") and "vllm serve" in out and "sglang" not in out.split("vllm serve")[1]
    assert run(str(folder), "engine=vllm", capsys=capsys)[0] == 0  # the fault is SGLang's alone
    assert run(str(folder), "engine=sglang", capsys=capsys)[0] == 1


def test_json_for_machines(target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = export(target, tmp_path / "d")
    without("d2t", "t2d")(folder)
    code, out, _ = run(str(folder), "--json", capsys=capsys)
    told = json.loads(out)
    assert code == 1 and told["fatal"] and told["findings"][0]["what"].startswith("d2t is missing")
    assert told["readings"][0]["engine"] == "vLLM" and told["readings"][0]["verdict"] == "drafts wrongly"


def test_a_speculators_folder_is_nothing_for_sglang(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to_speculators(export(target, tmp_path / "d"))
    code, out, _ = run(str(tmp_path / "d"), capsys=capsys)
    assert code == 0 and "vllm serve org/model " in out  # the verifier that it names
    assert run(str(tmp_path / "d"), "engine=sglang", capsys=capsys)[0] == 1


def test_a_model_that_is_no_drafter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_model_folder(tmp_path / "m")
    code, out, _ = run(str(tmp_path / "m"), capsys=capsys)
    assert code == 1 and "not a drafter" in out and "8 layers" in out and len(out.splitlines()) == 1


def large_file(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["OtherForCausalLM"], "num_hidden_layers": 40}')
    header = json.dumps({"w": {"dtype": "F32", "shape": [5 << 29], "data_offsets": [0, 10 << 30]}}).encode()
    with (folder / "model.safetensors").open("wb") as file:  # 10 GB with a hole for a body
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + (10 << 30))


def loop(folder: Path) -> None:
    folder.symlink_to(folder)


def loop_inside(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").symlink_to(folder / "config.json")


def pickles(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["BertModel"]}')
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n(S'touch /pwned'\ntR.")


def deep(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text("[" * 100_000)


def weights_are_a_folder(folder: Path) -> None:
    (folder / "model.safetensors").mkdir(parents=True)
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLMEagle3"]}')


BAD_INPUT = [large_file, loop, loop_inside, pickles, deep, weights_are_a_folder, Path.mkdir]


@pytest.mark.parametrize("make", BAD_INPUT, ids=lambda make: make.__name__)
def test_bad_input_gets_a_one_line_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Callable[[Path], Any]
) -> None:
    make(tmp_path / "d")
    code, out, err = run(str(tmp_path / "d"), capsys=capsys)
    assert code == 1 and len(out.splitlines()) == 1 and out.startswith("fatal") and not err


ODD: dict[str, Any] = {
    "architectures": "x",
    "hidden_size": "wide",
    "num_hidden_layers": 10**12,
    "eagle_config": 3,
    "rope_parameters": [1],
    "draft_vocab_size": {},
    "max_position_embeddings": -1,
}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"architectures": ["LlamaForCausalLMEagle3", "\x1b[2J\ud800[bold]"]},
        {"architectures": ["\x1b[2JEagle3\ud800[/bold]"]},
        {"speculators_model_type": ["eagle3"], "transformer_layer_config": 4, "speculators_config": {}},
        {"speculators_model_type": "eagle3", "transformer_layer_config": {"hidden_size": []}},
        {"dflash_config": {"target_layer_ids": ["a"], "mask_token_id": {}}, "block_size": "8"},
        {"dflash_config": []},
    ],
)
def test_values_of_the_wrong_kind_are_faults_and_no_crash(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(ODD | more))
    (tmp_path / "provenance.json").write_text('{"target": 3, "target_layers": "x", "fingerprint": []}')
    save_file({"fc.weight": torch.zeros(3), "d2t": torch.zeros(2, 2).long()}, tmp_path / "model.safetensors")
    for words in ([], ["--json"], [f"target={target.folder}"]):
        code, out, _ = run(str(tmp_path), *words, capsys=capsys)
        assert code == 1 and "\x1b[2J" not in out


def test_a_weight_that_cannot_be_read_is_a_verdict(target: Target, tmp_path: Path, monkeypatch: Any) -> None:
    def torn(*_: Any) -> Any:
        raise OSError("input/output error")

    folder = export(target, tmp_path / "d")
    monkeypatch.setattr(facts.torch, "isfinite", torn)
    report = examine(folder)
    assert report.fatal and "the weights cannot be read: input/output error" in report.findings[0].what


def test_code_in_the_folder_is_not_run(target: Target, tmp_path: Path) -> None:
    folder = export(target, tmp_path / "d")
    (folder / "modeling.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    config(folder, auto_map={"AutoModel": "modeling.Model"})
    report = examine(folder)
    assert not (tmp_path / "ran").exists() and any("was not run" in f.what for f in report.findings)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "one folder is wanted"),
        (["a", "b"], "one folder is wanted, 2"),
        (["nowhere"], "there is no folder"),
        ([".", "taget=x"], "unknown argument 'taget'"),
        ([".", "--verbose"], "unknown argument"),
        ([".", "engine=tgi"], "neither vllm nor sglang"),
        ([".", "target=/nowhere"], "neither a folder"),
    ],
)
def test_wrong_use_exits_2(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(*argv, capsys=capsys)
    assert code == 2 and not out and err.startswith("error:") and words in err


def test_without_a_target_what_cannot_be_known_is_not_claimed(target: Target, tmp_path: Path) -> None:
    folder = export(target, tmp_path / "d")
    (folder / "provenance.json").unlink()
    report = examine(folder)
    assert report.readings[0].taps is None and report.tau is None and not report.no_tau


def test_another_scale_of_the_same_rope_is_a_fault(tiny_target: Callable[..., Any], tmp_path: Path) -> None:
    low, scaled = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}, {"rope_type": "llama3", "rope_theta": 10000.0}
    scaled |= {"factor": 8.0, "original_max_position_embeddings": 256, **low}
    target: Target = tiny_target("llama", rope_parameters=scaled)
    folder = export(target, tmp_path / "d")
    against = TargetConfig(path=str(target.folder))
    assert not examine(folder, against).fatal
    config(folder, rope_parameters=scaled | {"factor": 32.0})
    assert [f.what for f in examine(folder, against).findings if f.fatal and "factor 32.0" in f.what]


def test_an_embedding_that_is_missing_and_cannot_be_the_targets_is_a_fault(target: Target, tmp_path: Path) -> None:
    folder = export(target, tmp_path / "d")
    config(folder, target_hidden_size=48)
    weights(folder, lambda t: t.update({"fc.weight": some(H, 3 * 48)}))
    fatal = [f.what for f in examine(folder).findings if f.fatal]
    assert len(fatal) == 1 and "embed_tokens.weight is missing" in fatal[0]
    weights(folder, lambda t: t.update({"embed_tokens.weight": some(320, H)}))
    assert not examine(folder).fatal


def test_offsets_of_zeros_alone_are_noted(target: Target, tmp_path: Path) -> None:
    report = examine(export(target, tmp_path / "d", kept=list(range(200))))
    assert not report.fatal and any("d2t is all zeros" in f.what for f in report.findings)

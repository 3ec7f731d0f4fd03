"""Chat: answers are the target's own, streamed whole, coloured by origin; bad turns are refused one by one."""

import io
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from data_prep.template import prompt_ids
from eval import chat, tunings
from eval.chat import Chat
from eval.decode import Decoded, RowResult, decode
from eval.matrix import SuccessorMatrix
from eval.matrix_file import save_matrix
from eval.plan import asked
from eval.results import environment
from eval.settings import Settings
from models.target import Target
from recipes.cli import entry
from recipes.schema import EvalConfig, Recipe, UserError
from tests.eval.world import World
from tests.tiny import tiny_drafter

GRAFT = Settings("graft", 20, depth=3, branch=3, nodes=8, gates=(0.3, 0.1, 0.5))
Pieces = list[tuple[str, str]]


@pytest.fixture(scope="module")
def target(tiny_target: Callable[..., Any]) -> Target:
    found: Target = tiny_target("llama", initializer_range=0.1)
    return found


@pytest.fixture
def talker(target: Target) -> Chat:
    recipe = Recipe(recipe="tiny", eval=EvalConfig(max_new_tokens=20, max_prompt=200))
    return Chat(recipe, target, tiny_drafter(target, noise=0.0), GRAFT)


def said(chat: Chat, question: str) -> tuple[Decoded, Pieces]:
    pieces: Pieces = []
    return chat.answer(question, lambda piece, origin: pieces.append((piece, origin))), pieces


def test_the_streamed_pieces_make_up_the_targets_own_answer(talker: Chat, target: Target) -> None:
    decoded, pieces = said(talker, "the quick fox")
    row = decoded.rows[0]
    ids = prompt_ids(target.tokenizer, [{"role": "user", "content": "the quick fox"}], {})
    assert row.tokens == decode(target, None, [ids], Settings("ar", 20)).rows[0].tokens
    assert "".join(piece for piece, _ in pieces) == target.tokenizer.decode(row.tokens, skip_special_tokens=True)
    assert {origin for _, origin in pieces} <= set(row.origins)


def test_the_conversation_is_kept_and_forgotten(talker: Chat, target: Target) -> None:
    _, first = said(talker, "a b c")
    said(talker, "d e f")
    assert [m["role"] for m in talker.messages] == ["user", "assistant"] * 2
    assert talker.messages[1]["content"] == "".join(piece for piece, _ in first)
    alone = prompt_ids(target.tokenizer, talker.messages[2:3], {})
    second = prompt_ids(target.tokenizer, talker.messages[:3], {})
    assert len(second) > len(alone)
    talker.reset()
    assert talker.messages == []
    assert said(talker, "a b c")[1] == first  # the matrix is forgotten as well, so even the origins come back


def test_it_starts_from_a_matrix_on_disk(talker: Chat, target: Target, tmp_path: Path) -> None:
    known = SuccessorMatrix(target.vocab_size)
    known.update(torch.tensor([5, 9]), torch.arange(16).view(2, 8))
    save_matrix(known, tmp_path / "m.safetensors", target.fingerprint)
    e = replace(talker.recipe.eval, matrix=str(tmp_path / "m.safetensors"))
    begun = Chat(replace(talker.recipe, eval=e), target, talker.drafter, GRAFT)
    assert begun._matrix is not None and torch.equal(begun._matrix.rows, known.rows)
    assert talker._matrix is not None and talker._matrix.filled == 0


def test_a_question_too_long_is_refused_and_the_conversation_stays(talker: Chat) -> None:
    said(talker, "a b c")
    before = list(talker.messages)
    with pytest.raises(UserError, match="limit is 200"):
        said(talker, "fox " * 300)
    assert talker.messages == before
    said(talker, "d")
    assert len(talker.messages) == 4


def test_bytes_that_are_no_text_are_refused(talker: Chat) -> None:
    with pytest.raises(UserError, match="UTF-8"):
        said(talker, b"hi \xff there".decode("utf-8", "surrogateescape"))
    assert not talker.messages


def test_a_character_of_several_tokens_waits_for_the_last_one(target: Target) -> None:
    ids = target.tokenizer("héé", add_special_tokens=False)["input_ids"]
    assert len(ids) > 3
    pieces: Pieces = []
    words = chat._Words(target.tokenizer, lambda piece, origin: pieces.append((piece, origin)))
    for k in range(1, len(ids) + 1):
        words.watch([RowResult(tokens=ids[:k], origins=["drafter"] * k)])
    assert [piece for piece, _ in pieces] == ["h", "é", "é"]
    assert words.finish(RowResult(tokens=ids, origins=["drafter"] * len(ids))) == "héé"
    assert len(pieces) == 3


def test_the_figures_count_what_a_reader_can_count() -> None:
    row = RowResult(
        tokens=[1, 2, 3, 4, 5], rounds=2, emitted=4, origins=["bonus", "drafter", "retrieval"] + ["bonus"] * 2
    )
    line = chat.figures(Decoded([row], {}, 0.5, 2))
    assert line == "5 tokens (1 drafter, 1 retrieval, 3 bonus), tau 2.00, 8.0 tokens/s"
    assert "prefill" in chat.figures(Decoded([RowResult(tokens=[1], origins=["bonus"])], {}, 0.0, 0))


def test_a_terminal_sees_colours_and_a_legend(talker: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    class Typed(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Typed("a b c\n"))
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, color_system="standard")
    chat.talk(talker, console)
    origins = {origin for _, origin in said(Chat(talker.recipe, talker.target, talker.drafter, GRAFT), "a b c")[1]}
    assert ("\x1b[32m" in screen.getvalue()) == ("drafter" in origins)
    assert ("\x1b[35m" in screen.getvalue()) == ("retrieval" in origins)
    assert origins > {"bonus"}
    assert [str(span.style) for span in chat.legend().spans] == ["green", "magenta"]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("chat"))


def piped(world: World, monkeypatch: pytest.MonkeyPatch, text: str, *extra: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    entry(chat.main, world.beside(*extra))


def test_piped_text_is_plain_and_the_end_of_input_ends_it(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    piped(world, monkeypatch, "a b c\n\n" + "fox " * 900 + "\n/what\nd e f\n/reset\na b c\n/quit\nnever asked\n")
    shown = capsys.readouterr()
    assert "\x1b" not in shown.out
    assert "through graft (4 nodes, depth 2, top-2" in shown.out
    assert shown.out.count("tokens/s]") == 3
    assert "/what is no command here" in shown.out
    assert shown.err.count("error: the conversation is") == 1


def test_without_a_drafter_it_decodes_plainly_or_says_what_is_missing(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    piped(world, monkeypatch, "a b c\n", "drafter=", f"run_dir={world.folder / 'no run'}")
    shown = capsys.readouterr().out
    assert "plain decoding (ar)" in shown and "tau 1.00" in shown
    with pytest.raises(SystemExit) as stop:
        piped(world, monkeypatch, "a\n", "drafter=", "decoder=graft", f"run_dir={world.folder / 'no run'}")
    assert stop.value.code == 2
    assert "no such folder. Train one" in capsys.readouterr().err


def test_mistakes_are_one_screen_before_weights_load(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(chat, "load", None)
    for extra, words in (
        ("eval.temperature=-1", "must be 0 or more"),
        ("eval.max_new_tokens=0", "eval.max_new_tokens=0"),
        ("drafter=nowhere", "no such folder"),
        ("eval.matrix=nowhere.safetensors", "no such file"),
        ("decoder=eagel", "decoder='eagel'"),
    ):
        with pytest.raises(SystemExit):
            piped(world, monkeypatch, "a\n", extra)
        assert words in capsys.readouterr().err


def test_the_tuners_shape_is_used(world: World, target: Target, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = Recipe(recipe="tiny", decoder="graft")
    folder = world.folder / "drafter"
    shape = {"depth": 2, "branch": 3, "nodes": 5, "gates": [0.5, 0.5, 0.5], "parallel": False}
    row = shape | {"tokens_per_s": 1.0, "decoder": "graft", "shape": "a tree"}
    about = {
        "measured_on": environment(target),
        "target": target.fingerprint,
        "batch_size": 1,
        "temperature": 0.0,
        "asked": asked(replace(recipe, decoder="")),
        "best": {"graft": row},
        "chosen": row | {"decoder": "ar"},
        "speculate": False,
        "seconds": 1.0,
        "table": [],
        "cost_curve": {"verify_ms_by_rows": {}, "draft_ms_by_depth": {}},
    }
    tunings.write(folder, about)
    try:
        settings = chat.tuned_settings(recipe, folder, target)
        untuned = replace(recipe, eval=replace(recipe.eval, tune=False))
        own = chat.tuned_settings(untuned, folder, target)
    finally:
        (folder / tunings.FILE).unlink()
    assert (settings.depth, settings.nodes, settings.gates) == (2, 5, (0.5, 0.5, 0.5))
    assert own.nodes == 60
    assert "nothing surely faster than plain decoding" in capsys.readouterr().out


def test_a_decoder_without_a_drafter_talks_too(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    piped(world, monkeypatch, "a b c\n", "drafter=nowhere", "decoder=recycle")
    assert "through recycle" in capsys.readouterr().out

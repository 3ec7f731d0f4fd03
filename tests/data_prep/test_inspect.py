"""The inspector shows who speaks, which tokens are supervised, and what each unroll step predicts."""

import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep.inspect import coloured, headers, kinds, main, runs, turns, unrolled
from data_prep.run import prepare
from data_prep.supervision import supervised
from models.target import Target, load_target
from recipes.schema import Recipe, ServerConfig, SourceConfig, TargetConfig, UserError
from tests.data_prep.styles import STYLES, Style
from tests.data_prep.test_encode import styled

Maker = Callable[..., Recipe]


@pytest.fixture(scope="module")
def target(target_folder: Path) -> Target:
    return load_target(TargetConfig(path=str(target_folder)), "cpu", torch.float32)


def test_kinds_of_tokens(tokenizer: Any) -> None:
    assert kinds(torch.tensor([0, 0, 1, 1, 1, 0, 2])).tolist() == [0, 0, 1, 2, 2, 0, 1]
    assert runs(torch.tensor([0, 0, 1, 1, 2])) == [(0, 2), (2, 4), (4, 5)] and runs(torch.tensor([])) == []
    ids = torch.tensor([0, *tokenizer("ab")["input_ids"], 1])
    text = coloured(tokenizer, ids, torch.tensor([0, *[1] * (len(ids) - 1)]))
    assert text.plain == "<s>ab</s>"


@pytest.mark.parametrize("style", STYLES, ids=lambda s: s.name)
def test_who_speaks_is_told_from_the_template(tokenizer: Any, style: Style) -> None:
    dressed = styled(tokenizer, style)
    messages = [{"role": "user", "content": "why"}, {"role": "assistant", "content": "so"}]
    messages = [{"role": "system", "content": "be"}] * style.system + messages + [{"role": "user", "content": "then"}]
    text = dressed.apply_chat_template(messages, tokenize=False, **style.args)
    found = [(role, part) for role, part in turns(text, headers(dressed, style.args))]
    assert "".join(part for _, part in found).split() == text.split()
    asked = [part for role, part in found if role == "user"]
    assert len(asked) == 2 and "why" in asked[0] and "then" in asked[1] and "why" not in asked[1]
    told = {role for role, part in found if "be" in part}
    assert told <= {"system", "user", ""}


def test_a_text_that_begins_as_every_turn_does_keeps_its_header(tokenizer: Any) -> None:
    style = next(s for s in STYLES if s.name.lower().startswith("chatml"))
    dressed = styled(tokenizer, style)
    dressed.bos_token = headers(dressed, style.args)["user"].split("user")[0]
    told = headers(dressed, style.args)
    assert told["system"] == told["user"].replace("user", "system")


def test_each_slot_shows_what_each_step_predicts(tokenizer: Any) -> None:
    answer = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0])
    ids = torch.arange(20, 31)
    steps = 3
    table = unrolled(tokenizer, ids, answer, (3, 9), steps)
    cells = [[str(c) for c in column.cells] for column in table.columns]
    expected = supervised(answer, steps)
    for row, slot in enumerate(cells[0]):
        if slot != "...":
            words = [repr(tokenizer.decode([int(i)]))[1:-1] for i in ids]
            p = int(slot)
            assert [cells[1][row], cells[2][row]] == words[p : p + 2]
            for i in range(steps):
                assert cells[3 + i][row] == (words[p + 2 + i] if expected[i, p] else "-")
    shown = {int(s) for s in cells[0] if s != "..."}
    first = [int(expected[i].nonzero()[0]) for i in range(steps)]
    last = [int(expected[i].nonzero()[-1]) for i in range(steps)]
    assert shown >= {*first, *last, *(p + 1 for p in last)}


class Words(HTMLParser):
    """The text of a page, and the tags that would fetch something."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.outside = "", 0

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.outside += tag in ("link", "img", "script", "iframe") or any(
            key in ("src", "href") for key, _ in attributes
        )


def test_text_and_page(make_recipe: Maker, target: Target, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "asked.jsonl"
    path.write_text(
        '{"id": "[bold]x", "turns": ["<b>one</b> [red]", "two"], "system": "be brief"}\n'
        + "".join(f'{{"turns": ["count to {i}"]}}\n' for i in range(9))
    )
    sources = {"asked": SourceConfig(path=str(path))}
    recipe = replace(make_recipe(sources=sources, validation_rows=1), rows=20)
    with pytest.raises(UserError, match=r"Run: python -m data_prep.run recipe=tiny"):
        main(recipe)
    served = replace(recipe.data, server=ServerConfig(url="http://127.0.0.1:9/v1"))
    with pytest.raises(
        UserError, match=r"Run: python -m data_prep.run recipe=tiny"
    ):  # no server is asked to write them
        main(replace(recipe, data=served, out=str(tmp_path / "new" / "rows.html")))
    assert not (tmp_path / "new").exists()
    with pytest.raises(UserError, match=r"Name it so, e.g. out=rows.html"):
        main(replace(recipe, out="rows.txt"))
    prepared = prepare(recipe, lambda dtype: target)
    capsys.readouterr()
    main(replace(recipe, rows=2))
    out = capsys.readouterr().out
    assert "row 1: asked / " in out and "row 2" not in out and "step 0" not in out

    main(recipe)
    out = capsys.readouterr().out
    start = out.index("asked / [bold]x")
    said = out[start : out.find("\nrow", start)]
    parts = re.findall(r"^\[(system|user|answer 1|answer 2)", said, re.MULTILINE)
    assert parts[:3] == ["system", "user", "answer 1"] and "<b>one</b> [red]" in said
    (row,) = [i for i, m in enumerate(prepared.train.meta) if m["id"] == "[bold]x"]
    answer = prepared.train.row(row)[1]
    first, last = (int(answer.eq(1).nonzero()[k]) for k in (0, -1))
    assert f"[answer 1: tokens {first} to {last}, {last - first} predicted]" in said

    page = tmp_path / "rows.html"
    main(replace(recipe, out=str(page), unroll=True))
    assert "rows.html: 9 rows" in capsys.readouterr().out
    read = Words()
    read.feed(page.read_text(encoding="utf-8"))
    assert read.outside == 0, "one file, nothing fetched"
    assert "<b>one</b> [red]" in read.text and "step 6" in read.text and "has seen" in read.text
    assert "color" in page.read_text(encoding="utf-8")

"""A conversation through every one of its turns, from a fixed number of renderings instead of one for each turn.

What a server is given at the k-th turn is the rendering of the first k. All of these can be read off the rendering of
the whole if the template is watched while it writes: what it wrote before it looked at turn k, or asked how many
there are, it would have written just so if turn k were not there. What it writes behind its last turn is the same at
every turn, if nothing in it can depend on the turns. Where this does not hold, or is not sure, `follow` says so.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

from jinja2 import Template, nodes
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template

from data_prep.template import REASONING, Message, render_all

EDGE = "\x00EspalierEdge\x00"  # written behind each turn, and taken out again
# what the watched template calls
TURN_BEGIN, TURN_EDGE, LOOP_END = "espalier_turn_begin", "espalier_turn_edge", "espalier_loop_end"
ELSEWHERE = (nodes.Block, nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport)


@dataclass(frozen=True)
class Course:
    """The rendering of turns 0 .. k is text[:ends[k - first]] + closed, or + opened where an answer is due."""

    text: str  # without `closed`
    first: int
    ends: list[int]
    opened: str
    closed: str
    parts: list[tuple[int, int]]  # what generation blocks wrote, in characters

    def answer(self, place: int, reach: int) -> tuple[int, str, str, list[tuple[int, int]]]:
        """(base, opening, shown, parts): the texts before and through the answer at `place`, all from `base` on.

        `base` lies at least `reach` characters before the opening's end, white space at this end not counted.
        """
        begin, end = self.ends[place - 1 - self.first], self.ends[place - self.first]
        base = begin
        while base and self.text[base - 1].isspace():
            base -= 1
        base = max(0, base - reach)
        found = self.parts[bisect_left(self.parts, (begin, 0)) : bisect_left(self.parts, (end, 0))]
        parts = [(a - base, b - base) for a, b in found]
        return base, self.text[base:begin] + self.opened, self.text[base:end] + self.closed, parts


def follow(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], args: Mapping[str, Any]) -> Course | None:
    """The course of a conversation that ends with an answer; None where the turns have to be rendered one by one.

    The result is checked against what a server renders before and through the last answer.
    """
    if any(key in message for message in messages for key in REASONING):
        return None  # reasoning is handed to templates under several names, which is done elsewhere
    options = {"tools": None, "documents": None, **tokenizer.special_tokens_map, **args}
    try:
        template = _watched(tokenizer.get_chat_template(tools=options["tools"]))
        if template is None:
            return None
        first, *closed = _write(template, messages, {**options, "add_generation_prompt": False})
        again, *opened = _write(template, messages, {**options, "add_generation_prompt": True})
    except Exception:  # a template raises what it likes; rendered turn by turn, it says where
        return None
    if not 0 <= first == again < len(messages) - 1 or closed[:-1] != opened[:-1]:
        return None
    text, ends = "".join(closed[:-1]), list(accumulate(map(len, closed[:-1])))
    [(shown, parts)] = render_all(tokenizer, [messages], args)
    [(opening, _)] = render_all(tokenizer, [messages[:-1]], args, generation=True)
    course = Course(text, first, ends, opened[-1], closed[-1], parts)
    if shown != text + course.closed or opening != text[: ends[-2]] + course.opened:
        return None
    return None if any(end > len(text) for _, end in parts) else course


class Sight:
    """How far a template has looked. Turn number n, which is not there, stands for the end of the conversation."""

    def __init__(self) -> None:
        self.furthest, self.looks = -1, 0

    def look(self, place: int) -> None:
        self.furthest, self.looks = max(self.furthest, place), self.looks + 1


class Turns:
    """A list of turns, as far as templates read one, that tells what is looked at. What else they try fails."""

    def __init__(self, turns: Sequence[Message], sight: Sight, start: int = 0) -> None:
        self._turns, self._sight, self._start = turns, sight, start

    def __iter__(self) -> Iterator[Message]:
        place = self._start
        while self._there(place):
            yield self._turns[place]
            place += 1

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, int) and key >= 0:
            return self._turns[self._start + key] if self._there(self._start + key) else [][key]
        if isinstance(key, slice) and key.stop is None and key.step is None and (key.start or 0) >= 0:
            return Turns(self._turns, self._sight, self._start + (key.start or 0))
        return self._all()[key]

    def __bool__(self) -> bool:
        return self._there(self._start)

    def __len__(self) -> int:
        return len(self._all())

    def __eq__(self, other: object) -> bool:
        return self._all() == other

    def __repr__(self) -> str:
        return repr(self._all())

    def _there(self, place: int) -> bool:
        self._sight.look(place)
        return place < len(self._turns)

    def _all(self) -> list[Message]:
        self._sight.look(len(self._turns))
        return list(self._turns[self._start :])


def _write(template: Template, messages: Sequence[Message], options: dict[str, Any]) -> tuple[Any, ...]:
    """(first turn of the loop, what was written through each of its turns, and behind them); (-1,) if unsure."""
    sight, begun, reached, ended = Sight(), list[int](), list[int](), list[int]()

    def begin() -> str:
        begun.append(sight.furthest)
        return ""

    def edge() -> str:
        reached.append(sight.furthest)
        return EDGE

    def end() -> str:
        ended.append(sight.looks)
        return ""

    calls = {TURN_BEGIN: begin, TURN_EDGE: edge, LOOP_END: end}
    text = template.render(**{**options, "messages": Turns(messages, sight), **calls})
    pieces = text.split(EDGE)
    first = len(messages) - len(reached)
    # each turn was written before the next was looked at, none was left by a `continue` before its edge, and none was
    # looked at behind the last
    whole = len(begun) == len(reached) == len(pieces) - 1
    if not whole or reached != list(range(first, len(messages))) or ended != [sight.looks]:
        return (-1,)
    return (first, *pieces)


@lru_cache(maxsize=4)
def _watched(source: str) -> Template | None:
    """The template with a call before and one behind each turn of its last loop, and one behind the loop.

    None where there is no such loop, or where what stands behind it may depend on what the loop has seen.
    """
    environment = _compile_jinja_template(source).environment
    tree = environment.parse(source)
    places = [i for i, node in enumerate(tree.body) if isinstance(node, nodes.For)]
    if not places or any(tree.find_all(ELSEWHERE)):
        return None
    loop, behind = tree.body[places[-1]], tree.body[places[-1] + 1 :]
    written = {name.name for name in tree.find_all(nodes.Name) if name.ctx != "load"}
    written |= {macro.name for macro in tree.find_all(nodes.Macro)}
    if not isinstance(loop, nodes.For) or loop.else_ or loop.recursive or loop.test:
        return None
    if not all(_is_fixed(node, written) for node in behind):
        return None
    # what a turn ends with only where it is the last ("{% if loop.last and add_generation_prompt %}") stands behind it
    at = len(loop.body)
    while at and _is_fixed(loop.body[at - 1], written):
        at -= 1
    loop.body.insert(at, _call(TURN_EDGE))
    loop.body.insert(0, _call(TURN_BEGIN))
    tree.body.insert(places[-1] + 1, _call(LOOP_END))
    tree.set_environment(environment)
    return Template.from_code(environment, environment.compile(tree), environment.make_globals(None))


def _is_fixed(node: nodes.Node, written: set[str]) -> bool:
    """Whether it writes the same behind any last turn: it reads no name that the template itself has written, a
    namespace, say, in which the loop may have left word of the turns, and of the loop no more than that it ends."""
    names = [name.name for name in node.find_all(nodes.Name)]
    ends = [e.node for e in node.find_all(nodes.Getattr) if e.attr == "last" and isinstance(e.node, nodes.Name)]
    return written.isdisjoint(names) and names.count("loop") == [name.name for name in ends].count("loop")


def _call(name: str) -> nodes.Output:
    call = nodes.Call(nodes.Name(name, "load"), [], [], None, None)
    return nodes.Output([call], lineno=1)

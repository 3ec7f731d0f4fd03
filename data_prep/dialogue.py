"""One conversation on its way to rows: the target is asked, answers, and is asked again, turn by turn in order."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from data_prep.loops import is_loop
from data_prep.rows import Row
from data_prep.schemas import Conversation
from data_prep.supervision import encode_generated
from data_prep.template import Message, render, tokenise
from recipes.schema import UserError

SHORTEST = 2  # tokens of an answer: one to feed and one to predict
# what became of a dialogue: its last answer ended by itself, was stopped by answer_tokens, or by the room in the row;
# the prompt left no room; the first answer was the end token alone; the template refused it; the server failed it
FATES = ("ended", "truncated", "cut", "no_room", "empty", "refused", "failed")


@dataclass(frozen=True)
class Terms:
    """What all dialogues of a preparation share."""

    tokenizer: Any
    args: Mapping[str, Any]  # of the chat template
    stop_ids: frozenset[int]  # tokens that end an answer
    max_length: int  # tokens a row
    answer_tokens: int  # tokens an answer


@dataclass
class Dialogue:
    """A row never outgrows `max_length`: its last answer gets only the room that is left (`cut` if it needed more).

    Where the template shows an earlier answer otherwise once a turn follows (drops its reasoning, say), what stands so
    far becomes a row, and the next answer starts one of its own, with the past as a server would show it to the target.
    """

    terms: Terms
    source: str
    conversation: Conversation
    temperature: float
    ids: list[int] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    fate: str = "ended"
    why: str = ""  # in words, where the fate is refused or failed
    _open: bool = True  # the last answer ended by itself, so a next turn can follow
    _text: str = ""  # what `ids` spell, up to the last generation prompt
    _answer: list[int] = field(default_factory=list)  # the last one
    _said: list[Message] = field(default_factory=list)  # answers so far, kept tool calls among them
    _looping: bool = False
    _done: list[tuple[Row, int]] = field(default_factory=list)  # rows behind which a new one was begun

    @property
    def turn(self) -> int:
        """Answers given so far."""
        return len(self._said)

    @property
    def budget(self) -> int:
        """Tokens that the next answer may take."""
        return min(self.terms.answer_tokens, self.terms.max_length - len(self.ids))

    @property
    def left_out(self) -> int:
        """Turns that were never answered."""
        return len(self.conversation.kept) - len(self._said)

    def ask(self) -> bool:
        """Put what the target is to answer next behind what is there. False: nothing is left to ask, or no room."""
        kept = self.conversation.kept
        while self._open and self.turn < len(kept) and (kept[self.turn] or {}).get("tool_calls"):
            self._said.append(kept[self.turn] or {})  # its results hang on it, so it is context and not asked again
        if not self._open or self.turn == len(kept):
            return False
        args = self.conversation.arguments(self.terms.args)
        try:
            text = render(self.terms.tokenizer, self.conversation.asked(self._said), args, generation=True)
        except UserError as error:
            self._close("ended" if self._answer else "refused", str(error))
            return False
        past = self._text + self._spell(self._answer)
        added = tokenise(self.terms.tokenizer, text.removeprefix(past)) if self._answer else []
        if self._answer and text.startswith(past) and added[:1] == self._answer[-1:]:
            if len(self.ids) + len(added) - 1 + SHORTEST > self.terms.max_length:
                self._open = False
                return False
            self.ids = self.ids + added[1:]  # the answer's end token is there already
            self.marks = self.marks + [0] * (len(added) - 1)
        else:
            fresh = tokenise(self.terms.tokenizer, text)
            if len(fresh) + SHORTEST > self.terms.max_length:
                self._close("ended" if self._answer else "no_room")
                return False
            if self._answer:
                self._done.append(((self.ids, self.marks), self.turn))
            self.ids, self.marks = fresh, [0] * len(fresh)
        self._text = text
        return True

    def take(self, answer: list[int] | None, why: str = "") -> None:
        """The target's answer, its end token included when it came; None where there is none, and `why`."""
        if answer is None:
            while self._answer and self.marks[-1:] == [0]:  # the turn that got no answer
                self.ids, self.marks = self.ids[:-1], self.marks[:-1]
            self._close("ended" if self._answer else "failed", why)
            return
        cut = self.budget < self.terms.answer_tokens
        ended = bool(answer) and answer[-1] in self.terms.stop_ids
        self.ids, self.marks = encode_generated(self.ids, answer, self.marks)
        if not ended:
            self._close("cut" if cut else "truncated")
        elif len(answer) < SHORTEST and not self._answer:
            self._close("empty")
        self._looping |= is_loop(answer)
        self._answer = answer
        self._said.append({"role": "assistant", "content": self._spell(answer)})

    def rows(self) -> list[tuple[Row, dict[str, Any]]]:
        """The rows that came of it, each with its meta data; `turn` 0 = a whole dialogue, k = up to its k-th answer."""
        if self.fate in ("no_room", "empty", "refused", "failed"):
            return []
        last = (self.ids, self.marks)
        parts = [*self._done, (last, self.turn)] if any(self.marks) else self._done
        conversation = self.conversation
        meta = {
            "id": conversation.id,
            "source": self.source,
            "category": conversation.category,
            "key": conversation.key,
            "temperature": self.temperature,
            "loop": self._looping,
        }
        several = len(parts) > 1
        return [
            (row, {**meta, "turn": turn if several else 0, "fate": self.fate if row == last else "ended"})
            for row, turn in parts
        ]

    def _spell(self, answer: list[int]) -> str:
        ended = answer[-1:] and answer[-1] in self.terms.stop_ids
        return str(self.terms.tokenizer.decode(answer[:-1] if ended else answer))

    def _close(self, fate: str, why: str = "") -> None:
        self._open, self.fate, self.why = False, fate, why

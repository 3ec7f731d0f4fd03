"""What a row of somebody's data says: a conversation, text that is rendered already, or tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from data_prep.template import Message
from recipes.files import sha256_json


@dataclass(frozen=True)
class Conversation:
    """Turns in order. An answer is due after each user turn and after each run of tool results.

    Where an assistant turn follows, it is the kept answer; where another user turn follows or nothing, there is none.
    """

    id: str
    messages: list[Message]  # system? then user, assistant (content, reasoning_content?, tool_calls?) and tool turns
    category: str = ""
    tools: list[dict[str, Any]] = field(default_factory=list)
    template_args: dict[str, Any] = field(default_factory=dict)  # of this row, laid over the recipe's
    reference: list[Any] = field(default_factory=list)
    schema: str = ""  # which shape it was read from

    @property
    def kept(self) -> list[Message | None]:
        """The answer that stands in each place where one is due, or None."""
        return [self.messages[i] if self._is_answer(i) else None for i in self._due()]

    def asked(self, answers: Sequence[Message]) -> list[Message]:
        """What the target is shown when its next answer is due, with `answers` in the place of the earlier ones."""
        due = self._due()
        assert len(answers) < len(due), "every answer is there already"
        out: list[Message] = []
        start = 0
        for place, answer in zip(due, answers, strict=False):
            out += [*self.messages[start:place], answer]
            start = place + self._is_answer(place)
        return out + self.messages[start : due[len(answers)]]

    def arguments(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """What the chat template is given besides the messages: the recipe's arguments, the row's, and the tools."""
        return {**args, **self.template_args, **({"tools": self.tools} if self.tools else {})}

    @property
    def key(self) -> str:
        """Hash of what is asked: equal for equal questions, whatever they are called and however they were answered."""
        first = self.messages[0]
        system = first["content"] if first["role"] == "system" else None
        said = [m for m in self.messages if m["role"] in ("user", "tool")]
        if not self.tools and all(m["role"] == "user" for m in said):
            return sha256_json([system, [m["content"] for m in said]])
        return sha256_json([system, said, self.tools])

    def _due(self) -> list[int]:
        """Indices in `messages` at which an answer stands or is missing."""
        roles = [m["role"] for m in self.messages]
        return [
            i + 1
            for i, role in enumerate(roles)
            if role == "user" or (role == "tool" and (i + 1 == len(roles) or roles[i + 1] != "tool"))
        ]

    def _is_answer(self, place: int) -> bool:
        return place < len(self.messages) and self.messages[place]["role"] == "assistant"


@dataclass(frozen=True)
class Rendered:
    """Text that a chat template has written already. It is trained on as it is: its answers are always kept."""

    id: str
    text: str
    category: str = ""


@dataclass(frozen=True)
class Tokenised:
    """Tokens of the target's own tokenizer with their answers marked. Kept as they are."""

    id: str
    ids: list[int]
    marks: list[int]  # 0 = not an answer, k = k-th answer
    category: str = ""


Record = Conversation | Rendered | Tokenised

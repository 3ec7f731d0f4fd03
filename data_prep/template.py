"""What a chat template says, asked of the template itself: no family is known by name here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from recipes.schema import UserError

Message = dict[str, Any]  # role, content, and what the template knows besides: reasoning_content, tool_calls, ...
SENTINEL = "EspalierSentinelText"  # no template holds it, and no template changes it


@dataclass(frozen=True)
class Edges:
    """What stands around the words of a turn."""

    before: str  # from the start of the conversation to the first word
    after: str  # from the last word on
    end_ids: frozenset[int]  # the token that ends the turn; empty when the template ends it with ordinary text


def render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], args: Mapping[str, Any], generation: bool = False
) -> str:
    """The conversation as the string a server would tokenise."""
    if not tokenizer.chat_template:
        raise UserError("the target's tokenizer has no chat template. Give an instruction-tuned target.")
    try:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=generation, **args)
    except Exception as error:  # a template raises what it likes: jinja2 errors, TypeError, its own raise_exception
        roles = ", ".join(m["role"] for m in messages)
        raise UserError(f"the target's chat template refuses a conversation of roles [{roles}]: {error}") from error
    assert isinstance(text, str)
    return text


def tokenise(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a rendered conversation: the template has written the special tokens already."""
    return [int(i) for i in tokenizer(text, add_special_tokens=False)["input_ids"]]


def prompt_ids(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], args: Mapping[str, Any]) -> list[int]:
    """What the target is given when it is to answer: the conversation and the generation prompt."""
    return tokenise(tokenizer, render(tokenizer, messages, args, generation=True))


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids that stand for markers and never for a piece of ordinary text."""
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(added | set(tokenizer.all_special_ids))


def edges(tokenizer: PreTrainedTokenizerBase, role: str, args: Mapping[str, Any]) -> Edges:
    """What the template puts around a first `user` turn, or around the `assistant` turn that answers it."""
    messages = [{"role": "user", "content": SENTINEL if role == "user" else "Hello."}]
    if role == "assistant":
        messages.append({"role": "assistant", "content": SENTINEL})
    text = render(tokenizer, messages, args)
    before, found, after = text.partition(SENTINEL)
    if not found or SENTINEL in after:
        raise UserError(f"the target's chat template does not show the text of a {role} turn once. It renders:\n{text}")
    first = tokenise(tokenizer, after)[:1]
    return Edges(before, after, frozenset(first) & special_ids(tokenizer))

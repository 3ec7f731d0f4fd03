"""What a chat template says, asked of the template itself: no family is known by name here."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2.meta import find_undeclared_variables
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

from recipes.schema import UserError

Message = dict[str, Any]  # role, content, and what the template knows besides: reasoning_content, tool_calls, ...
SENTINEL = "EspalierSentinelText"  # no template holds it, and no template changes it
REASONING = ("reasoning_content", "reasoning", "thinking")  # names under which a turn may carry it


@dataclass(frozen=True)
class Edges:
    """What stands around the words of a turn."""

    before: str  # from the start of the conversation to the first word
    after: str  # from the last word on
    end_ids: frozenset[int]  # the token that ends the turn; empty when the template ends it with ordinary text
    end: str  # its text
    trailer: str  # what the template writes behind it, which no model is asked to write


def render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], args: Mapping[str, Any], generation: bool = False
) -> str:
    """The conversation as the string a server would tokenise."""
    return render_all(tokenizer, [messages], args, generation)[0][0]


def render_all(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Sequence[Message]],
    args: Mapping[str, Any],
    generation: bool = False,
) -> list[tuple[str, list[tuple[int, int]]]]:
    """Each conversation as a string, and the characters that the template's {% generation %} blocks wrote."""
    if not tokenizer.chat_template:
        raise UserError("the target's tokenizer has no chat template. Give an instruction-tuned target.")
    options = {"tools": None, **tokenizer.special_tokens_map, **args}
    marked = has_markers(tokenizer)
    try:
        # what apply_chat_template calls, which does not tell of characters
        texts, parts = render_jinja_template(
            [list(messages) for messages in conversations],
            chat_template=tokenizer.get_chat_template(tools=options["tools"]),
            return_assistant_tokens_mask=marked,
            add_generation_prompt=generation,
            **options,
        )
    except Exception as error:  # a template raises what it likes: jinja2 errors, TypeError, its own raise_exception
        roles = ", ".join(m["role"] for m in max(conversations, key=len))
        raise UserError(f"the target's chat template refuses a conversation of roles [{roles}]: {error}") from error
    return list(zip(texts, parts if marked else [[] for _ in texts], strict=True))


def has_markers(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the template says which of its parts the model generates."""
    return re.search(r"\{%-?\s*generation\s*-?%\}", str(tokenizer.chat_template)) is not None


def arguments_read(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """Names that the chat template takes from outside: messages, tools if it shows them, and arguments of its own."""
    stored = tokenizer.chat_template
    parts = stored.values() if isinstance(stored, Mapping) else [stored]  # some come with one for tools apart
    trees = [_compile_jinja_template(part).environment.parse(part) for part in parts]
    return frozenset().union(*(find_undeclared_variables(tree) for tree in trees))


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


def special_texts(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """The texts of the markers, longest first."""
    return tuple(sorted((tokenizer.convert_ids_to_tokens(i) for i in special_ids(tokenizer)), key=len, reverse=True))


def edges(tokenizer: PreTrainedTokenizerBase, role: str, args: Mapping[str, Any]) -> Edges:
    """What the template puts around a first `user` turn, or around the `assistant` turn that answers it."""
    messages = [{"role": "user", "content": SENTINEL if role == "user" else "Hello."}]
    if role == "assistant":
        messages.append({"role": "assistant", "content": SENTINEL})
    text = render(tokenizer, messages, args)
    before, found, after = text.partition(SENTINEL)
    if not found or SENTINEL in after:
        raise UserError(f"the target's chat template does not show the text of a {role} turn once. It renders:\n{text}")
    lead = len(after) - len(after.lstrip())
    end = next((t for t in special_texts(tokenizer) if after.startswith(t, lead)), "")
    ids = frozenset(tokenise(tokenizer, end)) if end else frozenset[int]()
    return Edges(before, after, ids, end, after[lead + len(end) :] if end else "")

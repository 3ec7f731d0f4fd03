"""`python -m eval.chat recipe=NAME [drafter=DIR] [decoder=graft]`: talk to the target through a decoder.

Each round's tokens appear as they are accepted, coloured by who proposed them. In a pipe the answers are plain text,
one prompt a line. A prompt that cannot be answered is refused by itself; the conversation goes on.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from rich.console import Console
from rich.text import Text
from tokenizers.decoders import DecodeStream

from data_prep.template import Message, prompt_ids
from eval import tunings
from eval.decode import Decoded, RowResult, decode_keeping
from eval.drafters import Drafter, fitted
from eval.harness import check_matrix
from eval.matrix_file import is_file, starting_matrix
from eval.memory import SMALLER, attempt
from eval.outcome import check_room, in_dtype, longest_prompt
from eval.plan import at_batch, check_settings, describe, plan, refuse_unread, settings_of
from eval.run import (
    as_served,
    calibrated_gates,
    check_models,
    drafter_folder,
    load,
    load_eval_target,
    with_calibrated_gates,
)
from eval.settings import Settings
from models.target import Target
from recipes.cli import entry
from recipes.schema import DRAFTED, Recipe, UserError

STYLES = {"drafter": "green", "retrieval": "magenta", "bonus": ""}
HELP = "/reset forgets the conversation, /quit ends it"

Show = Callable[[str, str], None]  # (a piece of text, who proposed it)


class Chat:
    """A conversation: what was said, and a successor matrix that it alone has taught, on top of a file's where
    `eval.matrix` names one."""

    def __init__(self, recipe: Recipe, target: Target, drafter: Drafter | None, settings: Settings) -> None:
        self.recipe, self.target, self.settings = recipe, target, settings
        self.drafter = None if drafter is None else in_dtype(drafter, target.dtype)
        self.limit = longest_prompt(target, recipe.eval)
        check_room(target, recipe.eval)
        self._decode = decode_keeping()
        self._start = starting_matrix(recipe.eval.matrix, target.vocab_size, target.device, target.fingerprint)
        self.reset()

    def reset(self) -> None:
        self.messages: list[Message] = []
        self._matrix = self._start.copy() if self.settings.remembers else None

    def answer(self, question: str, show: Show) -> Decoded:
        """The target's answer, shown as it grows. Raises UserError for a question that it cannot take; what was said
        before stays."""
        if not question.isprintable() and any("\ud800" <= c <= "\udfff" for c in question):
            raise UserError("that line is not UTF-8. Send it in that encoding")
        messages = [*self.messages, {"role": "user", "content": question}]
        ids = prompt_ids(self.target.tokenizer, messages, self.recipe.target.template_args)
        if len(ids) > self.limit:
            raise UserError(
                f"the conversation is {len(ids)} tokens long and the limit is {self.limit}. /reset forgets it; "
                "eval.max_prompt (up to what the model takes) and eval.max_new_tokens set the limit"
            )
        words = _Words(self.target.tokenizer, show)
        turn = len(self.messages) // 2  # names the noise of this answer at T > 0
        told: dict[str, Any] = {"matrix": self._matrix, "row_ids": [turn], "watch": words.watch}
        decoded = attempt(lambda: self._decode(self.target, self.drafter, [ids], self.settings, **told))
        if decoded is None:
            raise UserError(f"out of memory at a conversation of {len(ids)} tokens. /reset forgets it. {SMALLER}")
        self.messages = [*messages, {"role": "assistant", "content": words.finish(decoded.rows[0])}]
        return decoded


class _Words:
    """Tokens to text as they come; a character of several tokens waits for its last one."""

    def __init__(self, tokenizer: Any, show: Show) -> None:
        self._tokenizer, self._show = tokenizer, show
        self._stream, self._seen, self._said = DecodeStream(skip_special_tokens=True), 0, ""

    def watch(self, rows: list[RowResult]) -> None:
        row = rows[0]
        for token, origin in zip(row.tokens[self._seen :], row.origins[self._seen :], strict=True):
            piece = self._stream.step(self._tokenizer.backend_tokenizer, token)
            if piece:
                self._said += piece
                self._show(piece, origin)
        self._seen = len(row.tokens)

    def finish(self, row: RowResult) -> str:
        """The whole answer; what the stream held back (a character cut in two) is shown now."""
        text: str = self._tokenizer.decode(row.tokens, skip_special_tokens=True)
        if text.startswith(self._said) and text != self._said:
            self._show(text[len(self._said) :], row.origins[-1])
        return text


def figures(decoded: Decoded) -> str:
    """One line on how the answer came about."""
    row, ways = decoded.rows[0], Counter(decoded.rows[0].origins)
    if not row.rounds:
        return f"{len(row.tokens)} token from prefill alone"
    shares = ", ".join(f"{ways[name]} {name}" for name in STYLES if ways[name])
    speed = f"{row.emitted / max(decoded.decode_seconds, 1e-9):.1f} tokens/s"
    if decoded.unready:
        speed += ", steps recorded for the first time among them"
    return f"{len(row.tokens)} tokens ({shares}), tau {row.emitted / row.rounds:.2f}, {speed}"


def talk(chat: Chat, console: Console) -> None:
    """Until /quit or the end of input."""

    def show(piece: str, origin: str) -> None:
        if console.is_terminal:
            console.print(Text(piece, STYLES[origin]), end="", soft_wrap=True)
        else:
            console.file.write(piece)  # plain: what the target said, to the letter
        console.file.flush()

    for question in questions(console):
        if question == "/quit":
            return
        if question == "/reset":
            chat.reset()
            console.print("(forgotten)", style="dim")
            continue
        if question.startswith("/"):
            console.print(
                f"({question.split()[0]} is no command here: {HELP})", style="dim", highlight=False, markup=False
            )
            continue
        try:
            decoded = chat.answer(question, show)
        except UserError as error:
            console.file.flush()
            print(f"error: {error}", file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            console.print("\n(interrupted; this turn is forgotten)", style="dim")
        else:
            console.print(f"\n[{figures(decoded)}]", style="dim", highlight=False, markup=False, soft_wrap=True)


def questions(console: Console) -> Iterator[str]:
    """What the user says, line by line; empty lines ask nothing."""
    while True:
        try:
            line = console.input("[bold]> [/]") if console.is_terminal and sys.stdin.isatty() else input()
        except (EOFError, KeyboardInterrupt):
            return
        except UnicodeDecodeError as error:
            raise UserError(f"standard input is not UTF-8 text: {error}") from error
        if line.strip():
            yield line.strip()


def legend() -> Text:
    names = {"drafter": "drafter", "retrieval": "retrieval", "bonus": "the target's own (bonus)"}
    return Text("proposed by: ") + Text(", ").join(Text(names[name], style) for name, style in STYLES.items())


def choose(recipe: Recipe) -> Recipe:
    """The decoder to talk through: the one asked for; else graft where there is a drafter, else plain decoding."""
    if recipe.decoder:
        return recipe
    folder = drafter_folder(recipe)
    if recipe.drafter or folder.is_dir():
        return replace(recipe, decoder="graft")
    print(f"no drafter in {folder}: plain decoding (ar). Train one (train/eagle.py), or give drafter=DIR")
    return replace(recipe, decoder="ar")


def tuned_settings(recipe: Recipe, folder: Path, target: Target) -> Settings:
    """The decoder's settings, in the tuner's shape where a tuned.json of this machine lies beside the drafter."""
    gates = calibrated_gates(recipe)
    as_tuned = with_calibrated_gates(at_batch(recipe, 1), gates)
    tuned = None if recipe.eval.tune is False else tunings.read(folder, as_tuned, target)
    if tuned is not None and not tuned["speculate"]:
        print("note: the tuner found nothing surely faster than plain decoding (decoder=ar) on this machine")
    entries = plan(recipe, tuned, calibrated=gates)
    return next(e.settings for e in entries if e.label == recipe.decoder)


def main(recipe: Recipe) -> None:
    refuse_unread(recipe, "eval.chat", "prompts", "out")
    check_settings(recipe)
    recipe = choose(recipe)
    source = check_models(recipe, recipe.decoder in DRAFTED)
    recipe = as_served(recipe)
    gates = calibrated_gates(recipe)
    if recipe.decoder in DRAFTED and recipe.eval.tune is not False:
        tunings.check(drafter_folder(recipe))
    if is_file(recipe.eval.matrix):
        check_matrix(recipe, source, [])
    if source is not None:
        check_room(source, recipe.eval)
    if recipe.dry_run:
        print(OmegaConf.to_yaml(OmegaConf.structured(recipe)))
        (settings,) = (e.settings for e in plan(recipe, calibrated=gates) if e.label == recipe.decoder)
        print(f"a conversation through {recipe.decoder}: {describe(settings)}")
        return
    if recipe.decoder in DRAFTED:
        target, drafter, folder = load(recipe)
        recipe = fitted(recipe, drafter)
        settings = tuned_settings(recipe, folder, target)
    else:
        target, drafter, settings = load_eval_target(recipe), None, settings_of(recipe.decoder, recipe.eval)
    console = Console()
    about = f"{recipe.target.path} through {settings.decoder} ({describe(settings)}). {HELP}"
    console.print(about, highlight=False, markup=False, soft_wrap=True)
    if console.is_terminal:
        console.print(legend())
    talk(Chat(recipe, target, drafter, settings), console)


if __name__ == "__main__":
    entry(main)

"""How an entry point shows a user's mistake, and its own usage."""

import errno
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from safetensors import SafetensorError

from recipes.loading import known_keys, load, recipe_names
from recipes.schema import Recipe, SourceConfig, UserError


def entry(main: Callable[[Recipe], None], argv: list[str] | None = None) -> None:
    """Run `main` on the resolved recipe; a UserError becomes one screen on stderr and exit code 2, Ctrl-C one line and
    130, as shells have it."""
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(argv):
        print(usage())
        return
    told(lambda: main(load(argv)))


def told(run: Callable[[], object]) -> None:
    """Run; a UserError becomes one screen on stderr and exit code 2. A reader that has seen enough (`| head`) ends it
    without a word."""
    try:
        run()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still buffered goes nowhere
        sys.exit(1)
    except UserError as error:
        _stop(str(error))
    except PermissionError as error:
        where = "run_dir, out, data.cache, or ESPALIER_CACHE in the environment"
        _stop(f"no permission for {error.filename}. Choose a folder that you may write to ({where}).")
    except (OSError, SafetensorError) as error:
        if getattr(error, "errno", None) != errno.ENOSPC and "os error 28" not in str(error):
            raise
        name = getattr(error, "filename", None)
        where = f", writing {name}" if name else ""
        _stop(f"the disk is full{where}. No file was left half-written: make room, and the same command goes on.")
    except KeyboardInterrupt:
        sys.stdout.flush()
        print("interrupted: what is whole was kept, and the same command again goes on from there", file=sys.stderr)
        sys.exit(130)


def words(
    argv: list[str], defaults: dict[str, str], doc: str, choices: dict[str, Sequence[str]], positive: str
) -> dict[str, str]:
    """A script's key=value words over its defaults. `choices` names what a key may be (lists by commas, each of them);
    a key whose default is a number takes whole ones, those of `positive` at least 1. `--help` prints `doc`."""
    if {"-h", "--help"} & set(argv):
        print(doc.strip())
        sys.exit(0)
    found = dict(defaults)
    for word in argv:
        key, equals, value = word.partition("=")
        if not equals or key not in defaults:
            raise UserError(f"no such key: {word}; there are {', '.join(defaults)} (KEY=VALUE; --help tells more)")
        known, least = choices.get(key, ()), int(key in positive.split())
        wrong = [part for part in value.split(",") if known and part not in known]
        if wrong:
            raise UserError(f"{key}={value}: {wrong[0]!r} is none of {', '.join(known)}")
        if defaults[key].isdigit() and not whole(value, least):
            raise UserError(f"{key}={value}: must be a whole number, {least} or more, of at most nine digits")
        if key == "out" and value and not Path(value).absolute().parent.is_dir():
            raise UserError(f"out={value}: there is no folder {Path(value).absolute().parent}")
        if key == "out" and Path(value).is_dir() and value:
            raise UserError(f"out={value} is a folder; give the name of a file")
        found[key] = value
    return found


def whole(word: str, least: int) -> bool:
    return word.isascii() and word.isdigit() and len(word) < 10 and int(word) >= least


def usage() -> str:
    groups: dict[str, list[str]] = {}
    for key in [*known_keys(), *known_keys(SourceConfig, "data.sources.NAME.")]:
        group, _, leaf = key.rpartition(".")
        groups.setdefault(group, []).append(leaf)
    lines = ["recipe=NAME [key=value ...]      dry_run=true resolves and checks without loading weights"]
    lines += [
        f"recipes: {', '.join(recipe_names())}, or the path of a .yaml file",
        "keys (recipes/schema.py explains each):",
    ]
    lines += [f"  {group + '.' if group else ''}{{{', '.join(leaves)}}}" for group, leaves in groups.items()]
    return "\n".join(lines)


def _stop(message: str) -> None:
    sys.stdout.flush()
    red, plain = ("\x1b[31m", "\x1b[0m") if sys.stderr.isatty() else ("", "")
    print(f"{red}error:{plain} {message}", file=sys.stderr, flush=True)
    sys.exit(2)

"""Files that are either whole or absent: every write goes aside first and is renamed into place."""

import contextlib
import errno
import fcntl
import glob
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recipes.schema import Recipe, UserError, did_you_mean


def cache_dir(*parts: str) -> Path:
    """A folder under the user's cache (`$ESPALIER_CACHE`, else ~/.cache/espalier)."""
    named = os.environ.get("ESPALIER_CACHE")
    root = user_path(named) if named else Path.home() / ".cache" / "espalier"
    return root.joinpath(*parts)


def user_path(name: str) -> Path:
    """A path as a person gave it, `~` resolved. Raises UserError where the system takes no such name."""
    try:
        path = Path(name).expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # too long; no such user's home; a NUL
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"the path {name[:80]!r} cannot be used: {reason}") from error
    return path


def run_folder(recipe: Recipe) -> Path:
    return user_path(recipe.run_dir) if recipe.run_dir else Path("runs") / Path(recipe.recipe).stem


def write_bytes(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        flush(temporary)  # else a power cut may leave the new name with nothing in it
        temporary.replace(path)
        flush(path.parent)
    finally:
        temporary.unlink(missing_ok=True)  # of a write that was interrupted


def flush(path: Path) -> None:
    """Have the disk hold a file's content, or a folder's names, where its file system can be told to."""
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        # network folders, others that cannot; write-only ones
        odd = errno.EINVAL, errno.ENOTSUP, errno.EACCES
        if error.errno not in odd or not path.is_dir():
            raise


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def read_json(path: Path, what: str) -> dict[str, Any]:
    """A JSON object; anything else is told as damage to `what`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{what}: {path} is missing") from error
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{what}: {path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{what}: {path} holds no JSON object")
    return value


def check_writable(path: Path) -> Path:
    """Refuse a folder that could not be written to, or not be made; nothing is made."""
    there = next(p for p in (path, *path.absolute().parents) if p.exists())
    if not there.is_dir():
        reason = "it is a file" if there == path else f"{there} is a file"
        raise UserError(f"cannot create the folder {path}: {reason}. Choose one that you may write to.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"no permission to write to the folder {there}. Choose another than {path}.")
    return path


def make_folder(path: Path) -> Path:
    """mkdir -p, with a missing permission told as the user's mistake."""
    check_writable(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot create the folder {path}: {error.strerror}. Choose one that you may write to."
        ) from error
    return path


@contextlib.contextmanager
def output_folder(path: Path) -> Iterator[Path]:
    """A folder to write results to, found writable before any work; when the work fails, what was made for it and is
    still empty goes again, parents too."""
    made = [p for p in (path, *path.parents) if not p.exists()]
    make_folder(path)
    try:
        yield path
    except BaseException:
        with contextlib.suppress(OSError):  # not empty
            for folder in made:
                folder.rmdir()
        raise


@contextlib.contextmanager
def locked(folder: Path, work: str, waits: bool = False) -> Iterator[None]:
    """Hold the folder against other processes, once none does if it `waits`; the lock goes with the process, however it
    ends."""
    handle = os.open(make_folder(folder), os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if not waits:
                hint = "Wait for it, or stop it (a launcher that was killed leaves its workers running)."
                raise UserError(f"{folder}: another process is {work}. {hint}") from error
            print(f"{folder}: waiting for another process, which is {work}", flush=True)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield a folder aside; on success it takes `path`'s place, on failure nothing is left. What a killed process left
    aside goes: its lock went with it."""
    make_folder(path.parent)
    for left in path.parent.glob(f".{glob.escape(path.name)}.*"):
        with contextlib.suppress(UserError):
            if left.suffix[1:].isdigit():
                with locked(left, "writing it"):
                    shutil.rmtree(left, ignore_errors=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with locked(aside, "writing it"):
            yield aside
            for file in aside.rglob("*"):
                if file.is_file():
                    file.chmod(0o644)  # safetensors writes files that only their owner can read
                if not file.is_symlink():
                    flush(file)
            flush(aside)
            shutil.rmtree(path, ignore_errors=True)
            aside.replace(path)
            flush(path.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def near_names(path: Path) -> str:
    """Whether the file or folder beside it was meant whose name is nearest; '' where none is near."""
    folder = path.parent
    names = [p.name for p in folder.iterdir() if p.name != path.name] if folder.is_dir() else []
    return did_you_mean(path.name, names, 0.75)


def sha256_file(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def sha256_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()

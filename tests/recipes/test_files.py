"""Folders: found writable before any work, and gone again when the work left nothing in them."""

import errno
import os
import stat
from pathlib import Path

import pytest

from recipes.files import (
    cache_dir,
    check_writable,
    locked,
    near_names,
    output_folder,
    user_path,
    whole_folder,
    write_text,
)
from recipes.schema import UserError


@pytest.mark.parametrize("name", ["~nobody of that name/x", "x" * 300])
def test_a_name_that_the_system_does_not_take_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="cannot be used"):
        user_path(name)


def test_an_empty_name_of_the_cache_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESPALIER_CACHE", "")
    assert cache_dir() == Path.home() / ".cache" / "espalier"
    monkeypatch.setenv("ESPALIER_CACHE", "~/elsewhere")
    assert cache_dir("targets") == Path.home() / "elsewhere" / "targets"


def test_a_folder_that_can_be_made_is_not_made(tmp_path: Path) -> None:
    assert check_writable(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_or_written_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "a" / "b"):
        with pytest.raises(UserError, match=r"cannot create the folder .* is a file"):
            check_writable(path)
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # as root, everything may be written to
    with pytest.raises(UserError, match=f"no permission to write to the folder {tmp_path}"):
        check_writable(tmp_path / "a" / "b")


def test_an_interrupted_command_leaves_no_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), output_folder(tmp_path / "a" / "b"):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "old").mkdir()
    with pytest.raises(KeyboardInterrupt), output_folder(tmp_path / "old" / "new"):
        raise KeyboardInterrupt
    assert [p.name for p in tmp_path.rglob("*")] == ["old"]


def test_what_an_interrupted_command_has_written_stays(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), output_folder(tmp_path / "a" / "b") as out:
        write_text(out / "whole.txt", "whole")
        raise KeyboardInterrupt
    assert (tmp_path / "a" / "b" / "whole.txt").read_text() == "whole"


def test_an_interrupted_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    write_text(tmp_path / "f", "old")
    monkeypatch.setattr(Path, "replace", stopped)
    with pytest.raises(KeyboardInterrupt):
        write_text(tmp_path / "f", "new")
    assert [p.name for p in tmp_path.iterdir()] == ["f"] and (tmp_path / "f").read_text() == "old"


def test_a_power_cut_leaves_no_name_without_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a file or folder holds is on the disk before it has its name, and the name before anything goes on."""
    events, rename = list[str](), Path.replace

    def named(path: Path) -> str:
        return "aside" if path.name.startswith(".") else path.name

    def noted(path: Path) -> None:
        events.append(f"flush {named(path)}")

    def renamed(self: Path, target: Path) -> None:
        events.append(f"{named(self)} to {target.name}")
        rename(self, target)

    monkeypatch.setattr("recipes.files.flush", noted)
    monkeypatch.setattr(Path, "replace", renamed)
    write_text(tmp_path / "latest", "step-3")
    assert events == ["flush aside", "aside to latest", f"flush {tmp_path.name}"]
    events.clear()
    with whole_folder(tmp_path / "step-3") as aside:
        (aside / "model").write_text("weights")
    assert events == ["flush model", "flush aside", "aside to step-3", f"flush {tmp_path.name}"]


@pytest.mark.parametrize("refusal", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_flushes_no_folders_is_written_to_all_the_same(
    refusal: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def files_alone(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(refusal, os.strerror(refusal))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", files_alone)
    write_text(tmp_path / "latest", "step-3")
    assert (tmp_path / "latest").read_text() == "step-3"


def test_the_nearest_name_is_near(tmp_path: Path) -> None:
    (tmp_path / "broken.jsonl").write_text("")
    assert near_names(tmp_path / "brokn.jsonl") == " Did you mean 'broken.jsonl'?"
    assert near_names(tmp_path / "nope.jsonl") == ""


def test_two_processes_do_not_work_in_the_same_folder(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    with (
        locked(folder, "baking"),
        pytest.raises(UserError, match="another process is baking"),
        locked(folder, "baking"),
    ):
        pass
    with locked(folder, "baking"):
        pass


def test_what_a_killed_process_left_aside_goes_and_what_lives_stays(tmp_path: Path) -> None:
    dead, alive, others = (tmp_path / name for name in (".rows.1", ".rows.2", ".rows.bak"))
    for folder in (dead, others):
        folder.mkdir()
        (folder / "half").write_text("")
    with locked(alive, "writing it"), whole_folder(tmp_path / "rows") as aside:
        (aside / "whole").write_text("")
    assert {p.name for p in tmp_path.iterdir()} == {".rows.2", ".rows.bak", "rows"}

"""Publish, verify: whatever happens, a name holds the old folder or the new one, whole; and damage is named."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import mmap
import os
import shutil
import signal
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from artifact_fixtures import NEW, OLD, break_disk, contents, die, fail_at_call, in_child, publish_version, writer
from cramlm.errors import ArtifactError, DataError, EnvironmentFault, UsageError
from cramlm.records import silent
from cramlm.storage.artifacts import MANIFEST, SMALL_FILE, hash_json, open_artifact, publish, publish_file, refuse_output, verify
from cramlm.storage.locks import environment_faults, lock, published_path, temporary_name
from cramlm.storage.stages import explain_difference, stage


def test_a_stage_that_runs_again_names_the_settings_with_their_values_and_the_data_without_hashes() -> None:
    old = {"seed": 1, "task": {"train": hash_json(1), "dev": hash_json(2)}, "model": hash_json(3), "teacher": None}
    new = {"seed": 2, "task": {"train": hash_json(4), "dev": hash_json(2)}, "model": hash_json(5), "teacher": hash_json(6)}
    reasons = explain_difference(old, new)
    assert reasons[:3] == ["model changed", "seed 1 -> 2", "task.train changed"]
    assert reasons[3].startswith("teacher unset -> ")


def test_a_published_folder_opens_and_verifies_also_after_it_was_copied_or_moved(tmp_path: Path) -> None:
    published = publish(tmp_path / "deep" / "thing", kind="thing", key=OLD, write=writer("x"))
    opened = open_artifact(tmp_path / "deep" / "thing", kind="thing")
    assert opened == published
    assert set(opened.files) == {"a.txt", "größe/b.txt", "empty.txt"}
    shutil.copytree(tmp_path / "deep" / "thing", tmp_path / "copy")
    (tmp_path / "deep" / "thing").rename(tmp_path / "moved")
    shutil.copytree(tmp_path / "copy", tmp_path / ".copy.tmp-123")
    (tmp_path / ".copy.tmp-123" / "a.txt").write_text("half")
    for folder, content in {"": '{"name": "page"}', "deep": "[]"}.items():
        (tmp_path / folder / MANIFEST).write_text(content)
    assert verify(tmp_path) == 2, "temporary folders and manifests of others are skipped"
    same, other = (publish(tmp_path / text, kind="thing", key=NEW, write=writer(text)) for text in "xy")
    assert published.fingerprint == same.fingerprint != other.fingerprint


@pytest.mark.parametrize("has_exchange_call", [True, False])
def test_replacing_leaves_only_the_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_exchange_call: bool) -> None:
    publish_version(tmp_path / "thing", OLD)
    if not has_exchange_call:
        monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: types.SimpleNamespace())
    publish(tmp_path / "thing", kind="thing", key=NEW, write=lambda folder: (folder / "only.txt").touch())
    assert sorted(path.name for path in (tmp_path / "thing").iterdir()) == [MANIFEST, "only.txt"]
    assert [path.name for path in tmp_path.iterdir()] == ["thing"]


def raise_value_error() -> None:
    raise ValueError("no")


def fill_disk() -> None:
    with open("/dev/full", "w") as full:  # noqa: PTH123 - the kernel's own ENOSPC
        full.write("x" * 100_000)


def test_errors_of_the_system_name_the_file_or_folder_that_was_passed_and_no_temporary_one(tmp_path: Path) -> None:
    """/proc takes no new files."""

    def write(folder: Path) -> None:
        (folder / "part.txt").write_text("x")
        (folder / "missing" / "part.txt").write_text("x")

    def hold_lock() -> None:
        with lock(Path("/proc/run")):
            pass

    def fail_inside() -> None:
        with environment_faults(temporary_name(tmp_path / "out") / "part.txt"):
            fill_disk()

    failures: dict[str, Callable[[], object]] = {
        "/proc/out.csv: No such file or directory": lambda: publish_file(Path("/proc/out.csv"), b"x"),
        "/proc/thing: No such file or directory": lambda: publish(Path("/proc/thing"), kind="thing", key=NEW, write=write),
        f"{tmp_path}/thing/missing/part.txt: No such file": lambda: publish(tmp_path / "thing", kind="thing", key=NEW, write=write),
        f"{tmp_path}/out/part.txt: No space left on device": fail_inside,
        "/proc/run: No such file or directory": hold_lock,
    }
    for message, failure in failures.items():
        with pytest.raises(EnvironmentFault) as caught:
            failure()
        assert str(caught.value).startswith(message)
    assert published_path("/a/.hidden/b.lock/.c.tmp-notes") == "/a/.hidden/b.lock/.c.tmp-notes"


@pytest.mark.parametrize(
    ("failure", "error", "message", "code"),
    [(raise_value_error, ValueError, "no", None), (fill_disk, EnvironmentFault, "No space left on device", 4)],
)
def test_a_writer_that_fails_changes_nothing(
    failure: Callable[[], None], error: type[Exception], message: str, code: int | None, tmp_path: Path
) -> None:
    publish_version(tmp_path / "thing", OLD)

    def write(folder: Path) -> None:
        writer("half")(folder)
        failure()

    with pytest.raises(error, match=message) as caught:
        publish(tmp_path / "thing", kind="thing", key=NEW, write=write)
    assert getattr(caught.value, "exit_code", None) == code
    assert "\n" not in str(caught.value)
    assert contents(tmp_path / "thing") == {"content 1"}
    assert [path.name for path in tmp_path.iterdir()] == ["thing"]


def test_an_interruption_while_a_failed_writer_cleans_up_leaves_no_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink, interruptions = os.unlink, [KeyboardInterrupt()]

    def interrupted_once(*args: Any, **options: Any) -> None:
        unlink(*args, **options)
        if interruptions:
            raise interruptions.pop()

    def write(folder: Path) -> None:
        for name in "abc":
            (folder / name).write_text(name)
        monkeypatch.setattr(os, "unlink", interrupted_once)
        raise DataError("bad row")

    with pytest.raises(KeyboardInterrupt):
        publish(tmp_path / "folder", kind="test", key={}, write=write)
    assert not interruptions
    assert not list(tmp_path.iterdir())


def test_kill_9_in_the_middle_of_writing_leaves_the_old_folder(tmp_path: Path) -> None:
    target = tmp_path / "thing"
    publish_version(target, OLD)

    def write(folder: Path) -> None:
        (folder / "a.txt").write_text("half")
        die()

    assert in_child(lambda: stage(target, kind="thing", key=NEW, write=write, emit=silent)) == -signal.SIGKILL
    assert open_artifact(target, kind="thing").key == OLD
    assert verify(tmp_path) == 1
    assert list(tmp_path.glob(".thing.tmp-*"))
    stage(target, kind="thing", key=NEW, write=writer("content 2"), emit=silent)
    assert not list(tmp_path.glob(".thing.tmp-*"))
    assert contents(target) == {"content 2"}


@pytest.mark.parametrize("there_before", [True, False])
def test_kill_9_at_every_sync_leaves_the_old_or_the_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there_before: bool) -> None:
    target = tmp_path / "thing"
    outcomes = []
    for number in range(100):
        shutil.rmtree(target, ignore_errors=True)
        if there_before:
            publish_version(target, OLD)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail_at_call(number, die, os.fsync))
            code = in_child(lambda: publish_version(target, NEW))
        if code == 0:
            break
        assert code == -signal.SIGKILL
        if target.exists():
            version = open_artifact(target, kind="thing").key["version"]
            assert verify(target) == 1
            assert contents(target) == {f"content {version}"}
        else:
            version = 0
        outcomes.append(version)
    assert len(outcomes) >= 6  # three files, the manifest, two folders, the parent
    assert outcomes == [int(there_before)] * (len(outcomes) - 1) + [2]


def test_a_disk_error_at_every_sync_is_an_environment_fault_and_nothing_is_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "thing"
    publish_version(target, OLD)
    for number in range(100):
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail_at_call(number, break_disk, os.fsync))
            failure = None
            try:
                publish_version(target, NEW)
            except EnvironmentFault as error:
                failure = error
        if failure is None:
            break
        assert "Input/output error" in str(failure)
        assert failure.exit_code == 4
        assert verify(target) == 1
        assert len(contents(target)) == 1
        assert [path.name for path in tmp_path.iterdir()] == ["thing"]
    assert number >= 6
    assert contents(target) == {"content 2"}


def test_a_file_size_limit_is_an_environment_fault(tmp_path: Path) -> None:
    publish_version(tmp_path / "thing", OLD)

    def work() -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        publish(tmp_path / "thing", kind="thing", key=NEW, write=writer("x" * 5000))

    assert in_child(work) == 4
    assert contents(tmp_path / "thing") == {"content 1"}


def test_the_name_is_never_absent_while_folders_are_exchanged(tmp_path: Path) -> None:
    target = tmp_path / "thing"
    publish_version(target, OLD)

    def watch() -> None:
        while not (tmp_path / "stop").exists():
            for _ in range(200):
                (target / MANIFEST).stat()  # raises if the name is absent at any moment

    pid = os.fork()
    if pid == 0:
        try:
            watch()
            os._exit(0)
        except BaseException:
            os._exit(1)
    for number in range(60):
        publish_version(target, {"version": number})
    (tmp_path / "stop").touch()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_reader_keeps_the_old_content_after_a_replacement(tmp_path: Path) -> None:
    publish_version(tmp_path / "thing", OLD)
    with (tmp_path / "thing" / "a.txt").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        publish_version(tmp_path / "thing", NEW)
        assert mapped[:] == b"content 1"
    assert contents(tmp_path / "thing") == {"content 2"}


def test_flipped_bits_and_truncations_are_detected_and_their_file_named(tmp_path: Path) -> None:
    target = tmp_path / "thing"
    publish_version(target, OLD)
    for path in (target / "a.txt", target / "größe" / "b.txt", target / MANIFEST):
        whole = path.read_bytes()
        for place in range(0, len(whole), 1 if path.name != MANIFEST else 5):
            flipped = whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :]
            for damaged in (flipped, whole[:place]) if place + 1 < len(whole) else (flipped,):  # the manifest's last byte is a line end
                path.write_bytes(damaged)
                for check in (lambda: verify(target), lambda: open_artifact(target, kind="thing")):
                    with pytest.raises(ArtifactError) as caught:
                        check()
                    assert str(path) in str(caught.value)
        path.write_bytes(whole)
    assert verify(target) == 1


def test_a_flipped_byte_in_a_large_file_is_detected_by_verify(tmp_path: Path) -> None:
    target = tmp_path / "thing"
    publish(target, kind="thing", key=OLD, write=lambda folder: (folder / "large.bin").write_bytes(bytes(SMALL_FILE + 1)))
    with (target / "large.bin").open("r+b") as file:
        file.seek(SMALL_FILE // 2)
        file.write(b"\x01")
    open_artifact(target, kind="thing")  # sizes only, for files this large
    with pytest.raises(ArtifactError, match=r"large\.bin.*content differs"):
        verify(target)


def test_a_missing_or_an_additional_file_is_named(tmp_path: Path) -> None:
    publish_version(tmp_path / "thing", OLD)
    (tmp_path / "thing" / "größe" / "extra.txt").touch()
    with pytest.raises(ArtifactError, match=r"größe/extra\.txt: not listed"):
        verify(tmp_path)
    (tmp_path / "thing" / "größe" / "b.txt").unlink()
    for check in (lambda: verify(tmp_path), lambda: open_artifact(tmp_path / "thing", kind="thing")):
        with pytest.raises(ArtifactError, match=r"größe/b\.txt: missing") as caught:
            check()
        assert caught.value.exit_code == 5


def test_a_folder_without_a_manifest_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    with pytest.raises(ArtifactError, match="not a cramlm folder"):
        open_artifact(tmp_path, kind="thing")
    with pytest.raises(ArtifactError, match="no such folder"):
        open_artifact(tmp_path / "absent", kind="thing")
    with pytest.raises(ArtifactError, match="no published folder"):
        verify(tmp_path)


def test_a_folder_of_another_kind_or_format_is_rejected(tmp_path: Path) -> None:
    publish_version(tmp_path / "thing", OLD)
    with pytest.raises(ArtifactError, match="'thing' folder, expected 'index'"):
        open_artifact(tmp_path / "thing", kind="index")
    manifest = json.loads((tmp_path / "thing" / MANIFEST).read_text())
    del manifest["sha256"]
    manifest["format"] = 99
    manifest["sha256"] = hash_json(manifest)
    (tmp_path / "thing" / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError, match="format 99"):
        open_artifact(tmp_path / "thing", kind="thing")


def test_a_single_file_is_replaced_completely_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "run" / "run.toml"
    publish_file(target, b"old")
    monkeypatch.setattr(os, "fsync", fail_at_call(0, break_disk, os.fsync))
    with pytest.raises(EnvironmentFault):
        publish_file(target, b"new")
    assert target.read_bytes() == b"old"
    assert [path.name for path in target.parent.iterdir()] == ["run.toml"]
    publish_file(target, b"new")
    assert target.read_bytes() == b"new"


def test_a_link_to_a_file_or_folder_stays_and_what_it_names_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk/data").write_bytes(b"old")
    for name in ("data", "new"):
        (tmp_path / name).symlink_to(tmp_path / "disk" / name)
        publish_file(tmp_path / name, b"new")
        assert (tmp_path / name).is_symlink()
        assert (tmp_path / "disk" / name).read_bytes() == b"new"
    (tmp_path / "disk/thing").mkdir()
    (tmp_path / "thing").symlink_to("disk/thing")
    for content in ("one", "two"):
        publish(tmp_path / "thing", kind="thing", key={}, write=partial(write_text, content=content))
        assert (tmp_path / "thing").is_symlink()
        assert (tmp_path / "disk/thing/text").read_text() == content
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "disk", "new", "thing"]
    assert sorted(path.name for path in (tmp_path / "disk").iterdir()) == ["data", "new", "thing"]


def test_a_pipe_is_written_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        publish_file(pipe, b"content")
        assert os.read(reader, 100) == b"content"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_the_file_that_standard_output_goes_to_is_not_replaced(tmp_path: Path) -> None:
    terminal = os.dup(1)
    try:
        with (tmp_path / "log").open("wb") as log:
            os.dup2(log.fileno(), 1)
            for name in (tmp_path / "log", Path("/dev/stdout")):
                with pytest.raises(UsageError, match=f"^{name}: is the file that this command prints to, which would be replaced; pass"):
                    refuse_output(name)
            refuse_output(tmp_path / "other")
    finally:
        os.dup2(terminal, 1)
        os.close(terminal)


def write_text(folder: Path, *, content: str) -> None:
    (folder / "text").write_text(content)


def test_temporary_files_of_live_writers_are_kept_and_those_of_dead_ones_removed(tmp_path: Path) -> None:
    target, foreign = tmp_path / "run.toml", tmp_path / ".run.toml.tmp-999999999"  # no process here has this id; one elsewhere may
    with foreign.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        publish_file(target, b"one")
        assert foreign.exists()
    publish_file(target, b"two")
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


def test_two_writers_with_the_same_process_id_do_not_share_a_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in two containers: the second writes the same file while the first is in the middle."""
    target = tmp_path / "run.toml"
    monkeypatch.setattr(os, "fsync", fail_at_call(0, lambda: publish_file(target, b"second"), os.fsync))
    publish_file(target, b"first")
    assert target.read_bytes() == b"first"
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


def test_two_builders_with_the_same_process_id_do_not_share_a_temporary_folder(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        writer("content 1")(folder)
        publish_version(tmp_path / "thing", NEW)

    publish(tmp_path / "thing", kind="thing", key=OLD, write=write)
    assert contents(tmp_path / "thing") == {"content 1"}
    assert verify(tmp_path) == 1


def test_a_file_in_the_place_of_a_folder_is_an_environment_fault(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentFault) as caught:
        publish_version(tmp_path / "file" / "thing", OLD)
    assert caught.value.exit_code == 4
    assert str(tmp_path / "file") in str(caught.value)


def test_a_temporary_file_is_removed_if_the_disk_fails_before_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exists = Path.exists

    def failing(path: Path) -> bool:
        if ".tmp-" in path.name:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return exists(path)

    monkeypatch.setattr(Path, "exists", failing)
    with pytest.raises(EnvironmentFault, match=r"page.html: Input/output error"):
        publish_file(tmp_path / "page.html", b"content")
    assert list(tmp_path.iterdir()) == []

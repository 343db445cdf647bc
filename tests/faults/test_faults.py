"""The figures of the fault list at a small size; `make faults` has the size for a release."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import bad_inputs
import crashes
import damage
import determinism
import fuzzing
import hostile
import io_errors
import power_loss
import pytest
import server_load
import syscalls
import workloads
from figures import Figure
from hypothesis import given
from hypothesis import strategies as st

from cramlm.data.corpus import verify_corpora
from cramlm.errors import ArtifactError
from cramlm.retrieval.bm25.index import verify_indexes
from cramlm.storage.artifacts import verify

watched = pytest.mark.skipif(not syscalls.available(), reason="this kernel has no seccomp notifications")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[workloads.World]:
    with workloads.scratch() as folder:
        yield workloads.World.build(folder / "world")


@pytest.fixture
def scratch() -> Iterator[Path]:
    with workloads.scratch() as folder:
        yield folder


def assert_holds(figure: Figure) -> None:
    assert figure.trials
    assert not figure.failures, "\n".join(figure.failures[:10])


@watched
def test_after_kill_9_before_a_change_to_a_file_the_same_command_gives_the_same_bytes(world: workloads.World, scratch: Path) -> None:
    assert_holds(crashes.kills(world, scratch, most=1))


def test_after_kill_9_at_a_random_moment_the_same_command_gives_the_same_bytes(world: workloads.World, scratch: Path) -> None:
    assert_holds(crashes.random_kills(world, scratch, times=3))


@watched
def test_a_failed_call_on_a_file_exits_with_4_and_leaves_no_partial_result(world: workloads.World, scratch: Path) -> None:
    assert_holds(io_errors.failures(world, scratch, workloads=("index", "select", "finish"), most=4))


@pytest.mark.slow
@watched
def test_an_export_folder_that_cannot_be_listed_is_a_disk_error(world: workloads.World, scratch: Path) -> None:
    def opens_folder(call: syscalls.Call) -> bool:
        name = Path(call.path).name
        return call.name == "openat" and (name.startswith(".export.tmp-") or name == "mlm")

    assert_holds(io_errors.failures(world, scratch, workloads=("finish",), most=100, concerning=opens_folder))


@watched
def test_after_a_power_loss_every_result_is_old_or_new(world: workloads.World, scratch: Path) -> None:
    assert_holds(power_loss.losses(world, scratch, most=30, rerun_every=30))


@watched
def test_of_two_index_builders_one_builds_at_whatever_moment_the_other_starts(world: workloads.World, scratch: Path) -> None:
    assert_holds(crashes.races(world, scratch, times=3))


def test_a_run_stopped_by_sigterm_at_any_moment_continues(world: workloads.World, scratch: Path) -> None:
    assert_holds(crashes.stops(world, scratch, times=1))


def test_64_clients_with_a_fifth_of_invalid_requests_get_correct_predictions_or_one_line(world: workloads.World, scratch: Path) -> None:
    assert_holds(server_load.clients(world, scratch, seconds=1))


def test_a_server_stopped_while_loading_or_later_exits_with_0(world: workloads.World, scratch: Path) -> None:
    assert_holds(server_load.stops(world, scratch, times=2))


def test_verify_and_opening_detect_damage_in_every_kind_of_folder(world: workloads.World) -> None:
    assert_holds(damage.damages(world, every=None, most=300))


def test_verify_of_a_store_detects_a_missing_part_or_segment(world: workloads.World) -> None:
    assert_holds(damage.store_damages(world))


def test_every_command_reports_bad_input_in_one_line_with_its_location_and_exit_code(world: workloads.World, scratch: Path) -> None:
    assert_holds(bad_inputs.bad_inputs(world, scratch, most=40))


@pytest.mark.slow
def test_runs_are_equal_and_index_and_selection_do_not_depend_on_the_number_of_processes(world: workloads.World, scratch: Path) -> None:
    assert_holds(determinism.repeats(world, scratch, runs=2))


@watched
def test_hostile_folders_and_archives_execute_nothing_and_write_nowhere_else(world: workloads.World, scratch: Path) -> None:
    assert_holds(hostile.hostile(world, scratch))


@given(fuzzing.rows, st.integers(0, 2**62))
def test_tables_in_every_format_are_read_completely_and_damaged_ones_get_one_line(tmp_path: Path, table: fuzzing.Rows, seed: int) -> None:
    assert fuzzing.check_table(tmp_path, [(text if text.strip() else "x", label) for text, label in table], seed) is None


@pytest.mark.parametrize("file", sorted((Path(__file__).parent / "found").glob("*")), ids=lambda path: path.name)
def test_files_found_by_fuzzing_violate_no_rule(file: Path) -> None:
    assert fuzzing.violation(file, None) is None


def test_verify_of_an_undamaged_store_finds_nothing(world: workloads.World) -> None:
    for check in (verify, verify_corpora, verify_indexes):
        check(world.folder / "catalog")
    with pytest.raises(ArtifactError):
        verify(world.folder / "data")


@watched
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_to_a_command_that_does_not_train_gives_one_line_and_leaves_no_partial_result(
    world: workloads.World, scratch: Path, number: int, code: int
) -> None:
    pids: list[int] = []

    def interrupt(call: syscalls.Call) -> None:
        os.kill(pids[0], number)

    decide, _ = crashes.counted(scratch / "index", 60, interrupt)
    body = crashes.command(["index", world.folder / "data/corpus.jsonl", "--workers", "1", "--out", scratch / "index"], scratch)
    assert syscalls.supervise(body, decide, started=pids.append) == code
    assert (scratch / "stderr").read_text().splitlines()[-1].startswith("cramlm: error: stopped by a signal")
    assert not workloads.leftovers(scratch)

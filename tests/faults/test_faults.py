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

watched = pytest.mark.skipif(not syscalls.available(), reason="this kernel does not let a process watch its child's calls")


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
def test_killed_before_any_change_to_a_file_the_same_command_ends_with_the_same_bytes(world: workloads.World, scratch: Path) -> None:
    assert_holds(crashes.kills(world, scratch, most=1))


@watched
def test_a_call_on_files_that_fails_once_is_told_and_nothing_is_half(world: workloads.World, scratch: Path) -> None:
    assert_holds(io_errors.failures(world, scratch, workloads=("index", "select", "finish"), most=4))


@pytest.mark.slow
@watched
def test_an_export_that_cannot_be_listed_when_it_is_read_back_is_the_fault_of_the_disk(world: workloads.World, scratch: Path) -> None:
    def opens_folder(call: syscalls.Call) -> bool:
        name = Path(call.path).name
        return call.name == "openat" and (name.startswith(".export.tmp-") or name == "mlm")

    assert_holds(io_errors.failures(world, scratch, workloads=("finish",), most=100, concerning=opens_folder))


@watched
def test_after_a_power_loss_every_result_is_old_or_new(world: workloads.World, scratch: Path) -> None:
    assert_holds(power_loss.losses(world, scratch, most=30, rerun_every=30))


@watched
def test_of_two_index_builders_one_builds_whenever_the_other_comes(world: workloads.World, scratch: Path) -> None:
    assert_holds(crashes.races(world, scratch, times=3))


def test_sigterm_at_any_moment_is_saved_and_gone_on_from(world: workloads.World, scratch: Path) -> None:
    assert_holds(crashes.signals(world, scratch, times=1))


def test_64_clients_a_fifth_of_whose_requests_are_wrong_get_right_answers_or_a_line(world: workloads.World, scratch: Path) -> None:
    assert_holds(server_load.clients(world, scratch, seconds=1))


def test_a_server_stopped_while_it_loads_or_after_ends_with_0(world: workloads.World, scratch: Path) -> None:
    assert_holds(server_load.stops(world, scratch, times=2))


def test_a_flipped_byte_or_a_cut_is_noticed_by_verify_and_by_opening_in_every_kind_of_folder(world: workloads.World) -> None:
    assert_holds(damage.damages(world, every=None, most=300))


def test_a_part_or_segment_that_is_gone_is_noticed_by_verify_of_the_store(world: workloads.World) -> None:
    assert_holds(damage.store_damages(world))


def test_bad_input_gets_one_line_its_exit_code_and_the_place_whatever_command_reads_it(world: workloads.World, scratch: Path) -> None:
    assert_holds(bad_inputs.bad_inputs(world, scratch, most=40))


def test_there_are_more_than_300_bad_inputs() -> None:
    assert sum(len(case.commands) for case in bad_inputs.cases()) > 300


@pytest.mark.slow
def test_whole_runs_are_equal_and_so_are_index_and_selection_by_any_number_of_processes(world: workloads.World, scratch: Path) -> None:
    assert_holds(determinism.repeats(world, scratch, runs=2))


@watched
def test_hostile_folders_and_archives_execute_nothing_and_write_nowhere_else(world: workloads.World, scratch: Path) -> None:
    assert_holds(hostile.hostile(world, scratch))


@given(fuzzing.rows, st.integers(0, 2**62))
def test_tables_in_every_form_are_read_back_whole_and_spoilt_ones_get_one_line(tmp_path: Path, table: fuzzing.Rows, seed: int) -> None:
    assert fuzzing.one(tmp_path, [(text if text.strip() else "x", label) for text, label in table], seed) is None


@pytest.mark.parametrize("file", sorted((Path(__file__).parent / "found").glob("*")), ids=lambda path: path.name)
def test_what_fuzzing_found_stays_right(file: Path) -> None:
    assert fuzzing.broken_rule(file, None) is None


def test_verify_of_a_store_finds_whole_folders_whole(world: workloads.World) -> None:
    for check in (verify, verify_corpora, verify_indexes):
        check(world.folder / "catalog")
    with pytest.raises(ArtifactError):
        verify(world.folder / "data")


@watched
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_to_a_command_that_does_not_train_gets_a_line_and_leaves_nothing_half(
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

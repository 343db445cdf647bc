"""Reading bytes and lines of compressed and damaged files, and expanding folders and globs to files."""

import bz2
import gzip
import hashlib
import io
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import textwrap
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from commands import cramlm, error_line, python
from cramlm.errors import CramError, DataError, EnvironmentFault, UsageError
from cramlm.io.formats import file_format
from cramlm.io.paths import expand_files, name_files, stamp_file
from cramlm.io.readers import Reader
from cramlm.io.rows import Column
from cramlm.io.streams import ByteStream, Lines
from cramlm.storage.artifacts import publish

TEXT = "".join(f'{{"text": "line {number} of a file that is long enough to be cut at many places"}}\n' for number in range(2000)).encode()


def stream(path: Path) -> ByteStream:
    return ByteStream(stamp_file(path), compression=file_format(path)[1])


def read(path: Path) -> bytes:
    return b"".join(stream(path).blocks())


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def compressed(suffix: str, data: bytes = TEXT) -> bytes:
    if suffix == ".gz":
        return gzip.compress(data, mtime=0)
    return zstandard.ZstdCompressor(write_checksum=True).compress(data) if suffix == ".zst" else data


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_every_compression_gives_the_same_bytes_and_the_hash_of_the_file(tmp_path: Path, suffix: str) -> None:
    path = written(tmp_path / f"a.jsonl{suffix}", compressed(suffix))
    opened = stream(path)
    assert b"".join(opened.blocks()) == TEXT
    assert opened.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert opened.raw_bytes == path.stat().st_size


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_concatenated_frames_are_one_file_and_skippable_ones_are_skipped(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    skippable = b"\x50\x2a\x4d\x18\x04\0\0\0note" if suffix == ".zst" else b""
    path.write_bytes(skippable + compressed(suffix, TEXT[:1000]) + compressed(suffix, b"") + compressed(suffix, TEXT[1000:]) + skippable)
    assert read(path) == TEXT


def compressed_with_long_window() -> bytes:
    """As by `zstd --long=31`, from a stream: the frame asks for a window of 2 GiB."""
    settings = zstandard.ZstdCompressionParameters.from_level(3, window_log=31, enable_ldm=True)
    frame = zstandard.ZstdCompressor(compression_params=settings).compressobj()
    return frame.compress(TEXT) + frame.flush()


@pytest.mark.faults
def test_zstd_with_the_longest_window_is_read_and_over_the_memory_limit_it_is_an_environment_fault(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl.zst", compressed_with_long_window())
    assert zstandard.get_frame_parameters(path.read_bytes()).window_size == 1 << 31
    assert read(path) == TEXT
    script = """
        import resource, sys
        from cramlm.io.paths import stamp_file
        from cramlm.io.streams import ByteStream
        from cramlm.errors import EnvironmentFault

        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
        try:
            list(ByteStream(stamp_file(sys.argv[1]), compression="zstd").blocks())
        except EnvironmentFault as error:
            print(error)
    """
    assert python(textwrap.dedent(script), path).startswith(f"{path}: not enough memory to decompress it")


@pytest.mark.parametrize("zeros", [1, 512, 3_000_000])
@pytest.mark.parametrize("members", [1, 2])
def test_gzip_members_may_be_followed_by_zeros(tmp_path: Path, zeros: int, members: int) -> None:
    path = written(tmp_path / "a.jsonl.gz", (compressed(".gz") + bytes(zeros)) * members)
    assert read(path) == TEXT * members


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_truncated_stream_is_reported_with_its_size_and_a_flipped_bit_never_changes_the_text(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    data = compressed(suffix)
    for kept in range(len(data) // 16, len(data), len(data) // 16):
        with pytest.raises(DataError, match=f"truncated after {kept} bytes"):
            read(written(path, data[:kept]))
    for index in range(0, len(data), max(1, len(data) // 60)):
        damaged = bytearray(data)
        damaged[index] ^= 0x10
        path.write_bytes(damaged)
        try:
            noticed = read(path) == TEXT  # gzip's header has bytes that mean nothing
        except DataError as error:
            noticed = any(word in str(error) for word in ("damaged", "truncated", "looks like"))
        assert noticed, index


@pytest.mark.faults
@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_decompression_bomb_is_read_in_small_blocks(tmp_path: Path, suffix: str) -> None:
    path = written(tmp_path / f"bomb.txt{suffix}", compressed(suffix, b"a" * 120_000_000))
    opened = stream(path)
    sizes = [len(block) for block in opened.blocks()]
    assert sum(sizes) == 120_000_000
    assert max(sizes) < 80_000_000
    assert opened.looks_like_a_bomb


UTF_16, UTF_32 = ("text,label\na,b\n".encode(encoding) for encoding in ("utf-16", "utf-32"))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.csv", UTF_16, "is UTF-16; convert it with: iconv -f UTF-16"),
        ("a.csv", UTF_16[2:], "is UTF-16LE; convert it with: iconv -f UTF-16LE"),
        ("a.csv", "text,label".encode("utf-16-be"), "is UTF-16BE"),
        ("a.csv", UTF_32, "is UTF-32; convert it with: iconv -f UTF-32"),
        ("a.csv", compressed(".gz"), "looks like gzip; add .gz"),
        ("a.jsonl.gz", compressed(".zst"), "looks like zstd"),
        ("a.jsonl.zst", TEXT, "looks like plain text"),
        ("zeros.csv.gz", bytes(512), "looks like"),
        ("zeros before.csv.gz", bytes(512) + compressed(".gz"), "looks like"),
        ("text after zeros.csv.gz", compressed(".gz") + bytes(512) + b"text", "damaged"),
    ],
)
def test_content_that_contradicts_the_name_or_is_not_utf_8_is_reported(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(written(tmp_path / name, data))


@pytest.mark.parametrize(("suffix", "unpack"), [("", ""), (".gz", "gzip -dc {file} | "), (".zst", "zstd -dc {file} | ")])
def test_the_command_that_converts_a_file_to_utf_8_works_in_any_folder(tmp_path: Path, suffix: str, unpack: str) -> None:
    (tmp_path / "my data").mkdir()
    path = written(tmp_path / f"my data/a.csv{suffix}", compressed(suffix, UTF_16))
    with pytest.raises(DataError) as caught:
        read(path)
    command, file = str(caught.value).partition("convert it with: ")[2], f"'{path}'"
    assert command == f"{unpack.format(file=file)}iconv -f UTF-16 -t UTF-8 {'' if unpack else file + ' '}> '{tmp_path}/my data/utf8-a.csv'"
    if shutil.which("iconv") and all(map(shutil.which, unpack.split()[:1])):
        subprocess.run(["sh", "-c", command], check=True)
        assert read(tmp_path / "my data/utf8-a.csv") == b"text,label\na,b\n"


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
@pytest.mark.parametrize("text", [b"PAR1 antagonists in harbour\n", b"BZhou rain\n", b"BZh9 is a name\n", b"%PDF-files are not read\n"])
def test_a_text_may_begin_like_another_format(tmp_path: Path, name: str, text: bytes) -> None:
    assert read(written(tmp_path / name, compressed(Path(name).suffix if name != "a.txt" else "", text))) == text


def parquet() -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"text": ["x" * 3000]}), file)
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (parquet(), "parquet"),
        (bz2.compress(TEXT), "bzip2"),
        (bz2.compress(b"", 1), "bzip2"),
        (b"%PDF-1.7\n%...", "a PDF"),
        (lzma.compress(TEXT), "xz"),
    ],
)
def test_files_of_other_formats_that_are_named_like_text_are_refused(tmp_path: Path, data: bytes, kind: str) -> None:
    with pytest.raises(DataError, match=f"named like text but looks like {kind}; "):
        read(written(tmp_path / "a.txt", data))
    with pytest.raises(DataError, match=f"holds {kind}, not text; "):
        read(written(tmp_path / "a.txt.gz", compressed(".gz", data)))


def test_archives_are_rejected_whatever_their_name(tmp_path: Path) -> None:
    (tmp_path / "member.csv").write_text("text\n../evil\n")
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.write(tmp_path / "member.csv", "../a.csv")
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "member.csv", "../a.csv")
    for name, copy in (("a.zip", "zip.csv"), ("a.tar.gz", "tar.csv.gz")):
        with pytest.raises(DataError, match="archives are not opened"):
            read(tmp_path / name)
        with pytest.raises(DataError, match="archive"):
            read(written(tmp_path / copy, (tmp_path / name).read_bytes()))


def test_a_path_that_is_not_a_regular_file_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("text\n")
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "loop.csv").symlink_to(tmp_path / "loop.csv")
    for name, words in (
        ("trian.csv", r"no such file \(near: train.csv\)"),
        (".", "is a folder"),
        ("pipe.csv", "not a regular file"),
        ("loop.csv", "symbolic links"),
        ("/dev/zero", "not a regular file"),
    ):
        with pytest.raises(UsageError, match=words):
            stamp_file(tmp_path / name)
    with pytest.raises(UsageError, match=r"~\$a.csv: no such file"):
        stamp_file("~$a.csv")


def test_a_file_that_changes_while_it_is_read_is_an_environment_fault(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", TEXT)
    stamp = stamp_file(path)
    path.write_bytes(TEXT + TEXT)
    with pytest.raises(EnvironmentFault, match="changed during reading"):
        list(ByteStream(stamp, compression=None).blocks())
    blocks = stream(path).blocks()
    next(blocks)
    os.utime(path, (1, 1))
    with pytest.raises(EnvironmentFault, match="changed during reading"):
        list(blocks)


@pytest.mark.parametrize("cuts", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_lines_and_offsets_do_not_depend_on_blocks(cuts: int, end: bytes) -> None:
    data = end.join([b"one", b"", b"three is longer", b"4"])
    first = max(cuts, data.index(end) + len(end))
    blocks = [data[:first], *(data[start : start + cuts] for start in range(first, len(data), cuts))]
    lines = Lines(iter(blocks), limit=100)
    found = [(number, offset, (line or b"").removesuffix(b"\r")) for number, offset, line in lines]
    assert [line for _, _, line in found] == [b"one", b"", b"three is longer", b"4"]
    assert [number for number, _, _ in found] == [1, 2, 3, 4]
    assert all(data[offset:].startswith(line) for _, offset, line in found)
    assert lines.unterminated


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("first", [2**20 - 2, 2**20 - 1, 3 * 2**20])
def test_the_line_end_of_a_file_does_not_depend_on_where_its_first_block_ends(tmp_path: Path, end: bytes, first: int) -> None:
    expected = ["x" * first, "second line", "", "fourth"]
    path = written(tmp_path / "a.txt", end.join([*(line.encode() for line in expected), b""]))
    reader = Reader(path, (Column("text"),), txt_rows="lines")
    assert [row.values[0] for row in reader] == expected


@pytest.mark.parametrize("cuts", [1, 5, 1000])
def test_an_overlong_line_is_marked_and_the_next_is_complete(cuts: int) -> None:
    data = b"short\n" + b"x" * 50 + b"\nafter\n" + b"y" * 50
    lines = Lines(iter([data[start : start + cuts] for start in range(0, len(data), cuts)]), limit=10)
    assert list(lines) == [(1, 0, b"short"), (2, 6, None), (3, 57, b"after"), (4, 63, None)]


def test_folders_and_globs_give_data_files_once_in_sorted_order(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.csv", "sub/c.txt.gz", "notes.md", "about.json", ".hidden.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    expanded = expand_files([str(tmp_path / "*.jsonl"), str(tmp_path), str(tmp_path / "b.jsonl")])
    assert [path.relative_to(tmp_path).as_posix() for path in expanded] == ["a.csv", "b.jsonl", "sub/c.txt.gz"]
    with pytest.raises(UsageError, match="no file matches"):
        expand_files([str(tmp_path / "*.parquet")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="no data file in this folder; use"):
        expand_files([str(tmp_path / "empty")])
    written(tmp_path / "empty" / "a.json", b"{}")
    with pytest.raises(
        UsageError, match=r"no data file in this folder \(\.json files, like .*a\.json, are read if they are passed by name\)"
    ):
        expand_files([str(tmp_path / "empty")])
    assert expand_files([str(tmp_path / "empty/*.json")]) == [tmp_path / "empty/a.json"]


def test_a_glob_that_matches_folders_only_is_refused_with_the_glob_of_their_files(tmp_path: Path) -> None:
    (tmp_path / "data" / "sub").mkdir(parents=True)
    for pattern in (f"{tmp_path}/data/*", f"{tmp_path}/data/*/"):
        with pytest.raises(UsageError) as caught:
            expand_files([pattern])
        assert str(caught.value) == f"{pattern}: matches only folders; pass the folder, or {tmp_path}/data/*/*.jsonl"
    file = written(tmp_path / "data" / "a.jsonl", b"x")
    assert expand_files([f"{tmp_path}/data/*"]) == [file]


@pytest.mark.parametrize("name", [b"b\xff.jsonl", b"folder\xff/b.jsonl"])
def test_a_name_that_is_not_utf_8_is_refused_in_a_line_that_can_be_printed(tmp_path: Path, name: bytes) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))
    path.parent.mkdir(exist_ok=True)
    path.write_text('{"text": "one"}\n')
    shown = f"{tmp_path}/{name.decode('utf-8', 'backslashreplace')}"
    for given in (path, tmp_path):
        line = error_line(cramlm("index", given, "--out", tmp_path / "index"), 2)
        assert line == f"{shown}: the name is not UTF-8; rename it"


def test_results_below_a_folder_are_not_read_unless_they_are_passed_by_name(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    publish(corpus / "selection", kind="selection", key={}, write=lambda folder: (folder / "dropped.jsonl").touch())
    for name, content in {
        "index/catalog.json": '{"corpus": "corpora/1", "index": "indexes/1"}',
        "index/texts.jsonl": "{}",
        "run/run.toml": "",
        "run/stages.json": "{}",
        "run/events.jsonl": "{}",
        "crawl/manifest.json": '{"files": []}',
        "crawl/catalog.json": '{"corpus": "news"}',
        "crawl/a.jsonl": "{}",
        "crawl/run.toml": "",
    }.items():
        (corpus / name).parent.mkdir(exist_ok=True)
        (corpus / name).write_text(content)
    for every in (corpus, corpus / "**/*.jsonl", tmp_path / "**/cr*/*.jsonl"):
        assert expand_files([str(every)]) == [corpus / "crawl/a.jsonl"]
    (corpus / "selection/manifest.json").write_text((corpus / "selection/manifest.json").read_text().replace('"format": 1', '"format": 99'))
    assert expand_files([str(corpus)]) == [corpus / "crawl/a.jsonl"]
    for name in ("selection/dropped.jsonl", "index/texts.jsonl", "run/events.jsonl"):
        assert expand_files([str((corpus / name).parent)]) == expand_files([str((corpus / name).parent / "**/*.jsonl")]) == [corpus / name]
    (corpus / "crawl/a.jsonl").unlink()
    with pytest.raises(
        UsageError, match=r"no data file in this folder \(results of cramlm, like .*corpus/index, are read if they are passed"
    ):
        expand_files([str(corpus)])
    with pytest.raises(
        UsageError, match=r"matches only results of cramlm, like .*corpus/index/texts.jsonl, which are read if they are passed"
    ):
        expand_files([str(corpus / "**/*.jsonl")])


def test_links_below_a_folder_are_read_if_they_lead_to_files(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "other").mkdir()
    for name in ("a.jsonl", "other/b.jsonl"):
        (tmp_path / name).write_text("{}")
    for name, target in {"a.jsonl": "../a.jsonl", "lost.jsonl": "missing", "loop.jsonl": "loop.jsonl", "other": "../other"}.items():
        (tmp_path / "corpus" / name).symlink_to(target)
    assert expand_files([str(tmp_path / "corpus")]) == [tmp_path / "corpus/a.jsonl"]


DENIED = """
import sys
from cramlm.errors import CramError
from cramlm.io.paths import expand_files

try:
    expand_files(sys.argv[1:])
except CramError as error:
    print(error.exit_code, error)
"""


@pytest.mark.parametrize("mode", [0o000, 0o444])
def test_a_folder_below_a_corpus_that_cannot_be_read_is_named(tmp_path: Path, mode: int) -> None:
    denied = tmp_path / "corpus/denied"
    denied.mkdir(parents=True)
    for path in (denied / "a.jsonl", tmp_path / "corpus/b.jsonl"):
        path.write_text("{}")
    without_rights = []
    if os.geteuid() == 0:  # root reads everything
        if shutil.which("setpriv") is None:
            pytest.skip("root, and no setpriv to give up its rights")
        without_rights = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
    denied.chmod(mode)
    try:
        command = [*without_rights, sys.executable, "-c", DENIED, str(tmp_path / "corpus")]
        shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout
    finally:
        denied.chmod(0o755)
    where = denied if mode == 0o000 else denied / "a.jsonl"
    assert shown == f"4 {where}: Permission denied; free space or fix the permission, then run again\n"


def test_short_names_of_files_are_unique(tmp_path: Path) -> None:
    assert name_files([tmp_path / "a.csv", tmp_path / "b.csv"]) == ["a.csv", "b.csv"]
    assert name_files([tmp_path / "x/a.csv", tmp_path / "y/a.csv"]) == ["x/a.csv", "y/a.csv"]


@pytest.mark.parametrize("name", ["data", "data.xyz", "a.parquet.gz", "a.gz"])
def test_a_name_without_a_known_extension_is_rejected(name: str) -> None:
    with pytest.raises(CramError, match="unknown format"):
        file_format(Path(name))

"""Strict reading of files as decompressed bytes and lines.

path -> magic bytes match the name -> gzip / zstd decompression in bounded memory -> lines without a byte order mark. A truncated or
damaged stream, an archive and a file that changes while it is read raise an error. Compressed input is decompressed 2 KB at a time: at
zstd's largest ratio (131,072 : 4) one call returns at most 64 MB, at a cost of 0.1 s per 40 MB of text. zstd frames may have windows of up
to 2 GiB (`zstd --long=31`); memory is used only for the part of the window that is filled.
"""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import itertools
import re
import shlex
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import zstandard

from cramlm.errors import DataError, EnvironmentFault
from cramlm.io.formats import COMPRESSIONS
from cramlm.io.paths import STDIN, FileStamp, check_unchanged
from cramlm.io.remote import RemoteBytes, RemoteFile
from cramlm.storage.locks import environment_faults

_BLOCK = 1 << 20
_FEED = 2048
_LARGEST_WINDOW = 1 << 31  # bytes; the largest that zstd writes
_MAGIC = (  # patterns; a text may begin with `PAR1`, `BZh` and `%PDF-`, so that these need what follows
    (rb"\x1f\x8b", "gzip"),
    (rb"\x28\xb5\x2f\xfd", "zstd"),
    (rb"PAR1(?s:.){,4096}?\0", "parquet"),  # the header of the first page ends with a zero
    (rb"PK(\x03\x04|\x05\x06)", "a zip archive"),
    (rb"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (rb"\xfd7zXZ\0", "xz"),
    (rb"BZh[1-9](1AY|\x17rE)", "bzip2"),  # a block, or the end of an empty stream
    (rb"%PDF-\d\.", "a PDF"),
)
_ENCODINGS = (  # patterns of byte order marks, the longer first: UTF-32's begins with UTF-16's; then of four letters without a mark
    (rb"\xff\xfe\0\0", "UTF-32"),
    (rb"\0\0\xfe\xff", "UTF-32"),
    (rb"\xff\xfe", "UTF-16"),
    (rb"\xfe\xff", "UTF-16"),
    (rb"([^\0]\0){4}", "UTF-16LE"),
    (rb"(\0[^\0]){4}", "UTF-16BE"),
)
_BOMB_RATIO, _BOMB_BYTES = 100, 100_000_000


class ByteStream:
    """The decompressed bytes of one file, in blocks of about 1 MB; readable once.

    raw_bytes: bytes of the file read so far. text_bytes: the same, decompressed. sha256: of the file, once the blocks are exhausted.
    """

    def __init__(self, stamp: FileStamp, *, compression: str | None) -> None:
        self.stamp = stamp
        self.path = stamp.path
        self.raw_bytes = 0
        self.text_bytes = 0
        self._compression = compression
        self._hash = hashlib.sha256()

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    @property
    def looks_like_a_bomb(self) -> bool:
        """True if decompression grew it more than 100 times, to over 100 MB."""
        return self.text_bytes > _BOMB_BYTES and self.text_bytes > _BOMB_RATIO * self.raw_bytes

    def blocks(self) -> Iterator[bytes]:
        """Raise DataError if the file is truncated, damaged or of another format, EnvironmentFault if it changes meanwhile."""
        try:
            yield from self._text(self._decompressed(self._raw()))
        except DataError:
            check_unchanged(self.stamp)  # a file that is being written is not bad data
            raise
        check_unchanged(self.stamp)

    def _raw(self) -> Iterator[bytes]:
        if str(self.path) == STDIN:
            while block := sys.stdin.buffer.read(_BLOCK):
                self._count(block)
                yield block
            return
        check_unchanged(self.stamp)
        with open_bytes(self.path) as file:
            while block := file.read(_BLOCK):
                if self.raw_bytes == 0:
                    self._check_magic(block)
                self._count(block)
                yield block
        if isinstance(self.path, RemoteFile):
            self.path.check_whole(self.raw_bytes, self.sha256)

    def _count(self, block: bytes) -> None:
        self._hash.update(block)
        self.raw_bytes += len(block)

    def _check_magic(self, block: bytes) -> None:
        kind = look_like(block)
        if self._compression is None:
            if kind is not None:
                raise DataError(f"{self.path}: named like text but looks like {kind}; {_rename(kind)}")
        elif kind != self._compression:
            raise DataError(f"{self.path}: named like {self._compression} but looks like {kind or 'plain text or data'}; rename it")

    def _decompressed(self, raw: Iterator[bytes]) -> Iterator[bytes]:
        if self._compression is None:
            return raw
        return _gather(self._gzip(raw) if self._compression == "gzip" else self._zstd(raw))

    def _zstd(self, raw: Iterator[bytes]) -> Iterator[bytes]:
        context = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW)
        frame: zstandard.ZstdDecompressionObj | None = None
        for block in raw:
            for start in range(0, len(block), _FEED):
                data = block[start : start + _FEED]
                while data:
                    frame = frame or context.decompressobj()
                    try:
                        yield frame.decompress(data)
                    except zstandard.ZstdError as error:
                        raise (self._too_large() if "not enough memory" in str(error) else self._damaged(error)) from error
                    if not frame.eof:
                        break
                    data, frame = frame.unused_data, None  # a file may have several frames
        if frame is not None:
            raise self._truncated()

    def _gzip(self, raw: Iterator[bytes]) -> Iterator[bytes]:
        member = None
        is_first = True
        for block in raw:
            data = block
            while data:
                if member is None:
                    data = data if is_first else data.lstrip(b"\0")  # zero padding after a member is valid
                    if not data:
                        break
                    member, is_first = zlib.decompressobj(wbits=31), False  # 31: the largest window, with the header of gzip
                try:
                    yield member.decompress(data, _BLOCK)
                except zlib.error as error:
                    raise self._damaged(error) from error
                data = member.unused_data if member.eof else member.unconsumed_tail
                member = None if member.eof else member
        if member is not None:
            raise self._truncated()

    def _truncated(self) -> DataError:
        return DataError(f"{self.path}: truncated after {self.raw_bytes} bytes, inside compressed data; copy or download it again")

    def _too_large(self) -> EnvironmentFault:
        what = "its window may be up to 2 GiB (zstd --long)"
        return EnvironmentFault(
            f"{self.path}: not enough memory to decompress it, {what}; raise the memory limit, or compress it with --long=27"
        )

    def _damaged(self, error: Exception) -> DataError:
        return DataError(f"{self.path}: damaged within the first {self.raw_bytes} bytes ({error}); copy or download it again")

    def _text(self, blocks: Iterator[bytes]) -> Iterator[bytes]:
        for block in blocks:
            if self.text_bytes == 0:
                self._check_text(block)
            self.text_bytes += len(block)
            yield block

    def _check_text(self, block: bytes) -> None:
        for pattern, encoding in _ENCODINGS:
            if re.match(pattern, block):
                command = f"iconv -f {encoding} -t UTF-8"
                if str(self.path) == STDIN:
                    raise DataError(f"standard input: is {encoding}; pipe it through: {command}")
                if isinstance(self.path, RemoteFile):
                    raise DataError(f"{self.path}: is {encoding}; download it and convert it with: {command}")
                source, unpack = shlex.quote(str(self.path)), self._compression
                command = f"{unpack} -dc {source} | {command}" if unpack else f"{command} {source}"
                converted = self.path.with_name(f"utf8-{self.path.stem if unpack else self.path.name}")
                raise DataError(f"{self.path}: is {encoding}; convert it with: {command} > {shlex.quote(str(converted))}")
        if (kind := look_like(block)) is not None:
            raise DataError(f"{self.path}: holds {kind}, not text; extract it and pass the files")


class Lines:
    """Lines of a byte stream as (number from 1, byte offset, line without LF); the line is None if it is over `limit` bytes.

    Lines end at LF; a CR before it is kept. If the first block with a line end has CR but no LF, lines end at CR. A UTF-8 byte order mark
    belongs to no line, but offsets count it. `unterminated` becomes True with a last line that has no line end.
    """

    def __init__(self, blocks: Iterator[bytes], *, limit: int) -> None:
        self._blocks = blocks
        self._limit = limit
        self.unterminated = False

    def __iter__(self) -> Iterator[tuple[int, int, bytes | None]]:
        first = next(self._blocks, b"")
        while b"\n" not in first and b"\r" not in first and len(first) <= self._limit and (block := next(self._blocks, b"")):
            first += block
        if first.endswith(b"\r"):  # the next block may begin with its LF
            first += next(self._blocks, b"")
        number, offset = 0, len(codecs.BOM_UTF8) if first.startswith(codecs.BOM_UTF8) else 0
        first = first[offset:]
        separator = b"\n" if b"\n" in first or b"\r" not in first else b"\r"
        tail, skipped, limit = b"", 0, self._limit  # skipped: bytes of an overlong line that were dropped
        for block in itertools.chain([first], self._blocks):
            parts = (tail + block).split(separator)
            tail = parts.pop()
            for part in parts:
                number += 1
                if skipped or len(part) > limit:
                    yield number, offset, None
                else:
                    yield number, offset, part
                offset += skipped + len(part) + 1
                skipped = 0
            if len(tail) > limit:
                skipped, tail = skipped + len(tail), b""
        if tail or skipped:
            self.unterminated = True
            yield number + 1, offset, None if skipped else tail


@contextlib.contextmanager
def open_bytes(path: Path | RemoteFile) -> Iterator[BinaryIO | RemoteBytes]:
    """Open a local or remote file; errors while it is open become one-line `CramError`s."""
    if isinstance(path, RemoteFile):
        with path.stream() as remote:
            yield remote
        return
    with environment_faults(path), path.open("rb") as file:
        yield file


def look_like(head: bytes) -> str | None:
    """Return the format of a file by its first bytes; None if it may be text."""
    for magic, name in _MAGIC:
        if re.match(magic, head):
            return name
    if head[1:4] == b"\x2a\x4d\x18" and head[0] >> 4 == 5:
        return "zstd"  # a skippable frame, as parallel and seekable writers put first
    return "a tar archive" if head[257:262] == b"ustar" else None


def _gather(pieces: Iterator[bytes]) -> Iterator[bytes]:
    held: list[bytes] = []
    size = 0
    for piece in pieces:
        held.append(piece)
        size += len(piece)
        if size >= _BLOCK:
            yield b"".join(held)
            held, size = [], 0
    if size:
        yield b"".join(held)


def _rename(kind: str) -> str:
    for suffix, compression in COMPRESSIONS.items():
        if kind == compression:
            return f"add {suffix} to the name"
    return "rename it to .parquet" if kind == "parquet" else "extract it and pass the files"

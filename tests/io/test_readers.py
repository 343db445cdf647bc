import csv
import gzip
import io
import json
import re
import subprocess
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from commands import python
from cramlm.errors import DataError, UsageError
from cramlm.io.parquet import ParquetFile
from cramlm.io.paths import stamp_file
from cramlm.io.readers import MANY_LINES, Reader, Table
from cramlm.io.rows import Column, RowCounts
from cramlm.records import Event

COLUMNS = (Column("text"), Column("label", "label", flag="--label-column"))
MakeFile = Callable[[str, str | bytes], Path]


@pytest.fixture
def make(tmp_path: Path) -> MakeFile:
    def make_file(name: str, content: str | bytes) -> Path:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return tmp_path / name

    return make_file


def rows(path: Path, columns: tuple[Column, ...] = COLUMNS, **options: Any) -> list[tuple[str | None, ...]]:
    return [row.values for row in Reader(path, columns, **options)]


def fault(path: Path, columns: tuple[Column, ...] = COLUMNS, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        rows(path, columns, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(path))
    return message.removeprefix(str(path))


TABLE = 'text,label\n"a, b",x\n"two\nlines",y\n"a ""quote""",z\n'
TABLE_ROWS = [("a, b", "x"), ("two\nlines", "y"), ('a "quote"', "z")]


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("last", [True, False])
def test_line_ends_and_byte_order_marks_do_not_change_rows(make: MakeFile, newline: str, mark: bytes, last: bool) -> None:
    table = TABLE if last else TABLE.rstrip("\n")
    assert rows(make("a.csv", mark + table.replace("\n", newline).encode())) == TABLE_ROWS
    assert rows(make("a.tsv", mark + table.replace(",", "\t").replace("\n", newline).encode())) == [("a\t b", "x"), *TABLE_ROWS[1:]]
    lines = "".join(json.dumps(dict(zip(("text", "label"), row, strict=True))) + newline for row in TABLE_ROWS)
    assert rows(make("a.jsonl", mark + lines.encode())) == TABLE_ROWS


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl", "a.txt", "a.parquet"])
def test_an_empty_file_has_no_rows(make: MakeFile, name: str) -> None:
    assert "no rows" in fault(make(name, ""), (Column("text"),))
    assert "no rows, only a header" in fault(make("header.csv", "text,label\n"))


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ("Text,label", "no column 'text'; found 'Text', 'label' (did you mean 'Text'?); pass --text-column"),
        ("text|label", "columns seem separated by bars"),
        ("Text;label", "no column 'text'; found 'Text', 'label' (did you mean 'Text'?); pass --text-column"),
        ("text,class", "no column 'label'; found 'text', 'class'; pass --label-column"),
        ("a red ship,sea", "found 'a red ship', 'sea' (the first line of a table holds the names of its columns); pass --text-column"),
        ("# exported in 2026", "(the first line of a table holds the names of its columns); pass --text-column"),
        ("text,label,text", "column 'text' occurs twice, as number 1 and 3"),
        ('{"text": "a"}', "looks like JSON lines"),
    ],
)
def test_a_missing_column_is_reported_with_the_existing_ones(make: MakeFile, header: str, words: str) -> None:
    assert words in fault(make("a.csv", f"{header}\na,b,c\n"))


@pytest.mark.parametrize(
    ("name", "content", "line", "words"),
    [
        (
            "a.csv",
            b"text,label\na,b\nc\xe9,d\n",
            3,
            "byte 0xE9 at offset 16 of the file is not UTF-8 (of a file in another encoding convert",
        ),
        ("a.csv", b"text,label\na,b\nc\0c,d\n", 3, "NUL byte at offset 16"),
        ("a.csv", b"text,label\na,b\nc\n", 3, "1 fields, expected 2"),
        ("a.csv", b"text,label\na,b\nc,d,e\n", 3, "3 fields, expected 2"),
        ("a.csv", b'text,label\n"a\nb",x\nc\n', 4, "1 fields, expected 2"),
        ("a.csv", b'text,label\na,b\n"c\nd,e\nf,g\n', 3, "the quote opened in this line is never closed"),
        ("a.csv", b'text,label\n"a\nb",x\nc,"d\n', 4, "the quote opened in this line is never closed"),
        ("a.csv", b'text,label\n"a" b,c\n', 2, "' b,c' follows the closing quote of field 1"),
        ("a.tsv", b'text\tlabel\na\tx\n"b\tx\nc\ty\n"d "\tz\n', 3, "a quoted field ends in line 5, but each of these lines alone has 2"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "c\xe9"}\n', 2, "byte 0xE9 at offset 25 of the file is not UTF-8"),
        ("a.json", b'[{"text": "a"}]', 1, "is one JSON list, not JSON lines; write one object per line (jq -c '.[]')"),
        ("a.json", b'[\n {"text": "a"}\n]', 1, "is one JSON list, not JSON lines"),
        ("a.json", b'{\n "text": "a"\n}', 1, "is one JSON object, not JSON lines; write one object per line"),
        ("a.txt", b"a\nc\0c\n", 2, "NUL byte at offset 3 of the file"),
        ("a.txt", b"a\nc\xe9\n", 2, "byte 0xE9 at offset 3 of the file is not UTF-8"),
        ("a.jsonl", b'\xef\xbb\xbf{"text":"ok"}\n{"text":"b\xff"}\n', 2, "byte 0xFF at offset 27 of the file is not UTF-8"),
        ("a.csv", b"\xef\xbb\xbftext,label\nc\0c,d\n", 2, "NUL byte at offset 15 of the file"),
        ("a.txt", b"\xef\xbb\xbfa\xff\n", 1, "byte 0xFF at offset 4 of the file is not UTF-8"),
    ],
)
def test_an_invalid_row_is_reported_with_its_line(make: MakeFile, name: str, content: bytes, line: int, words: str) -> None:
    assert fault(make(name, content), (Column("text"),)).startswith(f":{line}: {words}")


@pytest.mark.parametrize("separator", [";", "\t"])
def test_a_csv_file_whose_header_has_no_comma_may_have_semicolons_or_tabs(make: MakeFile, separator: str) -> None:
    table = 'label|"text"|\nx|"one, two"|\ny|"three; four\tfive"|\nz|six, seven|\n'.replace("|", separator)
    assert rows(make("a.csv", table)) == [("one, two", "x"), ("three; four\tfive", "y"), ("six, seven", "z")]


@pytest.mark.parametrize("first", ["sep=;", '"sep=;"\r', "sep=|"])
def test_a_first_line_that_names_the_separator_is_no_header(make: MakeFile, first: str) -> None:
    path = make("a.csv", f"{first}\nlabel;text,place\nx;one, two\n".replace(";", first.strip('"\r')[-1]))
    assert [(row.line, row.values) for row in Reader(path, (Column("text,place"),))] == [(3, ("one, two",))]
    assert Table.read(str(path)).rows == [{"label": "x", "text,place": "one, two"}]


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_a_table_is_marked_if_its_text_is_also_in_a_compressed_file(make: MakeFile, mark: bytes) -> None:
    content = mark + TABLE.encode()
    for path in (make("a.csv", content), make("a.csv.gz", gzip.compress(content))):
        assert Table.read(str(path)).marked == bool(mark)


def test_the_command_of_the_message_quotes_a_file_whose_quotes_are_text(make: MakeFile) -> None:
    path = make("a.tsv", 'text\tlabel\r\n"b\tx\r\n\ty\r\n"c" d "\t"z"\r\n')
    command = re.search(r"quote all fields: (sed '.*?')", fault(path))
    quoted = subprocess.run(f"{command[1]} {path}", shell=True, capture_output=True, check=True).stdout
    assert rows(make("b.tsv", quoted)) == [('"b', "x"), ("", "y"), ('"c" d "', '"z"')]


def test_a_header_with_a_comma_has_commas_whatever_else_it_has(make: MakeFile) -> None:
    assert rows(make("a.csv", "text,label,place;time\na;b,x,1;2\n")) == [("a;b", "x")]
    assert rows(make("b.csv", 'text,"label"\na;b,x\n')) == [("a;b", "x")]
    assert rows(make("c.csv", '"place, time";text;label\n"1, 2";a,b;x\n')) == [("a,b", "x")]


def test_a_table_may_have_several_columns_without_a_name(make: MakeFile) -> None:
    assert rows(make("a.csv", ",text,,label,\n1,one,,x,\n2,two,,y,\n")) == [("one", "x"), ("two", "y")]


def test_quotes_inside_a_field_that_is_not_quoted_are_text(make: MakeFile) -> None:
    assert rows(make("a.tsv", 'text\tlabel\n5" pipe\tx\nhe said "no"\ty\n')) == [('5" pipe', "x"), ('he said "no"', "y")]


def test_values_like_null_or_numbers_stay_strings(make: MakeFile) -> None:
    values = ["NA", "null", "None", "nan", "1.0", "007", "true", " padded ", "-0"]
    expected = [(value, value) for value in values]
    assert rows(make("a.csv", "text,label\n" + "".join(f"{value},{value}\n" for value in values))) == expected
    assert rows(make("a.jsonl", "".join(json.dumps({"text": v, "label": v}) + "\n" for v in values))) == expected


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": "a", "label": }', "not JSON"),
        ('{"text": "a" "label": "b"}', "not JSON"),
        ('{"label": "b"}', "no column 'text'; found 'label'"),
        ('{"text": 5, "label": "b"}', "'text' is not a string but a number (5)"),
        ('{"text": null, "label": "b"}', "'text' is not a string but null; fix it"),
        ('{"text": true, "label": "b"}', "'text' is not a string but a boolean (true)"),
        ('{"text": ["a"], "label": "b"}', "'text' is not a string but a list"),
        ('{"text": "a", "text": "b", "label": "c"}', "key 'text' occurs twice"),
        (
            '{"text": "a", "label": ["b"]}',
            "'label' is neither string, number nor boolean but a list (['b']); write a label by itself (jq -c '.[\"label\"] |= first'), or",
        ),
        ('{"text": "a", "label": NaN}', "NaN is not JSON"),
        ('{"text": "\\ud83d", "label": "b"}', "lone surrogate"),
        ('{"text": "a\0b", "label": "b"}', "NUL byte"),
        ('["a", "b"]', "not a JSON object but a list"),
        ('{"text": "a", "label": "b"} {}', "more follows"),
        ("[" * 100_000 + "]" * 100_000, "nested deeper than 64"),
        ('{"text": "a", "label": "b", "x": ' + '{"a":' * 100_000 + "}" * 100_001, "nested deeper than 64"),
        ('{"text": "a", "label": "b", "x": ' + "9" * 10_000 + "]", "not JSON"),
    ],
)
def test_an_invalid_json_line_is_reported_and_can_be_skipped(make: MakeFile, line: str, words: str) -> None:
    good = '{"text": "good", "label": "x"}\n'
    path = make("a.jsonl", f"{good}\n{line}\n{good}")
    message = fault(path)
    assert message.startswith(f":3: {words}")
    events: list[Event] = []
    reader = Reader(path, COLUMNS, on_bad_row="skip", emit=events.append)
    assert [row.values for row in reader] == [("good", "x"), ("good", "x")]
    assert (reader.counts.rows_read, reader.counts.rows_used, len(reader.counts.rejected)) == (3, 2, 1)
    assert reader.counts.rejected[0].line == 3
    assert events[0].kind == "warning"
    assert events[0].data["rejected"] == [asdict(reader.counts.rejected[0])]


def test_a_last_line_without_newline_is_read_if_it_is_complete(make: MakeFile) -> None:
    assert len(rows(make("a.jsonl", '{"text": "a", "label": "b"}\n{"text": "c", "label": "d"}'))) == 2
    message = fault(make("b.jsonl", '{"text": "a", "label": "b"}\n{"text": "c", "la'))
    assert message.startswith(":2: not JSON")
    assert "is it truncated?" in message


def test_escaped_characters_are_text_and_brackets_in_a_string_are_not_depth(make: MakeFile) -> None:
    deep = '[[{"' * 200 + "\\"
    path = make("a.jsonl", f'{{"text": {json.dumps(deep)}, "label": "x"}}\n{{"text": "a\\u0000b\\ud83d\\ude00", "label": "x"}}')
    assert rows(path) == [(deep, "x"), ("a\0b😀", "x")]


def test_json_labels_keep_their_spelling_and_two_types_are_reported_with_both_lines(make: MakeFile) -> None:
    for spelled in (["1", "-0"], ["true", "false"], ["1.0", "1e3"], ['"007"']):
        path = make("a.jsonl", "".join(f'{{"text": "a", "label": {value}}}\n' for value in spelled))
        assert [label for _, label in rows(path)] == [value.strip('"') for value in spelled]
    path = make("a.jsonl", '{"text": "a", "label": "1"}\n{"text": "a", "label": 1}\n')
    assert fault(path, on_bad_row="skip").startswith(":2: 'label' is 1, a JSON integer, and of type string in line 1")
    path = make("b.jsonl", '{"text": "a", "label": "true"}\n{"text": "b", "label": true}\n')
    assert fault(path).startswith(":2: 'label' is true, a JSON boolean, and of type string in line 1")


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.txt"])
def test_an_overlong_record_is_rejected_with_its_line(make: MakeFile, name: str) -> None:
    long, good = (json.dumps({"text": text}) if name == "a.jsonl" else text for text in ("x" * 5000, "ok"))
    path = make(name, ("text\n" if name == "a.csv" else "\n") + f"{long}\n\n{good}\n")
    assert fault(path, (Column("text"),), max_record_bytes=1000).startswith(":2: the line is longer than 1,000 bytes")
    assert rows(path, (Column("text"),), max_record_bytes=1000, on_bad_row="skip") == [("ok",)]


@pytest.mark.faults
def test_a_20_mb_line_is_read_in_bounded_memory_or_rejected(make: MakeFile) -> None:
    path = make("a.jsonl", b'{"text": "' + b"x" * 20_000_000 + b'"}\n')
    assert fault(path, (Column("text"),)).startswith(":1: the line is longer")
    tracemalloc.start()
    assert len(rows(path, (Column("text"),), max_record_bytes=25_000_000)[0][0] or "") == 20_000_000
    assert tracemalloc.get_traced_memory()[1] < 200_000_000
    tracemalloc.stop()


def test_an_unclosed_quote_does_not_read_the_whole_file_into_memory(make: MakeFile) -> None:
    for end in ("", '"'):
        path = make("a.csv", 'text\nok\n"open\n' + "line\n" * 10_000 + end)
        message = fault(path, (Column("text"),), max_record_bytes=1000, on_bad_row="skip")
        assert message.startswith(":3: the quote opened in this line is not closed within 1,000 bytes (max_record_bytes); close it")


def test_text_files_give_paragraphs_or_lines(make: MakeFile) -> None:
    path = make("a.txt", "\none\ntwo\n \nthree\n\n\n")
    reader = Reader(path, (Column("text"), Column("id", "name", required=False)))
    assert [(row.line, row.values) for row in reader] == [(2, ("one\ntwo", None)), (5, ("three", None))]
    assert rows(make("b.txt", "one\r\n\r\ntwo"), (Column("text"),), txt_rows="lines") == [("one",), ("",), ("two",)]
    path = make("c.txt", "one\n\n" + "a line\n" * 400 + "\ntwo")
    assert fault(path, (Column("text"),), max_record_bytes=1000).startswith(":3: the paragraph is longer than 1,000 characters")
    assert rows(path, (Column("text"),), max_record_bytes=1000, on_bad_row="skip") == [("one",), ("two",)]
    with pytest.raises(UsageError, match="a text file has no column 'label'"):
        rows(path)


def test_a_text_file_of_many_lines_without_a_blank_one_is_one_text_with_a_warning(make: MakeFile) -> None:
    for name, text, texts in (
        ("a", "a line\n" * MANY_LINES, 1),
        ("b", "a line\n" * (MANY_LINES - 1), 1),
        ("c", "a\n\n" * MANY_LINES, MANY_LINES),
    ):
        events: list[Event] = []
        assert len(list(Reader(make(f"{name}.txt", text), (Column("text"),), emit=events.append))) == texts
        messages = [event.message for event in events if event.kind == "warning"]
        assert ["its 50 lines are one text; if each line is a text, write blank lines" in message for message in messages] == [True] * (
            name == "a"
        )
    assert len(rows(make("a.txt", "a line\n" * MANY_LINES), (Column("text"),), txt_rows="lines")) == MANY_LINES


def write_parquet(path: Path, table: dict[str, Any], **options: Any) -> Path:
    pq.write_table(pa.table(table), path, **options)
    return path


def test_parquet_gives_strings_from_text_dictionary_and_scalar_columns_and_a_null_text_is_a_bad_row(tmp_path: Path) -> None:
    texts = pa.array(["a", "b", "a"])
    for number, column in enumerate((texts, texts.dictionary_encode(), texts.cast(pa.large_string()))):
        path = write_parquet(tmp_path / f"{number}.parquet", {"text": column, "label": [7, 8, None]})
        assert rows(path) == [("a", "7"), ("b", "8"), ("a", None)]
    numbers = [0.1, 1.0, 16777216.0, 1e-7, float("nan"), None]
    for kind in (pa.float32(), pa.float64(), pa.dictionary(pa.int8(), pa.float32())):
        path = write_parquet(tmp_path / "f.parquet", {"text": ["a"] * 6, "label": pa.array(numbers, kind)})
        assert [label for _, label in rows(path)] == ["0.1", "1.0", "16777216.0", "1e-07", None, None]
    path = write_parquet(tmp_path / "null.parquet", {"text": ["a", None], "label": ["x", "y"]})
    assert fault(path).startswith(":2: 'text' is null")
    assert rows(path, on_bad_row="skip") == [("a", "x")]


@pytest.mark.parametrize("column", [pa.array([b"a"]), pa.array([["a"]]), pa.array([1])])
def test_a_parquet_text_column_of_another_type_is_named(tmp_path: Path, column: Any) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"text": column, "label": ["x"]})
    assert f"column 'text' has the type {str(column.type).split('<')[0]}" in fault(path)


@pytest.mark.parametrize("kind", [pa.list_(pa.string()), pa.large_list(pa.string()), pa.list_(pa.string(), 2)])
def test_a_parquet_column_of_lists_holds_several_labels_of_each_text(tmp_path: Path, kind: Any) -> None:
    labels = pa.array([["x", "y"], ["y", "z"]], kind)
    path = write_parquet(tmp_path / "a.parquet", {"text": ["a", "b"], "label": labels})
    assert rows(path, (Column("text"), Column("label", "labels"))) == [("a", '["x", "y"]'), ("b", '["y", "z"]')]
    assert fault(path).endswith("; for several labels per text pass --task-type multi-label, or pass --label-column")


def write_like_datasets(path: Path, table: dict[str, Any], features: Any) -> Path:
    """Write a table with metadata as Hugging Face's datasets has it (`Dataset.to_parquet`)."""
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    pq.write_table(pa.table(table).replace_schema_metadata(metadata), path)
    return path


SEA_OR_HILL = {"names": ["sea", "hill"], "_type": "ClassLabel"}


def test_numbers_of_class_labels_in_a_parquet_file_are_read_as_their_names_and_minus_one_as_no_label(tmp_path: Path) -> None:
    features = {"text": {"dtype": "string", "_type": "Value"}, "label": SEA_OR_HILL}
    table = {"text": ["a", "b", "c", "d"], "label": [1, 0, -1, None]}
    path = write_like_datasets(tmp_path / "a.parquet", table, features)
    assert rows(path) == [("a", "hill"), ("b", "sea"), ("c", None), ("d", None)]
    assert rows(path, (Column("text"), Column("label", "number"))) == [("a", "1"), ("b", "0"), ("c", "-1"), ("d", None)]
    for number in (2, -2):
        outside = write_like_datasets(tmp_path / "outside.parquet", table | {"label": [1, number, 0, 0]}, features)
        assert fault(outside) == f":2: 'label' is {number}, and the metadata of the file has names for 0 to 1; fix it"
        assert rows(outside, on_bad_row="skip") == [("a", "hill"), ("c", "sea"), ("d", "sea")]


@pytest.mark.parametrize("kind", [[SEA_OR_HILL], {"feature": SEA_OR_HILL, "_type": "Sequence"}, {"feature": SEA_OR_HILL, "_type": "List"}])
def test_lists_of_class_labels_in_a_parquet_file_are_read_as_their_names(tmp_path: Path, kind: Any) -> None:
    table = {"text": ["a", "b"], "label": [[1, 0], []]}
    path = write_like_datasets(tmp_path / "a.parquet", table, {"label": kind})
    assert rows(path, (Column("text"), Column("label", "labels"))) == [("a", '["hill", "sea"]'), ("b", "[]")]


@pytest.mark.parametrize(
    "features",
    [
        *([], None, {"label": None}, {"label": []}, {"label": {"_type": "Value", "dtype": "int64"}}),
        *({"label": {"_type": "ClassLabel", "names": names}} for names in (None, [], ["a", "a"], [1, 2])),
    ],
)
def test_a_parquet_file_without_names_of_its_labels_gives_their_numbers(tmp_path: Path, features: Any) -> None:
    assert rows(write_like_datasets(tmp_path / "a.parquet", {"text": ["a"], "label": [1]}, features)) == [("a", "1")]


def test_a_truncated_parquet_file_is_reported(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"text": [f"text {n}" for n in range(3000)], "label": ["x"] * 3000})
    data = path.read_bytes()
    for kept in range(len(data) // 16, len(data), len(data) // 16):
        path.write_bytes(data[:kept])
        assert f"truncated after {kept} bytes" in fault(path)


def test_a_damaged_parquet_page_is_reported_if_it_has_a_checksum(tmp_path: Path) -> None:
    table = {"text": [f"text {n * 7919 % 1000}" for n in range(3000)], "label": ["x"] * 3000}
    path = write_parquet(tmp_path / "a.parquet", table, write_page_checksum=True, compression="none", use_dictionary=False)
    data = bytearray(path.read_bytes())
    for place in range(2000, 20_000, 1777):
        damaged = bytearray(data)
        damaged[place] ^= 4
        path.write_bytes(damaged)
        assert "damaged" in fault(path)


def test_a_parquet_file_whose_column_names_are_not_utf_8_is_damaged(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"text": ["a", "b"]}, store_schema=False)
    data = path.read_bytes()
    for found in re.finditer(b"text", data):
        path.write_bytes(data[: found.start()] + b"\xff" + data[found.start() + 1 :])
        assert re.match(r": damaged, row 1 cannot be read \(.*\); copy or write it again", fault(path, (Column("text"),)))


def test_a_parquet_file_with_a_dictionary_page_outside_of_it_is_damaged(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"text": ["a"] * 3000}, write_statistics=False)
    data = path.read_bytes()
    offsets = set()
    for place in (place for place, byte in enumerate(data) if byte == 8):  # 4 as a number of Thrift's compact protocol
        for byte in (7, 126):  # -4 and 63
            damaged = data[:place] + bytes([byte]) + data[place + 1 :]
            try:
                offset = pq.read_metadata(io.BytesIO(damaged)).row_group(0).column(0).dictionary_page_offset
            except OSError:
                continue
            if offset != 4:
                offsets.add(offset)
                path.write_bytes(damaged)
                assert re.match(r": damaged, row 1 cannot be read \(.*\); copy or write it again", fault(path, (Column("text"),)))
    assert -4 in offsets


def test_an_error_that_the_consumer_of_parquet_rows_raises_is_not_reported_as_damage(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"text": ["a", "b"]})
    counts = RowCounts(path, None)
    generator = ParquetFile(stamp_file(path)).rows((Column("text"),), counts, limit=1000)
    next(generator)
    with pytest.raises(UnicodeDecodeError):
        generator.throw(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "of the consumer"))


def test_a_parquet_extension_on_other_content_is_reported(make: MakeFile) -> None:
    assert "named .parquet but looks like text" in fault(make("a.parquet", TABLE))
    assert "named like text but looks like parquet; rename it to .parquet" in fault(make("a.csv", b"PAR1\x15\x04\x15\0"))


def test_standard_input_holds_json_lines_or_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    for content in (b'{"text": "a"}\n{"text": "b"}\n', b"a\nb\n"):
        for mark in (b"", b"\xef\xbb\xbf"):
            monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(mark + content)))
            assert rows(Path("-"), (Column("text"),), txt_rows="lines") == [("a",), ("b",)]


def test_standard_input_that_is_not_utf_8_is_to_be_piped_through_iconv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("wave ship\n".encode("utf-16"))))
    with pytest.raises(DataError) as caught:
        rows(Path("-"), (Column("text"),), txt_rows="lines")
    assert str(caught.value) == "standard input: is UTF-16; pipe it through: iconv -f UTF-16 -t UTF-8"


@pytest.mark.parametrize("header", ["text,label", '"id";"text"', "label\ttext"])
def test_a_table_is_refused_where_lines_are_texts(header: str, make: MakeFile, monkeypatch: pytest.MonkeyPatch) -> None:
    content = f"{header}\na,b\n".encode()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
    for path in (Path("-"), make("a.txt", content)):
        with pytest.raises(DataError, match=f"{path}:1: .* looks like the header of a table.* pass the table as a .csv or .tsv file"):
            rows(path, (Column("text"),), txt_rows="lines")


@pytest.mark.parametrize("line", ["text", "a text, with a comma", "text, label", "texts,label"])
def test_a_line_that_mentions_the_name_of_the_column_is_a_text(line: str, make: MakeFile) -> None:
    assert rows(make("a.txt", f"{line}\n".encode()), (Column("text"),), txt_rows="lines") == [(line,)]


WORDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
TABLES = st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=8)


@example(table=[("a", "")], separator=",", quoting=csv.QUOTE_MINIMAL)  # a line that ends with a separator
@given(table=TABLES, separator=st.sampled_from([",", "\t"]), quoting=st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_MINIMAL]))
def test_what_pythons_csv_module_writes_is_read_back(tmp_path: Path, table: list[tuple[str, str]], separator: str, quoting: Any) -> None:
    path = tmp_path / ("a.csv" if separator == "," else "a.tsv")
    if separator == "\t":  # which may make a file ambiguous
        table = [(text.replace("\t", " "), label.replace("\t", " ")) for text, label in table]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter=separator, quoting=quoting, lineterminator="\r\n")  # so that a "\r" is quoted
        writer.writerow(["text", "label"])
        writer.writerows(table)
    assert rows(path) == table


@given(table=TABLES, ascii_only=st.booleans())
def test_what_pythons_json_module_writes_is_read_back(tmp_path: Path, table: list[tuple[str, str]], ascii_only: bool) -> None:
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": text, "label": label}, ensure_ascii=ascii_only) for text, label in table]
    path.write_text("\n".join(lines), "utf-8", newline="")
    assert rows(path) == table


@given(content=st.binary(max_size=60), name=st.sampled_from(["a.csv", "a.jsonl", "a.tsv", "a.txt", "a.csv.gz", "a.jsonl.zst", "a.parquet"]))
def test_any_bytes_give_rows_or_a_one_line_error(tmp_path: Path, content: bytes, name: str) -> None:
    (tmp_path / name).write_bytes(content)
    for on_bad_row in ("fail", "skip"):
        try:
            rows(tmp_path / name, (Column("text"),), on_bad_row=on_bad_row)
        except DataError as error:
            message = str(error)
            assert "\n" not in message


# In a new interpreter: what a process has freed and mapped before decides how much of a reading shows in its memory.
PEAK = """
import re, sys
from pathlib import Path
from cramlm.io.readers import Reader
from cramlm.io.rows import Column

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

def rows(path):
    return sum(1 for _ in Reader(Path(path), (Column("text"),)))

rows(sys.argv[2])  # what any reading loads
before = peak()
print(rows(sys.argv[1]), peak() - before)
"""


@pytest.mark.faults
@pytest.mark.parametrize("as_dictionary", [True, False])
def test_a_parquet_bomb_is_read_in_bounded_memory(tmp_path: Path, as_dictionary: bool) -> None:
    """400 rows that are one text of 1 MB: 400 MB if every row is a copy."""
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 400, pa.int32()), pa.array(["x" * 1_000_000]))
    bomb, small = tmp_path / "a.parquet", write_parquet(tmp_path / "small.parquet", {"text": ["x"]}, compression="zstd")
    write_parquet(bomb, {"text": texts}, compression="zstd", dictionary_pagesize_limit=10**7, store_schema=as_dictionary)
    assert bomb.stat().st_size < 10_000
    rows, grown = map(int, python(PEAK, bomb, small).split())
    assert rows == 400
    assert grown < 250_000  # kB


def test_a_parquet_column_with_an_implausible_compression_ratio_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cramlm.io.parquet._BOMB_BYTES", 8_000_000)
    path = write_parquet(tmp_path / "a.parquet", {"text": ["x" * 1_000_000] * 9}, compression="zstd", use_dictionary=False)
    assert re.match(r": column 'text' grows \d+ times when decompressed", fault(path, (Column("text"),)))

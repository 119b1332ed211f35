"""The one way in and the one way out of the package."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

import specmodel as sm
from specmodel.cli.parsing import parse_counts, parse_link
from specmodel.files import (
    check_output,
    csv_records,
    csv_rows,
    parse_json,
    read_bytes,
    read_text,
    write_text,
    written_beside,
)
from specmodel.hardware import write_device
from specmodel.plausible import check_plausible, check_together

# -- in ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_a_byte_order_mark_tells_the_encoding(encoding: str, tmp_path: Path) -> None:
    file = tmp_path / "x.txt"
    file.write_bytes("a µ\r\nb\r".encode(encoding))
    assert read_text(file) == "a µ\nb\n"


def test_what_is_no_text_or_too_large_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.txt"
    file.write_bytes("k,batch".encode("utf-16-le"))
    with pytest.raises(sm.DomainError, match="UTF-16 needs its byte-order mark"):
        read_text(file)
    file.write_bytes(b"\xff")
    with pytest.raises(sm.DomainError, match="not a text file in UTF-8"):
        read_text(file)
    with pytest.raises(sm.DomainError, match="is larger than 0 bytes"):
        read_bytes(file, most=0)
    with pytest.raises(sm.ProfileError, match="no such file"):
        read_text(tmp_path / "none", fault=sm.ProfileError)
    with pytest.raises(sm.DomainError, match="cannot be read"):
        read_text("a\0b")


def test_a_pipe_is_read_and_a_device_is_not(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text("through"))
    writer.start()
    assert read_text(pipe) == "through"
    writer.join()
    with pytest.raises(sm.DomainError, match="/dev/zero: is no regular file"):
        read_text("/dev/zero")


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_delimiters_are_recognised(delimiter: str) -> None:
    text = delimiter.join("ab") + "\n\n" + delimiter.join(["1", '"2\n3"']) + "\n"
    assert list(csv_rows(text, "x")) == [(1, ["a", "b"]), (4, ["1", "2\n3"])]
    assert list(csv_records(text, "x", ["b"])) == [("x:4", {"a": "1", "b": "2\n3"})]


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("sep=;\nk;x\n1;2\n", [(2, ["k", "x"]), (3, ["1", "2"])]),
        ("# a remark, with commas\n\nk;x\n1;2\n", [(3, ["k", "x"]), (4, ["1", "2"])]),
        ("k, batch, a;b;c;d;e\n", [(1, ["k", " batch", " a;b;c;d;e"])]),
        ("k\n1\n", [(1, ["k"]), (2, ["1"])]), ("", []), ("# nothing\n", []),
    ],
)  # fmt: skip
def test_what_stands_before_the_names(text: str, rows: list[tuple[int, list[str]]]) -> None:
    assert list(csv_rows(text, "x")) == rows


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("sep=;\nk;b\n1;2\n", 3),
        ('"sep=\t"\nk\tb\n1\t2\n', 3),
        ("sep=\t\nk\tb\n1\t2\n", 3),
        ("SEP=^;;\nk^b\n1^2\n", 3),
        ("# by hand; on Monday; twice\nk,b\n1,2\n", 3),
        ('"# a, b"\n\n#\nk;b\n\n1;2\n', 6),
        (";;;\nk;b\n1;2\n", 3),
        ('k,b,"a;b;c;d"\n1,2,\n', 2),
        ("k, b, a;b;c;d;e\n1,2,\n", 2),
        ("k;b;c;note (device, driver, date)\n1;2;7,07;x\n", 2),
        ("k;b;c [-]\n1;2;3\n", 2),
        ("k;b;c\n1;2;7,07\n", 2),
    ],
)
def test_what_spreadsheets_and_people_write_above_a_header(text: str, line: int) -> None:
    ((where, row),) = csv_records(text, "x", ["k", "b"])
    assert (where, row["k"], row["b"]) == (f"x:{line}", "1", "2")


def test_lines_are_counted_from_the_top_of_the_file() -> None:
    with pytest.raises(sm.DomainError, match="x: line 4: a cell of more than 131,072 characters"):
        list(csv_rows("sep=;\n# note\na;b\n" + "9" * 140_000, "x"))
    assert list(csv_rows("# only\n", "x")) == []
    assert list(csv_rows("a,b\n# 1,2\n", "x")) == [(1, ["a", "b"]), (2, ["# 1", "2"])]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2,3\n", "x:2: more cells than columns"),
        ("a,a\n1,2\n", "x: column 'a' occurs twice"),
        ("b\n1\n", "x: no column a"),
        ("a\n" + "9" * 140_000 + "\n", "x: line 2: a cell of more than 131,072 characters"),
    ],
)
def test_tables_that_are_not_whole(text: str, message: str) -> None:
    with pytest.raises(sm.DomainError, match=message):
        list(csv_records(text, "x", ["a"]))


def test_json_is_read_strictly() -> None:
    assert parse_json('{"a": Infinity}', "x") == {"a": float("inf")}  # model descriptions have it
    for text, why in (
        ("{", "not valid JSON"),
        ('{"a": 1, "a": 2}', "key 'a' occurs twice"),
        ("[" * 100_000, "nested too deeply"),
        ("9" * 5000, "not valid JSON"),
    ):
        with pytest.raises(sm.DomainError, match=why):
            parse_json(text, "x")


# -- out -----------------------------------------------------------------------------------------


def test_only_what_may_be_replaced_is(tmp_path: Path) -> None:
    there = tmp_path / "there.yaml"
    there.write_text("keep")
    folder, link = tmp_path / "folder.yaml", tmp_path / "link.yaml"
    folder.mkdir()
    link.symlink_to(there)
    with pytest.raises(sm.DomainError, match=r"there.yaml: exists: .* or --overwrite it"):
        check_output(there, endings=(".yaml",))
    assert check_output(there, endings=(".yaml",), overwrite=True) == there
    for path in (folder, link):
        with pytest.raises(sm.DomainError, match=f"{path.name}: is no regular file"):
            check_output(path, endings=(".yaml",), overwrite=True)
    with pytest.raises(sm.DomainError, match="no such folder"):
        check_output(tmp_path / "none" / "x.yaml", endings=(".yaml",))
    with pytest.raises(sm.DomainError, match=r"must end in \.yaml; got 'x\.txt'"):
        check_output("x.txt", endings=(".yaml",))


@pytest.mark.parametrize(
    ("name", "content", "right"),
    [
        ("a.png", b"\x89PNG\r\n", True), ("a.png", b"text", False), ("a.png", b"", True),
        ("a.pdf", b"%PDF-1.4", True), ("a.pdf", b"\x89PNG", False),
        ("a.svg", b"<?xml ?>\n<svg", True),
        ("a.svg", b"keep", False), ("a.svg", b"<?xml ?><mydata/>", False),
        ("a.svg", b"<!DOCTYPE html>", False),
    ],
)  # fmt: skip
def test_a_figure_replaces_its_own_format(
    name: str, content: bytes, right: bool, tmp_path: Path
) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    if right:
        assert check_output(file, endings=(file.suffix,), own_format=True) == file
        return
    with pytest.raises(sm.DomainError, match=f"holds no {file.suffix}"):
        check_output(file, endings=(file.suffix,), own_format=True)


def test_a_report_replaces_a_report(tmp_path: Path) -> None:
    file = tmp_path / "notes.md"
    file.write_text("# my own notes")
    with pytest.raises(sm.DomainError, match=r"notes.md: holds no report of this command"):
        check_output(file, endings=(".md",), own_start="# Accuracy")
    file.write_text("# Accuracy of")
    assert check_output(file, endings=(".md",), own_start="# Accuracy") == file


def test_a_file_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "x.txt"
    write_text(file, "one")

    def stopped() -> None:
        with written_beside(file) as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert file.read_text() == "one"
    assert [each.name for each in tmp_path.iterdir()] == ["x.txt"]


def test_a_profile_is_not_replaced_unasked(tmp_path: Path) -> None:
    file = tmp_path / "h100.yaml"
    write_device(sm.load_device("h100"), file)
    before = file.read_text()
    with pytest.raises(sm.DomainError, match="exists"):
        write_device(sm.load_device("a100"), file)
    assert file.read_text() == before
    write_device(sm.load_device("a100"), file, overwrite=True)
    assert sm.load_device(file).name.startswith("a100")


# -- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quantity", "value", "hint"),
    [
        ("memory_bandwidth", 3.35, "TB/s: write 3.35e+12"),
        ("memory_bandwidth", 3350, "GB/s: write 3.35e+12"),
        ("peak_flops", 989.4, "TFLOP/s: write 9.894e+14"),
        ("peak_flops", 66.9, "TFLOP/s: write 6.69e+13"),
        ("peak_flops", 1.979, "PFLOP/s: write 1.979e+15"),
        ("memory_capacity", 80, "GB: write 8e+10"),
        ("memory_capacity", 81559, "MB: write 8.1559e+10"),
        ("l2_cache", 50, "MB: write 5e+07"),
        ("board_power", 700_000, "mW: write 700"),
        ("memory_bandwidth", 1e30, None),
    ],
)
def test_the_unit_that_a_value_seems_to_be_in(
    quantity: str, value: float, hint: str | None
) -> None:
    with pytest.raises(sm.ProfileError, match="is outside what any device has") as caught:
        check_plausible(quantity, value, "x.yaml", fault=sm.ProfileError)
    if hint is None:
        assert "seems to be" not in str(caught.value)
    else:
        assert f"; it seems to be in {hint}" in str(caught.value)


@pytest.mark.parametrize(
    ("quantity", "units"),
    [
        ("peak_flops", {"TFLOP/s": 1e12, "GFLOP/s": 1e9}), ("l2_cache", {"MB": 1e6}),
        ("memory_bandwidth", {"TB/s": 1e12, "GB/s": 1e9}), ("memory_capacity", {"GB": 1e9}),
        ("interconnect_bandwidth", {"GB/s": 1e9}),
    ],
)  # fmt: skip
def test_every_value_that_ships_is_recognised_in_other_units(
    quantity: str, units: dict[str, float]
) -> None:
    first = total = 0
    for device in map(sm.load_device, sm.device_names()):
        value = getattr(device, quantity)
        for number in value.values() if isinstance(value, dict) else [value] if value else []:
            for unit, factor in units.items():
                with pytest.raises(sm.ProfileError) as caught:
                    check_plausible(quantity, number / factor, "x", fault=sm.ProfileError)
                assert f"in {unit}: write {number:.6g}" in str(caught.value)
                first += f"seems to be in {unit}:" in str(caught.value)
                total += 1
    assert first >= 0.9 * total


@pytest.mark.parametrize(("flops", "bandwidth"), [(1.979e12, 3.35e12), (1.979e15, 3.35e9)])
def test_rates_that_no_device_has_together(flops: float, bandwidth: float) -> None:
    with pytest.raises(sm.ProfileError, match="is one of them in another unit"):
        check_together(flops, bandwidth, "x", fault=sm.ProfileError)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("context", "4,096"), ("context", "8,192"), ("context", "131,072"), ("batch", "1,024"),
        ("context", "1k,16,384"), ("context", "1,048,576"), ("context", "12,288"),
        ("context", "5,120"), ("context", "20,480"),
    ],
)  # fmt: skip
def test_separators_of_thousands_are_named(name: str, text: str) -> None:
    with pytest.raises(sm.DomainError, match=r"reads as \d+ or as \d+ and \d+"):
        parse_counts(text, name=name, low=0)


@pytest.mark.parametrize(
    ("name", "text", "values"),
    [
        ("batch", "1,8,32,128", (1, 8, 32, 128)), ("batch", "16,384", (16, 384)),
        ("context", "8, 192", (8, 192)), ("context", "128,512", (128, 512)),
        ("context", "0,512", (0, 512)), ("context", "1k,512", (1024, 512)),
        ("context", "512,768,1024", (512, 768, 1024)),
    ],
)  # fmt: skip
def test_lists_that_are_lists(name: str, text: str, values: tuple[int, ...]) -> None:
    assert parse_counts(text, name=name, low=0) == values


def test_links_that_no_device_has() -> None:
    with pytest.raises(sm.DomainError, match="link: 5 s is outside"):
        parse_link("5e6,50", name="link")
    with pytest.raises(sm.DomainError, match="link: 5 B/s is outside"):
        parse_link("5,5e-9", name="link")

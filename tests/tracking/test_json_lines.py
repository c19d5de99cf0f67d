"""Lines with checksums, and a file that other programs write to as well."""

import json
import os

import pytest

from qerl.tracking.json_lines import JsonLines, damage_notice, decode, encode_line, is_intact

RECORD = {"step": 3, "reward": 0.25, "text": "it is \u00e9\n", "none": None, "answer": "12345678"}


def test_a_line_is_json_with_its_checksum_last():
    line = encode_line(RECORD)
    value = json.loads(line)
    assert list(value) == [*RECORD, "crc32"] and value.pop("crc32") in line[-12:].decode()
    assert value == RECORD == decode(line) and line.endswith(b"\n") and line.count(b"\n") == 1


def test_every_changed_bit_of_a_line_is_noticed():
    line = encode_line(RECORD)
    for i in range(len(line) - 1):
        for bit in range(8):
            changed = bytearray(line)
            changed[i] ^= 1 << bit
            assert decode(bytes(changed)) is None, changed
    assert all(decode(line[:end]) is None for end in range(len(line) - 1))


@pytest.mark.parametrize("record", [RECORD, {"step": 0}, {"wall_time": 1700000000.25}, {"crc": "0123abcd"}])
def test_a_line_without_a_checksum_is_damaged_and_one_with_another_end_is_not(record):
    for end in (b"", b"\n", b"\r\n"):
        line = json.dumps(record).encode() + end
        assert not is_intact(line) and decode(line) is None
        assert decode(encode_line(record)[:-1] + end) == record


def test_a_notice_names_the_first_lines():
    assert damage_notice("a.jsonl", [7]) == "a.jsonl: skipped 1 damaged line: 7"
    assert damage_notice("a.jsonl", range(1, 8)) == "a.jsonl: skipped 7 damaged lines: 1, 2, 3, 4, 5, ..."


@pytest.fixture
def file(tmp_path):
    file = JsonLines(tmp_path / "a.jsonl")
    file.append([{"step": 0}, {"step": 1}])
    yield file
    file.close()


def steps(folder, name="a.jsonl"):
    lines = (folder / name).read_bytes().splitlines()
    return [record and record["step"] for record in map(decode, lines)]


def test_a_file_that_is_left_alone_needs_no_mending(file, tmp_path):
    assert file.repair() is None
    file.cut(1)
    assert file.repair() is None
    (tmp_path / "a.jsonl").touch()  # only its time
    assert file.repair() is None and file.repair() is None


def test_a_file_saved_by_an_editor_is_put_back_beside_the_editors(file, tmp_path):
    for content in ("mine", "mine too"):
        (tmp_path / "new").write_text(content)
        os.replace(tmp_path / "new", tmp_path / "a.jsonl")
        file.append([{"step": 2}])  # to the file that was replaced
        aside = "a.jsonl.other" if content == "mine" else "a.jsonl.other2"
        assert file.repair() == (
            "another program replaced a.jsonl while the run wrote it: it is in place again,"
            f" and the other file is {aside}"
        )
        assert (tmp_path / aside).read_text() == content and file.repair() is None
    file.append([{"step": 3}])
    assert steps(tmp_path) == [0, 1, 2, 2, 3]


def test_a_file_saved_as_it_was_is_told_without_another_file(file, tmp_path):
    (tmp_path / "new").write_bytes((tmp_path / "a.jsonl").read_bytes())
    os.replace(tmp_path / "new", tmp_path / "a.jsonl")
    assert (file.repair() or "").endswith("it is in place again")
    file.append([{"step": 2}])
    assert steps(tmp_path) == [0, 1, 2] and os.listdir(tmp_path) == ["a.jsonl"]


def test_a_file_that_is_removed_is_put_back(file, tmp_path):
    (tmp_path / "a.jsonl").unlink()
    assert "another program removed a.jsonl" in (file.repair() or "")
    file.append([{"step": 2}])
    assert steps(tmp_path) == [0, 1, 2]


def test_a_file_changed_in_place_is_told_and_written_on(file, tmp_path):
    content = (tmp_path / "a.jsonl").read_bytes()
    (tmp_path / "a.jsonl").write_bytes(content[:34].replace(b"0", b"7") + b"half a line")
    num_bytes = 34 + len("half a line")
    assert file.repair() == (
        f"another program changed a.jsonl while the run wrote it: it has {num_bytes} bytes, the run wrote"
        f" {len(content)}; a.jsonl: skipped 2 damaged lines: 1, 2"
    )
    file.append([{"step": 2}])
    assert steps(tmp_path) == [None, None, 2] and file.repair() is None


def test_a_bit_changed_in_place_is_told(file, tmp_path):
    content = (tmp_path / "a.jsonl").read_bytes()
    with open(tmp_path / "a.jsonl", "r+b") as other:
        other.write(content.replace(b"0", b"7", 1))
    os.utime(tmp_path / "a.jsonl", ns=(0, 0))  # a clock that is too coarse shows no change
    assert "skipped 1 damaged line: 1" in (file.repair() or "")

"""How much memory a Parquet file takes when it is read, told by its footer before anything else of it is read.

A page stores equal values once, so that few bytes can be billions of values, or one long text a million times. The footer is parsed
here, as Thrift's compact protocol has it, because pyarrow ends the process where the footer of a damaged file lacks what it looks up.
"""

import os
from typing import Any, BinaryIO

from moe_routing_kernels.guarded import MOST_COLUMNS, Refused, check_amount

_MOST_FOOTER = 2**25  # bytes
_MOST_DEPTH = 16
_MAGIC = b"PAR1"
_TEXT = 6  # of Parquet's types; those below have a width, in bits
_WIDTHS = (8, 32, 64, 96, 32, 64)
# Numbers of fields in parquet.thrift
_SCHEMA, _GROUPS = 2, 4
_CHILDREN, _LENGTH = 5, 2
_COLUMNS, _GROUP_BYTES = 1, 2
_CHUNK, _TYPE, _PATH, _VALUES, _BYTES = 3, 1, 3, 5, 6


def check(file: BinaryIO, most: int) -> tuple[list[str], int]:
    """The columns of long texts that may be repeated, and the number of all values. Raises `Refused`, for a damaged footer too, and for
    a file that takes more than `most` bytes when it is read.

    How much repeated texts take, only their dictionaries tell: each may be as long as all of them together.
    """
    try:
        return _check(_footer(file), most)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise Refused("its footer is damaged") from error


def _check(about: Any, most: int) -> tuple[list[str], int]:
    leaves = [element for element in about[_SCHEMA] if not element.get(_CHILDREN)]
    check_amount(len(leaves), MOST_COLUMNS, "columns")
    check_amount(sum(group[_GROUP_BYTES] for group in about[_GROUPS]), most, "bytes when unpacked")
    values, size = 0, 0
    bounds: dict[str, int] = {}
    for group in about[_GROUPS]:
        for leaf, column in zip(leaves, group[_COLUMNS], strict=True):
            chunk = column[_CHUNK]
            count, kind = chunk[_VALUES], chunk[_TYPE]
            values += count
            if kind < _TEXT:
                size += count * _WIDTHS[kind] // 8
            elif length := leaf.get(_LENGTH):
                size += count * length
            else:
                size += count * 4
                path = b".".join(chunk[_PATH]).decode(errors="replace")
                bounds[path] = bounds.get(path, 0) + count * chunk[_BYTES]
    check_amount(size, most, "bytes of values")
    return [path for path, bound in bounds.items() if bound > most // 8], values


def _footer(file: BinaryIO) -> Any:
    """The fields of the footer by their numbers."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 8))
    end = file.read(8)
    length = int.from_bytes(end[:4], "little")
    if end[4:] != _MAGIC or length > size - 8:
        raise Refused(f"its {size} bytes are no Parquet file, or a part of one")
    check_amount(length, _MOST_FOOTER, "bytes of footer")
    file.seek(size - 8 - length)
    data = file.read(length)
    file.seek(0)
    return _struct(data, 0, 0)[0]


def _struct(data: bytes, at: int, depth: int) -> tuple[dict[int, Any], int]:
    """The fields of a structure by number, and where it ends."""
    if depth > _MOST_DEPTH:
        raise ValueError("too many structures in each other")
    fields: dict[int, Any] = {}
    number = 0
    while kind := data[at]:
        at += 1
        if step := kind >> 4:
            number += step
        else:
            number, at = _integer(data, at)
        fields[number], at = _value(data, at, kind & 15, depth)
    return fields, at + 1


def _value(data: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    """A value, and where it ends; doubles and maps, which are not looked at, as None."""
    match kind:
        case 1 | 2:
            return kind == 1, at
        case 3:
            return None, at + 1
        case 4 | 5 | 6:
            return _integer(data, at)
        case 7:
            return None, at + 8
        case 8:
            size, at = _unsigned(data, at)
            if size > len(data) - at:
                raise ValueError("a text that goes beyond the end")
            return data[at : at + size], at + size
        case 9 | 10:
            count, inner, at = data[at] >> 4, data[at] & 15, at + 1
            if count == 15:
                count, at = _unsigned(data, at)
            if count > len(data) - at:
                raise ValueError("a list that goes beyond the end")
            entries = []
            for _ in range(count):
                entry, at = _value(data, at + (inner in (1, 2)), inner, depth)
                entries.append(entry)
            return entries, at
        case 12:
            return _struct(data, at, depth + 1)
    raise ValueError(f"type {kind}")


def _integer(data: bytes, at: int) -> tuple[int, int]:
    number, at = _unsigned(data, at)
    return (number >> 1) ^ -(number & 1), at


def _unsigned(data: bytes, at: int) -> tuple[int, int]:
    """An integer in groups of seven bits, the lowest first."""
    number = shift = 0
    while True:
        byte = data[at]
        number, shift, at = number | (byte & 0x7F) << shift, shift + 7, at + 1
        if byte < 0x80:
            return number, at
        if shift > 63:
            raise ValueError("a number of more than 64 bits")

"""Codes to numbers, two at a time in the registers of the tensor cores' left operand (sm_90).

An integer's bits become the lowest of the mantissa of a 16-bit float whose exponent makes a step of the code 1: the number is then
2 ** n + code, and a subtraction, which is exact, leaves code - zero point. Where the mantissa has room for several codes, one
shift serves them all, with an exponent for each. 8 bits are more than bf16's mantissa has: its lowest 7 give 128 + low, from which 128 is
subtracted where the 8th is set, else 256. The bits of an 8-bit float become those of a 16-bit one whose number is smaller by a power of two,
which its scale has in it. Those of e5m2 are fp16 as they stand, up to 57344, so that scales of usual weights are subnormal in fp16: they
are multiplied by 2 ** -8, which is exact. A 4-bit float's bits are stored where few shifts bring them to the places that a 16-bit float has for
them (`FLOAT4_BITS`); its subnormal number becomes one. Then the scale is multiplied: the one rounding, that of dequantised weights in the activations'
format.

Instructions per 16 of K, of a thread, for its four registers (no scale is counted; a warp issues one per cycle, of logic one per two):

| codes | with bf16: logic, arithmetic | with fp16 |
| --- | --- | --- |
| 2 bits | 5, 8 | 4.5, 8 |
| 4 bits | 7, 8 | 5, 8 |
| 8 bits | 10, 8 (12 with zero points) | 6, 8 |
| e4m3, e5m2 | 12, 4 | 12, 4 and 5, 8 |
| e2m1 | 11, 4 | 10, 4 |

Functions work on whatever numbers they are given: the tests run them on arrays.
"""

import struct
from typing import Any

import cutlass.cute as cute
from cutlass import Uint32

from moe_routing_kernels.gemm.sm90.quantised_layout import FLOAT4_BITS, Codes

_MANTISSA = {"bf16": 7, "fp16": 10}  # bits
_BIAS = {"bf16": 127, "fp16": 15}
_NARROWER = {("e4m3", "bf16"): 4, ("e5m2", "bf16"): 3, ("e4m3", "fp16"): 1, ("e5m2", "fp16"): 0}  # exponent bits
_PTX = {"bf16": "bf16x2", "fp16": "f16x2"}


def arithmetic(operation: str, a: Any, b: Any, dtype: str) -> Any:
    """`add`, `sub` or `mul` of both halves, rounded to nearest, subnormal numbers kept."""
    code = f"{operation}.rn.{_PTX[dtype]} {{$w0}}, {{$r0}}, {{$r1}};"
    return cute.arch.inline_ptx(code, write_only_types=[Uint32], read_only_args=[a, b])


def both(word: Any, half: int) -> Any:
    """A half of a word, the lower (0) or the upper (1), in both halves."""
    code = f"prmt.b32 {{$w0}}, {{$r0}}, {{$r0}}, {0x3232 if half else 0x1010};"
    return cute.arch.inline_ptx(code, write_only_types=[Uint32], read_only_args=[word])


def twice(pattern: int) -> Any:
    """16 bits in both halves."""
    return Uint32(pattern << 16 | pattern)


def constant(number: float, dtype: str) -> Any:
    """A number that the format holds exactly, in both halves of a register: `arithmetic` takes no immediate values."""
    code = f"mov.b32 {{$w0}}, {pattern_of(number, dtype) * 0x10001};"
    return cute.arch.inline_ptx(code, write_only_types=[Uint32])


def pattern_of(number: float, dtype: str) -> int:
    """The 16 bits of a number that the format holds exactly."""
    if dtype == "fp16":
        return struct.unpack("<H", struct.pack("<e", number))[0]
    return struct.unpack("<I", struct.pack("<f", number))[0] >> 16


def window(field: int, codes: Codes) -> tuple[int, int]:
    """How far a word is shifted right for the codes of a register, and at which bit they are then."""
    together = _MANTISSA[codes.dtype] // codes.bits
    place = field % together
    return (field - place) * codes.bits, place * codes.bits


def places(codes: Codes) -> list[int]:
    """Bits of a word's half at which codes begin once they are shifted."""
    return sorted({window(field, codes)[1] for field in range(codes.fields)})


def base_of(place: int, codes: Codes) -> int:
    """The number to which codes at a bit of the mantissa are added."""
    return 2 ** (_MANTISSA[codes.dtype] - place)


def halved(codes: Codes) -> bool:
    """Whether codes are more than the mantissa holds."""
    return codes.kind == "int" and codes.bits > _MANTISSA[codes.dtype]


def subtracts(codes: Codes) -> bool:
    """Whether a number must be subtracted from the decoded codes of a word."""
    return codes.kind == "int" and (codes.zeros or not halved(codes))


def subtrahends(zero: Any, codes: Codes) -> dict[int, Any]:
    """The numbers subtracted from codes, per bit where they begin; `zero` is a zero point in both halves, or None for the common one."""
    if codes.kind != "int" or halved(codes):
        return {0: zero}
    if zero is None:
        return {at: constant(base_of(at, codes) + 2 ** (codes.bits - 1), codes.dtype) for at in places(codes)}
    return {at: arithmetic("add", zero, constant(base_of(at, codes), codes.dtype), codes.dtype) for at in places(codes)}


def masks(zero: Any, codes: Codes) -> dict[int, Any]:
    """The masks that keep a code of each half of a word, per bit where it begins; `zero` is a word of 0, which only the device knows.

    An instruction takes one number as it stands, and the base that a code is added to is one: the mask is a register, which ptxas (13.0),
    where it knows the mask, would rather make anew for each word than keep.
    """
    if codes.kind != "int" or halved(codes):
        return {}
    return {at: twice((2**codes.bits - 1) << at) | zero for at in places(codes)}


def number(word: Any, field: int, mask: dict[int, Any], codes: Codes) -> Any:
    """Two numbers of a word, by the `masks` of codes, before their `subtrahends` and their scale."""
    if codes.kind == "e2m1":
        return _float4(word, field, codes)
    if codes.kind != "int":
        return _float8(word, field, codes)
    if halved(codes):
        return _byte(word >> 8 if field else word, codes)
    shift, place = window(field, codes)
    base = twice(pattern_of(base_of(place, codes), codes.dtype))
    return (word >> shift if shift else word) & mask[place] | base


def subtrahend_of(field: int, subtrahend: dict[int, Any], codes: Codes) -> Any:
    """Which of the `subtrahends` is that of a register of a word."""
    return subtrahend[0 if halved(codes) else window(field, codes)[1]]


def register(word: Any, field: int, scale: Any, subtrahend: dict[int, Any], mask: dict[int, Any], codes: Codes) -> Any:
    """Two dequantised numbers: the codes of a register in a word, by their `masks`, less their `subtrahends`, times their scale."""
    value = number(word, field, mask, codes)
    if subtracts(codes):
        value = arithmetic("sub", value, subtrahend_of(field, subtrahend, codes), codes.dtype)
    return arithmetic("mul", value, scale, codes.dtype)


def _byte(word: Any, codes: Codes) -> Any:
    """The lower bytes of both halves, less 128, in bf16."""
    base, top = twice(pattern_of(128.0, "bf16")), twice(0x80)
    return arithmetic("sub", word & twice(0x7F) | base, (word ^ top) & top | base, codes.dtype)


def _float4(word: Any, field: int, codes: Codes) -> Any:
    """The 4-bit floats of a register as the bits of 16-bit ones."""
    mantissa, by_shift = _MANTISSA[codes.dtype], {}
    for start, place in zip(FLOAT4_BITS[codes.dtype][field], (mantissa - 1, mantissa, mantissa + 1, 15), strict=True):
        by_shift[place - start] = by_shift.get(place - start, 0) | 1 << place
    number = None
    for shift, mask in by_shift.items():
        moved = word << shift if shift > 0 else word >> -shift if shift else word
        number = moved & twice(mask) if number is None else number | moved & twice(mask)
    return number


def _float8(word: Any, field: int, codes: Codes) -> Any:
    """The lower or upper bytes of both halves as the bits of a 16-bit float."""
    shift = _NARROWER[codes.kind, codes.dtype]
    upper = word if field else word << 8
    if shift == 0:
        return arithmetic("mul", upper & twice(0xFF00), constant(2.0**-8, codes.dtype), codes.dtype)
    size = word >> shift if field else word << (8 - shift)
    return size & twice(0x7F00 >> shift) | upper & twice(0x8000)

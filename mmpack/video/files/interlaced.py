"""May an H.264 stream hold fields? Versions of swscale convert them differently, and each library brings its own.

The flag is in the sequence parameter set (ITU-T H.264, 7.3.2.1.1): 0 says that pictures may be fields.
"""

from __future__ import annotations

_WITH_CHROMA = (100, 110, 122, 244, 44, 83, 86, 118, 128, 138, 139, 134, 135)  # profiles
_SPS = 7  # type of the unit


def may_be_interlaced(extradata: bytes | None) -> bool:
    """By the first parameter set in `extradata` (avcC, or units behind start codes); True where none can be read."""
    unit = _parameter_set(extradata or b"")
    if unit is None:
        return True
    try:
        return not _frames_only(_Bits(unit[1:].replace(b"\0\0\3", b"\0\0")))
    except IndexError:
        return True


def _parameter_set(extradata: bytes) -> bytes | None:
    if extradata[:1] == b"\1":
        size = int.from_bytes(extradata[6:8])
        return extradata[8 : 8 + size] or None
    units = extradata.split(b"\0\0\1")[1:]
    return next((unit for unit in units if unit and unit[0] & 31 == _SPS), None)


class _Bits:
    """Bits of a unit, and its Exp-Golomb numbers. Raises: IndexError behind the end."""

    def __init__(self, data: bytes):
        self.data, self.at = data, 0

    def read(self, count: int) -> int:
        value = 0
        for at in range(self.at, self.at + count):
            value = value << 1 | (self.data[at >> 3] >> (7 - (at & 7)) & 1)
        self.at += count
        return value

    def number(self) -> int:
        zeros = 0
        while not self.read(1):
            zeros += 1
        return (1 << zeros) - 1 + self.read(zeros)

    def signed(self) -> int:
        value = self.number()
        return (value + 1) // 2 if value % 2 else -value // 2


def _frames_only(bits: _Bits) -> bool:
    """`frame_mbs_only_flag`."""
    profile = bits.read(8)
    bits.read(16)
    bits.number()
    if profile in _WITH_CHROMA:
        chroma = bits.number()
        bits.read(chroma == 3)
        bits.number(), bits.number()
        bits.read(1)
        if bits.read(1):
            for k in range(12 if chroma == 3 else 8):
                if bits.read(1):
                    _skip_scaling(bits, 16 if k < 6 else 64)
    bits.number()
    order = bits.number()
    if order == 0:
        bits.number()
    elif order == 1:
        bits.read(1)
        bits.signed(), bits.signed()
        for _ in range(bits.number()):
            bits.signed()
    bits.number()
    bits.read(1)
    bits.number(), bits.number()
    return bool(bits.read(1))


def _skip_scaling(bits: _Bits, count: int) -> None:
    last = upcoming = 8
    for _ in range(count):
        if upcoming:
            upcoming = (last + bits.signed()) % 256
        last = upcoming or last

"""Compresses an overlay that Sandtree wrote: qcow2 version 3, clusters of 64 KiB, none of them compressed.

    header | L1 table | L2 tables | compressed clusters, one after the other | refcount blocks | refcount table

A zero cluster stays one: it hides the layer below. A cluster that does not get smaller is stored as it is.
"""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import BinaryIO

_HEADER = struct.Struct(">4sIQIIQIIQQIIQQQQII")
_MAGIC = b"QFI\xfb"
_BITS = 16
_CLUSTER = 1 << _BITS
_ENTRIES = _CLUSTER // 8
_COUNTS = _CLUSTER // 2
_COPIED = 1 << 63
_COMPRESSED = 1 << 62
_OFFSET = (1 << 56) - (1 << 9)
_SECTOR = 512


def compress(source: Path, target: Path) -> None:
    """Writes a compressed copy of an overlay."""
    with open(source, "rb") as overlay, open(target, "xb") as file:
        _Copy(overlay, file).run()


class _Copy:
    def __init__(self, overlay: BinaryIO, file: BinaryIO) -> None:
        self._overlay = overlay
        self._file = file
        fields = _HEADER.unpack(overlay.read(_HEADER.size))
        magic, version, _, backing, bits, size, _, l1_entries, l1_offset = fields[:9]
        if (magic, version, backing, bits) != (_MAGIC, 3, 0, _BITS):
            raise ValueError("the overlay has another form than Sandtree's")
        self._size = size
        self._l1 = self._table(l1_offset, l1_entries)
        self._l1_at = _CLUSTER
        self._at = _CLUSTER + _whole(8 * len(self._l1))
        self._used: dict[int, int] = {}

    def run(self) -> None:
        self._count(0, self._at)
        tables = [index for index, entry in enumerate(self._l1) if entry & _OFFSET]
        places = {index: self._at + number * _CLUSTER for number, index in enumerate(tables)}
        self._at += len(tables) * _CLUSTER
        for index, place in places.items():
            self._count(place, _CLUSTER)
            entries = [self._entry(entry) for entry in self._table(self._l1[index] & _OFFSET, _ENTRIES)]
            self._write(place, struct.pack(f">{_ENTRIES}Q", *entries))
        l1 = [places[index] | _COPIED if index in places else 0 for index in range(len(self._l1))]
        self._write(self._l1_at, struct.pack(f">{len(l1)}Q", *l1))
        self._finish()

    def _table(self, offset: int, entries: int) -> list[int]:
        return list(struct.unpack(f">{entries}Q", self._read(offset, 8 * entries)))

    def _read(self, offset: int, count: int) -> bytes:
        self._overlay.seek(offset)
        return self._overlay.read(count).ljust(count, b"\0")

    def _write(self, offset: int, data: bytes) -> None:
        self._file.seek(offset)
        self._file.write(data)

    def _count(self, offset: int, length: int) -> None:
        """Counts a use of each cluster that these bytes touch."""
        for cluster in range(offset // _CLUSTER, (offset + length - 1) // _CLUSTER + 1):
            self._used[cluster] = self._used.get(cluster, 0) + 1

    def _entry(self, entry: int) -> int:
        if entry & 1 or not entry & _OFFSET:
            return entry & 1
        data = self._read(entry & _OFFSET, _CLUSTER)
        # QEMU unpacks with a window of 4 KiB.
        packer = zlib.compressobj(6, zlib.DEFLATED, -12)
        packed = packer.compress(data) + packer.flush()
        if len(packed) >= _CLUSTER:
            self._at = _whole(self._at)
            return self._place(data) | _COPIED
        at = self._place(packed)
        more = (at + len(packed) - 1) // _SECTOR - at // _SECTOR
        return _COMPRESSED | more << (62 - (_BITS - 8)) | at

    def _place(self, data: bytes) -> int:
        at = self._at
        self._write(at, data)
        self._count(at, len(data))
        self._at += len(data)
        return at

    def _finish(self) -> None:
        """Writes the counts, which count their own clusters, and the header."""
        start = _whole(self._at)
        blocks = 1
        while blocks * _COUNTS < start // _CLUSTER + blocks + _whole(8 * blocks) // _CLUSTER:
            blocks += 1
        table = start + blocks * _CLUSTER
        table_bytes = _whole(8 * blocks)
        self._count(start, blocks * _CLUSTER + table_bytes)
        for number in range(blocks):
            first = number * _COUNTS
            counts = [self._used.get(cluster, 0) for cluster in range(first, first + _COUNTS)]
            self._write(start + number * _CLUSTER, struct.pack(f">{_COUNTS}H", *counts))
        entries = [start + number * _CLUSTER for number in range(blocks)]
        self._write(table, struct.pack(f">{blocks}Q", *entries))
        self._file.truncate(table + table_bytes)
        self._write(0, self._header(table, table_bytes // _CLUSTER))

    def _header(self, table: int, clusters: int) -> bytes:
        return _HEADER.pack(
            _MAGIC, 3, 0, 0, _BITS, self._size, 0, len(self._l1), self._l1_at,
            table, clusters, 0, 0, 0, 0, 0, 4, _HEADER.size,
        )  # fmt: skip


def _whole(count: int) -> int:
    """The next multiple of a cluster."""
    return -(-count // _CLUSTER) * _CLUSTER

"""`crc32` of the chunks of a checkpoint: ISA-L's where it is installed (`pip install nanotrain[isal]`), else zlib's.

Both give the same number and release the GIL. Measured on one core: ISA-L 27 GB/s, zlib 4.4 GB/s, reading a cached
file 12 GB/s (2026-11-22).
"""

try:
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

__all__ = ["crc32"]

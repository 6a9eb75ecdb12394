"""Settings of the C library's memory allocator."""

from __future__ import annotations

import ctypes

_LIBC = ctypes.CDLL(None)
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Names of glibc's settings."""
MAX_FREE = 1 << 30
"""Bytes of freed memory that a process may keep."""
MAX_HEAP_BLOCK = 32 << 20
"""Larger blocks are returned to the system when freed; glibc allows no more."""


def keep_freed_memory() -> None:
    """Lets this process reuse freed memory.

    By default, glibc returns the activations of a net to the system after every batch. To get new pages for the next
    batch then takes up to a quarter of the time.
    """
    if hasattr(_LIBC, "mallopt"):
        _LIBC.mallopt(_TRIM_THRESHOLD, MAX_FREE)
        _LIBC.mallopt(_MMAP_THRESHOLD, MAX_HEAP_BLOCK)


def return_freed_memory() -> None:
    """Returns all freed memory to the system."""
    if hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)

"""All threads of a daemon share one pool of memory, where the C library has such a setting, and give it back."""

from __future__ import annotations

import subprocess
import sys

import pytest

TOLD = """
import ctypes, threading
from spotd.service import memory
memory.share_one_pool()
libc = ctypes.CDLL(None)
libc.malloc_info.argtypes = [ctypes.c_int, ctypes.c_void_p]
libc.fdopen.restype = ctypes.c_void_p
together = threading.Barrier(6)
def take():
    together.wait()
    for _ in range(200):
        bytearray(3000)
threads = [threading.Thread(target=take) for _ in range(6)]
for thread in threads: thread.start()
for thread in threads: thread.join()
out = ctypes.c_void_p(libc.fdopen(1, b"w"))
libc.malloc_info(0, out)
libc.fflush(out)
"""


@pytest.mark.process
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="malloc_info is glibc's")
def test_threads_that_allocate_at_once_share_one_pool() -> None:
    done = subprocess.run([sys.executable, "-c", TOLD], capture_output=True, text=True, timeout=60, check=False)
    if "malloc_info" in done.stderr:
        pytest.skip("the C library is not glibc")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("<heap nr=") == 1


FREED = """
from spotd.service import memory
def resident():
    return int(open("/proc/self/statm").read().split()[1])
memory.share_one_pool()
taken = [bytes(65536) + b"x" for _ in range(1024)]
kept = taken[::64]
full = resident()
del taken
freed = resident()
memory.give_back()
print(full - freed, full - resident())
"""


@pytest.mark.process
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="malloc_trim is glibc's")
def test_what_is_free_between_blocks_that_stay_is_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, timeout=60, check=True)
    kept_for_nothing, given_back = (int(word) for word in done.stdout.split())
    if given_back == kept_for_nothing:
        pytest.skip("the C library is not glibc")
    pages = 1024 * 65536 // 4096
    assert kept_for_nothing < pages / 4, "free pages went back by themselves, so this shows nothing"
    assert given_back > pages * 3 / 4


LARGE = """
import ctypes
from spotd.service import memory
class Figures(ctypes.Structure):
    _fields_ = [(n, ctypes.c_size_t) for n in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks".split()]
    _fields_ += [("fordblks", ctypes.c_size_t), ("keepcost", ctypes.c_size_t)]
figures = ctypes.CDLL(None).mallinfo2
figures.restype = Figures
memory.share_one_pool()
bytearray(16 * memory.LARGE_BYTES)  # freed: from here on glibc would take blocks as large from the pool
before = figures().hblks
blocks = [bytearray(2 * memory.LARGE_BYTES) for _ in range(10)]
print(figures().hblks - before)
"""


@pytest.mark.process
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mallinfo2 is glibc's")
def test_a_large_block_is_never_of_the_pool() -> None:
    done = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True, timeout=60, check=False)
    if "mallinfo2" in done.stderr:
        pytest.skip("the C library is not glibc, or older than 2.33")
    assert done.stdout.strip() == "10", done.stderr


def test_another_c_library_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from spotd.service import memory

    monkeypatch.setattr("ctypes.CDLL", object)
    memory.share_one_pool()
    memory.give_back()

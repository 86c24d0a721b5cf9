"""Tensors of which the ranks of a host have one copy, and each rank a view of its own.

    shared      mapped MAP_SHARED: all ranks see what is written here
    private     the same memory, mapped MAP_PRIVATE: shows the shared content until this rank writes
                to a page. Then the kernel gives this rank a copy of that page, which no other rank
                sees

The kernel tells which pages are copies (/proc/self/pagemap), no matter what wrote to them.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

_PAGE = 4096
_ENTRY = 8  # bytes of /proc/self/pagemap a page
_FILE = 1  # bit 61: the page belongs to a file, as shared memory does
_KINDS = 61  # bits 61 to 63; 62 and 63: the page is swapped out, or in memory


class OneCopy:
    """Memory that all ranks share, and this rank's private view. `lay(octets)` returns the tensors
    in such memory; each begins on a new page.
    """

    def __init__(
        self, shared: mmap.mmap, private: mmap.mmap, lay: Callable[[Tensor], list[Tensor]]
    ) -> None:
        self._mapped = private
        self._octets = torch.frombuffer(private, dtype=torch.uint8)
        self._shared_octets = torch.frombuffer(shared, dtype=torch.uint8)
        self.shared = lay(self._shared_octets)
        self.private = lay(self._octets)

    def differing(self) -> list[Tensor]:
        """Return where this rank's view differs from the shared content: the numbers of such pages,
        then all their bytes. Nobody may write to the shared memory meanwhile.
        """
        numbers = [torch.zeros(0, dtype=torch.int64)]
        contents = [self._octets[:0]]
        for pages in copied_pages(self._octets):
            octets = slice(pages.start * _PAGE, pages.stop * _PAGE)
            private = self._octets[octets].view(-1, _PAGE)
            shared = self._shared_octets[octets].view(-1, _PAGE)
            differs = (private != shared).any(1)
            numbers.append(differs.nonzero().flatten() + pages.start)
            contents.append(private[differs].flatten())
        return [torch.cat(numbers), torch.cat(contents)]

    def publish(self, elements: Sequence[range]) -> None:
        """Copy what this rank has written to these elements of each tensor to the shared memory.
        From then on its view shows the shared content. Nobody may read the shared memory meanwhile.
        """
        begin = self._octets.data_ptr()
        slices = []
        for tensor, part in zip(self.private, elements, strict=True):
            start = tensor.data_ptr() - begin
            width = tensor.element_size()
            slices.append(range(start + part.start * width, start + part.stop * width))
        for pages in copied_pages(self._octets):
            first = pages.start * _PAGE
            stop = pages.stop * _PAGE
            for written in slices:
                both = slice(max(first, written.start), min(stop, written.stop))
                if both.start < both.stop:
                    self._shared_octets[both].copy_(self._octets[both])
            self._mapped.madvise(mmap.MADV_DONTNEED, first, stop - first)


def copied_pages(octets: Tensor) -> Iterator[range]:
    """Yield the runs of pages of which this process has its own copies. `octets` is all of a
    private mapping.
    """
    # opened each time, because a child process has its own
    with open("/proc/self/pagemap", "rb", buffering=0) as file:
        length = octets.numel() // _PAGE * _ENTRY
        offset = octets.data_ptr() // _PAGE * _ENTRY
        entries = bytearray(os.pread(file.fileno(), length, offset))
    return runs_of_copies(torch.frombuffer(entries, dtype=torch.int64))


def runs_of_copies(entries: Tensor) -> Iterator[range]:
    """Yield the runs of `copied_pages`, from the kernel's entry of each page (its
    admin-guide/mm/pagemap.rst).
    """
    kinds = (entries >> _KINDS) & 7
    copies = ((kinds > 0) & (kinds & _FILE == 0)).nonzero().flatten()
    if not len(copies):
        return
    starts = (copies.diff() > 1).nonzero().flatten() + 1
    for run in copies.tensor_split(starts):
        yield range(int(run[0]), int(run[-1]) + 1)


def kernel_tells() -> bool:
    """Whether this process can see which pages are copies. A container may hide it."""
    handle = os.memfd_create("lockstep", os.MFD_CLOEXEC)
    try:
        os.ftruncate(handle, 3 * _PAGE)
        private = mmap.mmap(handle, 3 * _PAGE, flags=mmap.MAP_PRIVATE)
        memory = torch.frombuffer(private, dtype=torch.uint8)
        memory[0].item()
        memory[_PAGE] = 1
        return list(copied_pages(memory)) == [range(1, 2)]
    except OSError:
        return False
    finally:
        os.close(handle)

"""Writing all of what there is to write."""

from __future__ import annotations

import os
import threading

from lockstep.runtime.disk import write_all


def test_a_terminal_that_somebody_made_non_blocking_gets_everything() -> None:
    reading, writing = os.pipe2(os.O_NONBLOCK)
    data, arrived = os.urandom(10**6), bytearray()
    writer = threading.Thread(target=lambda: (write_all(writing, data), os.close(writing)))
    writer.start()
    os.set_blocking(reading, True)
    while piece := os.read(reading, 5000):
        arrived += piece
    writer.join()
    os.close(reading)
    assert bytes(arrived) == data

"""The process that holds the device: ``python -P -m fp8fs.quant.child``, started by fp8fs/quant/proxy.py.

It serves calls one at a time and ends by itself when it has had none for a while, so that the
engine gets the device's memory back, and as soon as the daemon is gone, because the daemon's end of
every lane then closes.
"""

from __future__ import annotations

import argparse
import selectors
import socket
import sys
from collections.abc import Callable, Sequence

import msgspec

from fp8fs.core.quantizer import Quantizer
from fp8fs.errors import DeviceError, NonFiniteTensorError
from fp8fs.quant.lane import Call, Lane, LaneClosedError, Reply

__all__ = ["EXIT_IDLE", "main", "serve"]

EXIT_IDLE = 0
"""Exit status of a process that had nothing to do, or whose daemon is gone; any other is a failure."""

_Method = Callable[[Quantizer, Call, list[memoryview]], float | None]

_METHODS: dict[str, _Method] = {
    "amax": lambda q, c, b: q.amax(b[0], c.dtype),
    "cast_tensor": lambda q, c, b: q.cast_tensor(b[0], c.dtype, c.scale, b[1]),
    "amax_rows": lambda q, c, b: q.amax_rows(b[0], c.dtype, c.rows, b[1]),
    "cast_rows": lambda q, c, b: q.cast_rows(b[0], c.dtype, c.rows, b[1], b[2], b[3]),
    "quantize_rows": lambda q, c, b: q.quantize_rows(b[0], c.dtype, c.rows, b[1], b[2]),
    "quantize_blocks": lambda q, c, b: q.quantize_blocks(
        b[0], c.dtype, c.rows, c.cols, b[1], b[2], pow2=c.pow2
    ),
    "warm": lambda q, c, b: q.warm((c.dtype,)),
}


def torch_quantizer(device: str) -> Quantizer:
    """The torch quantizer on *device*. Raises: DeviceError, also where torch cannot be imported."""
    try:
        from fp8fs.quant.cuda import TorchQuantizer
    except (ImportError, OSError) as err:
        raise DeviceError(f"torch cannot be imported: {err}", device=device) from err
    return TorchQuantizer(device)


def serve(lanes: Sequence[Lane], make: Callable[[], Quantizer], idle_s: float) -> None:
    """Answer calls until none came for *idle_s* seconds, or until a lane closes."""
    quantizer: Quantizer | None = None
    with selectors.DefaultSelector() as selector:
        for lane in lanes:
            selector.register(lane.connection, selectors.EVENT_READ, lane)
        while ready := selector.select(idle_s):
            for key, _ in ready:
                lane = key.data
                try:
                    call = msgspec.msgpack.decode(lane.receive(), type=Call)
                    try:
                        if quantizer is None:
                            quantizer = make()
                        shared = [view.data for view in lane.buffers(call.lengths)]
                        value = _METHODS[call.method](quantizer, call, shared)
                        reply = Reply(value=value or 0.0)
                    except NonFiniteTensorError as err:
                        index = err.facts["index"]
                        reply = Reply(error="nonfinite", what=err.what, index=int(index or 0))
                    except DeviceError as err:
                        reply = Reply(error="device", what=err.what)
                    lane.send(reply)
                except LaneClosedError:
                    return


def main(argv: Sequence[str], make: Callable[[str], Quantizer] = torch_quantizer) -> int:
    """Serve the lanes that *argv* names by their descriptors. Anything unexpected ends the process."""
    parser = argparse.ArgumentParser(prog="fp8fs.quant.child")
    parser.add_argument("--device", required=True)
    parser.add_argument("--idle", type=float, required=True, help="seconds")
    parser.add_argument("--lane", action="append", required=True, help="SOCKET:MEMORY")
    options = parser.parse_args(argv)
    pairs = [lane.split(":") for lane in options.lane]
    lanes = [Lane(socket.socket(fileno=int(words)), int(memory)) for words, memory in pairs]
    serve(lanes, lambda: make(options.device), options.idle)
    return EXIT_IDLE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

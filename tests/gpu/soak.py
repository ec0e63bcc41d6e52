"""Random allocation on many threads and streams, every block carrying a pattern that is verified on the device.

    strandline run --mode heap -- python tests/gpu/soak.py [--seconds 600] [--threads 8] [--streams 6]

Each thread makes blocks of log-uniform sizes on a random stream, writes a number of its own into them, reads
them back later on the same or (after record_stream) on another stream, and drops them without waiting. A block
that overlaps another, or is handed out before its last kernel is done, shows as a wrong number. Now and then a
thread empties the cache, or asks for more than there is and catches the error. Exit code 1: a wrong
pattern, or memory left over at the end. Must not know: which allocator it runs on.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import threading
import time

import torch

MIB = 1 << 20


class Worker(threading.Thread):
    def __init__(self, number, streams, args, until):
        super().__init__(name=f"soak-{number}")
        self.random = random.Random(args.seed * 1000 + number)
        self.number, self.streams, self.args, self.until = number, streams, args, until
        self.blocks, self.held = [], 0
        self.wrong = None
        self.made = self.crossed = self.refused = self.emptied = 0
        self.error = None

    def run(self):
        try:
            self.wrong = torch.zeros(1, dtype=torch.int64, device="cuda")
            torch.cuda.current_stream().synchronize()
            while time.monotonic() < self.until:
                self.turn()
            while self.blocks:
                self.drop(len(self.blocks) - 1)
            torch.cuda.synchronize()
        except BaseException as error:  # told by the main thread, which fails the run
            self.error = error

    def turn(self):
        limit = self.args.live_mib * MIB
        while self.blocks and (self.held > limit or self.random.random() < 0.45):
            self.drop(self.random.randrange(len(self.blocks)))
        chance = self.random.random()
        if chance < 0.0005:
            torch.cuda.empty_cache()
            self.emptied += 1
        elif chance < 0.001:
            try:
                torch.empty(1 << 42, dtype=torch.uint8, device="cuda")
            except torch.OutOfMemoryError:
                self.refused += 1
        else:
            try:
                self.make()
            except torch.OutOfMemoryError:
                # Others have the card. Half of what this thread keeps makes room.
                self.refused += 1
                for _ in range(len(self.blocks) // 2 + 1):
                    if self.blocks:
                        self.drop(len(self.blocks) - 1)

    def make(self):
        size = int(math.exp(self.random.uniform(math.log(64), math.log(self.args.largest_mib * MIB / 8))))
        value = (self.number << 40) | self.made
        stream = self.random.choice(self.streams)
        with torch.cuda.stream(stream):
            block = torch.full((size,), value, dtype=torch.int64, device="cuda")
        self.blocks.append((block, value, stream))
        self.held += block.nbytes
        self.made += 1

    def drop(self, at):
        """Verifies block `at`, on its stream or on another, and lets go of it while the kernels still run."""
        self.blocks[at], self.blocks[-1] = self.blocks[-1], self.blocks[at]
        block, value, stream = self.blocks.pop()
        self.held -= block.nbytes
        reader = stream
        if self.random.random() < 0.3:
            reader = self.random.choice(self.streams)
            if reader != stream:
                reader.wait_stream(stream)
                block.record_stream(reader)
                self.crossed += 1
        with torch.cuda.stream(reader):
            different = (block != value).sum()
            # One counter a thread, added to on many streams: the addition itself is atomic on the device.
            self.wrong.index_add_(0, torch.zeros(1, dtype=torch.int64, device="cuda"), different.view(1))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--streams", type=int, default=6)
    parser.add_argument("--live-mib", type=int, default=1024, help="bytes that a thread keeps, in MiB")
    parser.add_argument("--largest-mib", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.cuda.init()
    streams = [torch.cuda.default_stream(), *(torch.cuda.Stream() for _ in range(args.streams - 1))]
    until = time.monotonic() + args.seconds
    workers = [Worker(number, streams, args, until) for number in range(args.threads)]
    for worker in workers:
        worker.start()
    reserved = []
    while any(worker.is_alive() for worker in workers):
        time.sleep(min(5.0, args.seconds / 20))
        reserved.append(torch.cuda.memory_reserved())
        if sys.stderr.isatty():
            print(f"\r{sum(w.made for w in workers)} blocks", end="", file=sys.stderr)
    torch.cuda.synchronize()
    wrong = sum(int(worker.wrong.item()) for worker in workers if worker.wrong is not None)
    errors = [repr(worker.error) for worker in workers if worker.error is not None]
    for worker in workers:
        worker.wrong = None
    left = torch.cuda.memory_allocated()
    torch.cuda.empty_cache()
    result = {
        "seconds": args.seconds,
        "blocks": sum(w.made for w in workers),
        "read on another stream": sum(w.crossed for w in workers),
        "refused": sum(w.refused for w in workers),
        "emptied": sum(w.emptied for w in workers),
        "wrong words": wrong,
        "errors": errors,
        "allocated at the end": left,
        "reserved, MiB: first quarter": max(reserved[: max(1, len(reserved) // 4)], default=0) // MIB,
        "reserved, MiB: last quarter": max(reserved[-max(1, len(reserved) // 4) :], default=0) // MIB,
        "reserved after empty_cache, MiB": torch.cuda.memory_reserved() // MIB,
    }
    print(json.dumps(result))
    # What cuBLAS and the like keep is no block of ours; this job uses none of them.
    return 1 if wrong or errors or left else 0


if __name__ == "__main__":
    sys.exit(main())

"""Makes the snapshots beside this file: what torch.cuda.memory._snapshot() gives, of made-up jobs.

small.pickle      three steps on two streams, with an out-of-memory and a delayed free
leak.pickle.gz    sixty steps in four epochs; train.py:12 keeps one block per step
cut.pickle.gz     the same job, only the last part of its history, without annotations
segments.pickle   torch.cuda.memory_snapshot(): segments and nothing else
"""

import gzip
import pathlib
import pickle

HERE = pathlib.Path(__file__).resolve().parent
TORCH = "/venv/lib/python3.12/site-packages/torch"


class Allocator:
    """Best fit, split and merge as torch's native allocator does."""

    def __init__(self):
        self.events, self.segments, self.pieces, self.live = [], {}, {}, {}
        self.time, self.top = 1_000_000, 0x7F0000000000
        self.frames = {}

    def frame(self, name, file, line):
        return self.frames.setdefault((name, file, line), {"name": name, "filename": file, "line": line})

    def stack(self, *frames):
        return [self.frame(*frame) for frame in frames]

    def event(self, action, addr, size, stream, frames):
        self.time += 7
        key = "device_free" if action == "oom" else "addr"
        self.events.append(
            {
                "action": action,
                key: addr,
                "size": size,
                "stream": stream,
                "time_us": self.time,
                "compile_context": "N/A",
                "user_metadata": "",
                "frames": frames,
            }
        )

    def alloc(self, size, stack, stream=0):
        rounded = max(512, -(-size // 512) * 512)
        small = rounded <= 1 << 20
        fits = [
            (p["size"], a)
            for a, p in self.pieces.items()
            if p["free"] and p["size"] >= rounded and p["small"] == small and p["stream"] == stream
        ]
        if not fits:
            total = 2 << 20 if small else max(20 << 20, -(-rounded >> 21 << 21))
            address, self.top = self.top, self.top + total + (2 << 20)
            self.segments[address] = {"total_size": total, "stream": stream, "small": small}
            self.pieces[address] = {
                "size": total,
                "free": True,
                "small": small,
                "stream": stream,
                "segment": address,
            }
            self.event("segment_alloc", address, total, stream, stack)
            fits = [(total, address)]
        address = min(fits)[1]
        piece = self.pieces[address]
        rest = piece["size"] - rounded
        if rest >= 512 if small else rest > 1 << 20:
            piece["size"] = rounded
            self.pieces[address + rounded] = {**piece, "size": rest, "free": True}
        piece.update(free=False, requested=size, frames=stack)
        self.event("alloc", address, size, stream, stack)
        return address

    def request_free(self, address, stack):
        piece = self.pieces[address]
        self.event("free_requested", address, piece["requested"], piece["stream"], stack)

    def complete_free(self, address, stack):
        piece = self.pieces[address]
        self.event("free_completed", address, piece["requested"], piece["stream"], stack)
        piece["free"] = True
        for start in sorted(self.pieces):
            piece = self.pieces.get(start)
            while piece and piece["free"]:
                end = start + piece["size"]
                after = self.pieces.get(end)
                if not after or not after["free"] or after["segment"] != piece["segment"]:
                    break
                piece["size"] += after["size"]
                del self.pieces[end]

    def free(self, address, stack):
        self.request_free(address, stack)
        self.complete_free(address, stack)

    def empty(self, stack):
        for address, segment in list(self.segments.items()):
            piece = self.pieces[address]
            if piece["free"] and piece["size"] == segment["total_size"]:
                self.event("segment_free", address, piece["size"], piece["stream"], stack)
                del self.pieces[address], self.segments[address]

    def dump_segments(self):
        segments = []
        for address, segment in sorted(self.segments.items()):
            blocks = [
                {
                    "address": a,
                    "size": p["size"],
                    "requested_size": 0 if p["free"] else p["requested"],
                    "state": "inactive" if p["free"] else "active_allocated",
                    "frames": [] if p["free"] else p["frames"],
                }
                for a, p in sorted(self.pieces.items())
                if p["segment"] == address
            ]
            active = sum(b["size"] for b in blocks if b["state"] != "inactive")
            segments.append(
                {
                    "device": 0,
                    "address": address,
                    "total_size": segment["total_size"],
                    "allocated_size": active,
                    "active_size": active,
                    "requested_size": sum(b["requested_size"] for b in blocks),
                    "stream": segment["stream"],
                    "segment_type": "small" if segment["small"] else "large",
                    "segment_pool_id": (0, 0),
                    "is_expandable": False,
                    "frames": [],
                    "blocks": blocks,
                }
            )
        return segments

    def dump(self, annotations=()):
        return {
            "segments": self.dump_segments(),
            "device_traces": [self.events],
            "allocator_settings": {
                "PYTORCH_CUDA_ALLOC_CONF": "",
                "max_split_size": -1,
                "garbage_collection_threshold": 0.0,
                "expandable_segments": False,
                "roundup_power2_divisions": {str(1 << n): 0 for n in range(16)},
            },
            "external_annotations": list(annotations),
        }


def job(steps, epochs, leak):
    a, marks = Allocator(), []
    main = ("<module>", "/job/train.py", 40)

    def mark(name, stage):
        a.time += 1
        marks.append({"name": name, "stage": stage, "device": 0, "time_us": a.time})

    module = ("_call_impl", f"{TORCH}/nn/modules/module.py", 1787)
    forward = a.stack(
        ("linear", f"{TORCH}/nn/functional.py", 125), module, ("step_once", "/job/train.py", 9), main
    )
    loss = a.stack(("step_once", "/job/train.py", 12), main)
    backward = a.stack(
        ("backward", f"{TORCH}/autograd/__init__.py", 354), ("step_once", "/job/train.py", 14), main
    )
    adam = a.stack(
        ("_multi_tensor_adam", f"{TORCH}/optim/adam.py", 600),
        ("step", f"{TORCH}/optim/adam.py", 247),
        ("wrapper", f"{TORCH}/optim/optimizer.py", 517),
        ("step_once", "/job/train.py", 15),
        main,
    )
    setup = a.stack(("convert", f"{TORCH}/nn/modules/module.py", 1370), ("<module>", "/job/train.py", 31))
    for layer in range(6):
        a.alloc(300_000 + 1000 * layer, setup)
    state = False
    for step in range(steps):
        for _ in range(2 if step and step % (steps // epochs) == 0 else 1):
            mark("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "START")
            mark("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "END")
        saved = [a.alloc(1_500_000 + 4096 * (step * 7 % 5), forward) for _ in range(5)]
        kept = a.alloc(70_000, loss)
        gradients = []
        for block in reversed(saved):
            gradients.append(a.alloc(310_000, backward))
            a.free(block, backward)
        mark("Optimizer.step#Adam.step", "START")
        if not state:
            state = [a.alloc(300_000, adam) for _ in range(12)]
        a.free(a.alloc(40_000, adam), adam)
        mark("Optimizer.step#Adam.step", "END")
        for block in gradients:
            a.free(block, loss)
        if not leak:
            a.free(kept, loss)
    return a, marks


def main():
    small, marks = job(3, 1, leak=False)
    copy = small.alloc(3_000_000, small.stack(("prefetch", "/job/data.py", 8)), stream=94210)
    small.request_free(copy, [])
    small.event("oom", 90 << 30, 5_000_000, 0, [])
    small.event("snapshot", 0, 0, 0, [])
    small.complete_free(copy, [])
    small.empty([])
    write("small.pickle", pickle.dumps(small.dump(marks), protocol=4))
    leaky, marks = job(60, 4, leak=True)
    write("leak.pickle.gz", gzip.compress(pickle.dumps(leaky.dump(marks), protocol=4), 9, mtime=0))
    leaky.events = leaky.events[len(leaky.events) // 3 :]
    write("cut.pickle.gz", gzip.compress(pickle.dumps(leaky.dump(), protocol=2), 9, mtime=0))
    bare, _ = job(2, 1, leak=True)
    write("segments.pickle", pickle.dumps(bare.dump_segments(), protocol=4))


def write(name, data):
    (HERE / name).write_bytes(data)
    print(name, len(data))


if __name__ == "__main__":
    main()

"""Stacks of a real training step; by hand: `python tests/stacks_torch.py PROBE`, with torch installed.

The probe is torch's allocator: on a GPU as a CUDAPluggableAllocator, else preloaded, as `c10::alloc_cpu`.
Shows the stacks of the forward and the backward pass (on a GPU that is autograd's own thread, with native
frames only), and what a capture costs there.
"""

import collections
import ctypes
import os
import sys

import torch

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
if not GPU and os.environ.get("LD_PRELOAD") != sys.argv[1]:
    os.environ["LD_PRELOAD"] = sys.argv[1]
    os.execv(sys.executable, [sys.executable, *sys.argv])

probe = ctypes.PyDLL(sys.argv[1])
for name in ("probe_start", "probe_frames", "probe_allocated_at"):
    getattr(probe, name).restype = ctypes.c_void_p
probe.probe_start.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_bool]
probe.probe_time.restype = ctypes.c_double


def text(address):
    return ctypes.cast(address, ctypes.c_char_p).value.decode()


print(sys.version.split()[0], torch.__version__, text(probe.probe_start(64, 65536, True)))
if GPU:
    memory = torch.cuda.memory
    memory.change_current_allocator(
        memory.CUDAPluggableAllocator(sys.argv[1], "probe_torch_malloc", "probe_torch_free")
    )

model = torch.nn.Sequential(
    torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.LayerNorm(512), torch.nn.Linear(512, 10)
).to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters())


def step():
    inputs = torch.randn(64, 256, device=DEVICE)
    loss = torch.nn.functional.cross_entropy(model(inputs), torch.randint(10, (64,), device=DEVICE))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def seen():
    pair = (ctypes.c_uint32 * 2)()
    while probe.probe_seen(ctypes.byref(pair)):
        yield tuple(pair)


for _ in range(3):
    step()
list(seen())
step()
pairs = list(seen())
stacks = collections.Counter(plain for plain, _ in pairs)
print(len(pairs), "allocations,", len(stacks), "stacks")
for stack, times in stacks.most_common():
    frames = [line.split("\t") for line in text(probe.probe_frames(stack)).split("\n")]
    print(f"{times}x {len(frames)} frames, {frames[0][0]}: {text(probe.probe_allocated_at(stack))}")
# In backward, a GPU's stacks are native by themselves; a CPU's are where the native frames are asked for.
backward = [text(probe.probe_frames(plain if GPU else both)) for plain, both in pairs]
backward = [frames for frames in backward if "torch::autograd::Engine" in frames]
print("\nin backward:\n" + next(frames for frames in backward if "AddmmBackward0" in frames))
both = next(both for plain, both in pairs if text(probe.probe_frames(plain)).startswith("P"))
print("\nin forward, with native frames:\n" + text(probe.probe_frames(both)))
for node in ("AddmmBackward0", "GeluBackward0", "NativeLayerNormBackward0"):
    assert any(f"torch::autograd::generated::{node}::apply" in frames for frames in backward), node
assert not any("probe" in text(probe.probe_frames(stack)) for stack in stacks)


class Timed(torch.autograd.Function):
    """Captures in the midst of a backward pass. Python runs there, so only native frames are timed."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, gradient):
        print(
            f"in backward: {probe.probe_time(300, False):.0f} ns Python,"
            f" {probe.probe_time(300, True):.0f} ns with native frames"
        )
        return gradient


def hook(module, *_):
    print(
        f"in a forward hook: {probe.probe_time(300, False):.0f} ns Python,"
        f" {probe.probe_time(300, True):.0f} ns with native frames"
    )


handle = model[3].register_forward_hook(hook)
model(Timed.apply(torch.randn(64, 256, device=DEVICE, requires_grad=True))).sum().backward()
handle.remove()

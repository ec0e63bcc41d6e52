"""Stacks of a real training step on a GPU; by hand: `python tests/stacks_torch.py PROBE`.

The probe is torch's allocator. Shows the stacks of the forward pass (Python) and of the backward pass
(autograd's thread, native), and what a capture costs there.
"""

import collections
import ctypes
import sys

import torch

probe = ctypes.PyDLL(sys.argv[1])
for name in ("probe_start", "probe_frames", "probe_allocated_at"):
    getattr(probe, name).restype = ctypes.c_void_p
probe.probe_start.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_bool]
probe.probe_time.restype = ctypes.c_double


def text(address):
    return ctypes.cast(address, ctypes.c_char_p).value.decode()


print(sys.version.split()[0], torch.__version__, text(probe.probe_start(64, 65536, True)))
allocator = torch.cuda.memory.CUDAPluggableAllocator(sys.argv[1], "probe_torch_malloc", "probe_torch_free")
torch.cuda.memory.change_current_allocator(allocator)

model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.LayerNorm(512),
                            torch.nn.Linear(512, 10)).cuda()
optimizer = torch.optim.AdamW(model.parameters())


def step():
    inputs = torch.randn(64, 256, device="cuda")
    loss = torch.nn.functional.cross_entropy(model(inputs), torch.randint(10, (64,), device="cuda"))
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
native = next(stack for stack in stacks if text(probe.probe_frames(stack)).startswith("N"))
print("\nautograd:\n" + text(probe.probe_frames(native)))
both = next(both for plain, both in pairs if text(probe.probe_frames(plain)).startswith("P"))
print("\nwith native frames:\n" + text(probe.probe_frames(both)))

nodes = {line.split("\t")[3] for stack in stacks for line in text(probe.probe_frames(stack)).split("\n")
         if "torch::autograd::generated" in line}
assert any("AddmmBackward0::apply" in node for node in nodes), nodes
assert not any("probe" in text(probe.probe_frames(stack)) for stack in stacks)


class Timed(torch.autograd.Function):
    """Captures in the midst of a backward pass. Python runs there, so only native frames are timed."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, gradient):
        print(f"in backward: {probe.probe_time(300, False):.0f} ns Python,"
              f" {probe.probe_time(300, True):.0f} ns with native frames")
        return gradient


def hook(module, *_):
    print(f"in a forward hook: {probe.probe_time(300, False):.0f} ns Python,"
          f" {probe.probe_time(300, True):.0f} ns with native frames")


handle = model[3].register_forward_hook(hook)
model(Timed.apply(torch.randn(64, 256, device="cuda", requires_grad=True))).sum().backward()
handle.remove()

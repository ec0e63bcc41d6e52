"""Two GPUs: DDP over NCCL, copies between peers; prints losses that must be the same under any allocator.

    python tests/gpu/two_gpus.py                     one line of JSON (a hash of all losses and weights)
    strandline run --mode heap -- python tests/gpu/two_gpus.py

Exit code 0 and equal lines mean that the allocator changed nothing. Must not know: which allocator it runs on.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 32, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(32, 64, 3, stride=2),
        torch.nn.Flatten(),
        torch.nn.LazyLinear(256),
        torch.nn.ReLU(),
        torch.nn.Linear(256, 10),
    )


def rank(number, world, answers):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", RANK=str(number), WORLD_SIZE=str(world))
    os.environ["LOCAL_RANK"] = str(number)
    torch.use_deterministic_algorithms(True)
    torch.cuda.set_device(number)
    dist.init_process_group("nccl", rank=number, world_size=world, device_id=torch.device("cuda", number))
    model = net().cuda()
    with torch.no_grad():
        model(torch.zeros(1, 3, 32, 32, device="cuda"))
    model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[number])
    optimizer = torch.optim.AdamW(model.parameters())
    generator = torch.Generator().manual_seed(number)
    digest = hashlib.sha256()
    for step in range(60):
        size = 8 + (step * 7) % 25
        x = torch.randn(size, 3, 32, 32, generator=generator).cuda(non_blocking=True)
        y = torch.randint(10, (size,), generator=generator).cuda(non_blocking=True)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        digest.update(repr(total.item()).encode())
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    backend = torch.cuda.memory.get_allocator_backend()
    dist.destroy_process_group()
    answers.put((number, digest.hexdigest()[:16], backend))


def peers():
    """Values through every direction of copy, on streams of both devices, while blocks come and go."""
    digest = hashlib.sha256()
    streams = [torch.cuda.Stream(device) for device in range(2)]
    for turn in range(200):
        a = torch.full((1 << (10 + turn % 11),), float(turn), device="cuda:0")
        streams[1].wait_stream(torch.cuda.current_stream(0))
        with torch.cuda.stream(streams[1]):
            b = a.to("cuda:1", non_blocking=True)
            c = b * 2
        a.record_stream(torch.cuda.current_stream(0))
        torch.cuda.current_stream(0).wait_stream(streams[1])
        d = c.to("cuda:0") + a
        digest.update(repr(d.sum().item()).encode())
        assert d.sum().item() == 3.0 * turn * d.numel(), (turn, d.sum().item())
        if turn % 50 == 49:
            torch.cuda.empty_cache()
    return digest.hexdigest()[:16]


def main():
    if torch.cuda.device_count() < 2:
        print("two_gpus.py: this machine has fewer than two GPUs", file=sys.stderr)
        return 2
    context = mp.get_context("spawn")
    answers = context.Queue()
    processes = [context.Process(target=rank, args=(number, 2, answers)) for number in range(2)]
    for process in processes:
        process.start()
    results = sorted(answers.get(timeout=150) for _ in processes)
    for process in processes:
        process.join(60)
    codes = [process.exitcode for process in processes]
    access = torch.cuda.can_device_access_peer(0, 1)
    print(
        json.dumps({"ddp": [r[1] for r in results], "peers": peers(), "peer access": access, "exit": codes})
    )
    print(f"allocator: {[r[2] for r in results]}", file=sys.stderr)
    return 0 if codes == [0, 0] else 1


if __name__ == "__main__":
    sys.exit(main())

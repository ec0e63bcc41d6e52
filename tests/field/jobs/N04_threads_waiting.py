"""A thread is started for every upload and none ends: each keeps its tensor on its stack."""

import threading

import torch
from small import make, update


def upload(x, done):
    done.wait()
    return x.sum()


done = threading.Event()
net = make()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _step in range(60):
    x = torch.randn(256, 16)  # ALLOCATES
    threading.Thread(target=upload, args=(x, done), daemon=True).start()  # KEEPS
    update(net, optimizer)
done.set()
for thread in threading.enumerate():
    if thread is not threading.current_thread():
        thread.join()

"""Futures are kept for ever: their results, and the tensors inside the exceptions of those that failed."""

from concurrent.futures import ThreadPoolExecutor

import torch
from small import make


class Server:
    def __init__(self):
        self.model = make()
        self.pool = ThreadPoolExecutor(1)
        self.pending = []

    def answer(self, request):
        with torch.no_grad():
            out = self.model(torch.randn(256, 16))  # ALLOCATES
        if request % 3 == 0:
            raise ValueError("refused", out)
        return out

    def submit(self, request):
        future = self.pool.submit(self.answer, request)
        self.pending.append(future)  # KEEPS
        future.exception()


server = Server()
for request in range(120):
    server.submit(request)
server.pool.shutdown()

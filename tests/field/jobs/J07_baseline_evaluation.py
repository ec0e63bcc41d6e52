"""An evaluation with a library's metric comes first, is freed in full when its function returns, and training begins."""

import pathlib
import sys
import tempfile

import torch
from small import make, update

place = pathlib.Path(tempfile.mkdtemp()) / "site-packages"
place.mkdir()
(place / "catmetric.py").write_text(
    "import torch\n"
    "class Cat:\n"
    "    def __init__(self): self.value = []\n"
    "    def update(self, x): self.value.append(x)\n"
    "    def compute(self): return torch.cat(self.value)\n"
)
sys.path.insert(0, str(place))
from catmetric import Cat  # noqa: E402

net = make()


def baseline():
    metric = Cat()
    with torch.no_grad():
        for _ in range(120):
            metric.update(torch.softmax(net(torch.randn(512, 16) * 2), 1))
    return float(metric.compute().mean())


print(baseline())
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(100):
    update(net, optimizer)

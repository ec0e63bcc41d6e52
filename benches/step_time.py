"""Step time of CPU training under strandline against without: `python benches/step_time.py`.

Two jobs, each run alternately with and without the library (so that a slow minute of the machine meets
both): ResNet-18 at batch 8, and a 4-layer transformer of many small tensors. Prints the median step time of
each run, and the ratio of the medians over all rounds. The target is a ratio of at most 1.05.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent

JOB = """
import sys, time, torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)
torch.set_num_threads(1)
name, steps = sys.argv[1], int(sys.argv[2])
if name == "resnet18":
    from torchvision.models import resnet18
    net = resnet18(weights=None, num_classes=10)
    x, y = torch.randn(8, 3, 64, 64), torch.randint(0, 10, (8,))
else:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    net = nn.Sequential(nn.TransformerEncoder(layer, 4), nn.Flatten(), nn.Linear(64 * 16, 10))
    x, y = torch.randn(8, 16, 64), torch.randint(0, 10, (8,))
optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
times = []
for step in range(steps):
    began = time.perf_counter()
    loss = F.cross_entropy(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    times.append(time.perf_counter() - began)
times = sorted(times[steps // 5:])
print(times[len(times) // 2])
"""


def median_step(script, name, steps, command):
    env = {k: v for k, v in os.environ.items() if not k.startswith("STRANDLINE_")}
    done = subprocess.run(
        [*command, sys.executable, script, name, str(steps)], env=env, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr}")
    return float(done.stdout)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--strandline", default=ROOT / "target" / "release" / "strandline", type=pathlib.Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        script = pathlib.Path(folder) / "job.py"
        script.write_text(JOB)
        ours = [args.strandline, "run", "--mode", "host", "--quiet", "--out", f"{folder}/out", "--"]
        print(f"{'job':12} {'without, ms':>12} {'strandline, ms':>15} {'ratio':>7}")
        for name, steps in (("resnet18", 60), ("transformer", 400)):
            pairs = []
            for _ in range(args.rounds):
                pairs.append((median_step(script, name, steps, []), median_step(script, name, steps, ours)))
                print(f"{'':12} {pairs[-1][0] * 1e3:12.3f} {pairs[-1][1] * 1e3:15.3f}", flush=True)
            without, with_ours = (statistics.median(column) for column in zip(*pairs))
            print(
                f"{name:12} {without * 1e3:12.3f} {with_ours * 1e3:15.3f} {with_ours / without:7.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()

"""What the library itself holds over a long run: `python benches/flat_memory.py [--steps 200000]`.

Runs a tiny model for many steps under strandline and prints the resident memory of the process as it goes,
with the run without strandline beside it. The two must grow alike.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent

JOB = """
import sys, torch, torch.nn as nn
torch.set_num_threads(1)
steps = int(sys.argv[1])
net = nn.Linear(4, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
x = torch.randn(2, 4)

def resident():
    for line in open("/proc/self/status"):
        if line.startswith("VmRSS"):
            return int(line.split()[1])

for step in range(steps + 1):
    if step % (steps // 10) == 0:
        print(step, resident(), flush=True)
    optimizer.zero_grad()
    net(x).sum().backward()
    optimizer.step()
"""


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--strandline", default=ROOT / "target" / "release" / "strandline", type=pathlib.Path)
    args = parser.parse_args()
    env = {k: v for k, v in os.environ.items() if not k.startswith("STRANDLINE_")}
    with tempfile.TemporaryDirectory() as folder:
        script = pathlib.Path(folder) / "job.py"
        script.write_text(JOB)
        ours = [args.strandline, "run", "--mode", "host", "--quiet", "--out", f"{folder}/out", "--"]
        columns = []
        for command in ([], ours):
            done = subprocess.run(
                [*command, sys.executable, script, str(args.steps)],
                env=env,
                capture_output=True,
                text=True,
                check=True,
            )
            columns.append([tuple(map(int, line.split())) for line in done.stdout.splitlines()])
    print(f"{'step':>8} {'without, KiB':>13} {'strandline, KiB':>16}")
    for (step, without), (_, with_ours) in zip(*columns):
        print(f"{step:8} {without:13} {with_ours:16}")
    growth = [column[-1][1] - column[1][1] for column in columns]
    print(f"growth after the first tenth: without {growth[0]} KiB, strandline {growth[1]} KiB")


if __name__ == "__main__":
    main()

"""For how long a search for holders stops a job: `python benches/search_pause.py`.

A job on the CPU that begins to leak at one line after the other, each into a list of its own, so that it is searched
several times. Prints for each search the time that it took, of the thread's own computing, over several runs: the first
search of a run, and the later ones. The target is 30 ms for the first.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent

JOB = """
import json, time, torch, torch.nn as nn, torch.nn.functional as F
import strandline
from strandline._explain import Explainer
torch.set_num_threads(1)
pauses = []
answer_pending = Explainer.answer_pending
def timed(self):
    began = time.thread_time()
    answer_pending(self)
    pauses.append(time.thread_time() - began)
Explainer.answer_pending = timed
strandline._boot._clock.explain = strandline._boot._clock.explain.__self__.answer_pending

class Trainer:
    def __init__(self):
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), 1e-3)
        self.outputs, self.history, self.losses = [], {"inputs": []}, []

    def step(self, number):
        x, y = torch.randn(32, 64), torch.randint(0, 10, (32,))
        out = self.net(x)
        loss = F.cross_entropy(out, y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.outputs.append(out.detach())
        if number > 80:
            self.history["inputs"].append(x.clone())
        if number > 160:
            self.losses.append(self.net(x).sum())

def main():
    trainer = Trainer()
    for number in range(240):
        trainer.step(number)

main()
print(json.dumps(pauses))
"""


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--strandline", default=ROOT / "target" / "release" / "strandline", type=pathlib.Path)
    args = parser.parse_args()
    first, later = [], []
    env = {k: v for k, v in os.environ.items() if not k.startswith("STRANDLINE_")}
    with tempfile.TemporaryDirectory() as folder:
        script = pathlib.Path(folder) / "job.py"
        script.write_text(JOB)
        ours = [args.strandline, "run", "--mode", "host", "--quiet", "--out", f"{folder}/out", "--"]
        for _ in range(args.rounds):
            done = subprocess.run([*ours, sys.executable, script], env=env, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"the job failed:\n{done.stderr}")
            pauses = [1e3 * pause for pause in json.loads(done.stdout)]
            print("ms of each search:", *(f"{pause:6.1f}" for pause in pauses), flush=True)
            first.append(pauses[0])
            later += pauses[1:]
    print(f"first: median {statistics.median(first):.1f} ms of {len(first)} runs")
    if later:
        print(f"later: median {statistics.median(later):.1f} ms of {len(later)} searches")


if __name__ == "__main__":
    main()

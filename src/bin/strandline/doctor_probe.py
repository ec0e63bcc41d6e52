"""What `strandline doctor` runs under the library: twelve steps that leave a block each, and a dump of itself."""

import os
import subprocess

import torch

import strandline

kept = []


def leave():
    kept.append(torch.ones(1000))


for _ in range(12):
    leave()
    strandline.step()

environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
command = [os.environ["STRANDLINE_COMMAND"], "dump", str(os.getpid())]
done = subprocess.run(command, env=environment, capture_output=True, text=True)
print("dump", done.returncode, (done.stderr or done.stdout).strip().replace("\n", " "))

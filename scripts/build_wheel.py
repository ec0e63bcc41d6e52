"""The wheel's build hook: builds the library and the command with cargo and puts both into the package.

The wheel needs no particular Python (`py3-none`), but this machine's kind: the library is plain C to Python.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = ("libstrandline.so", "strandline")


class CargoBuild(BuildHookInterface):
    def initialize(self, version, build_data):
        if not sys.platform.startswith("linux"):
            raise RuntimeError("strandline runs on Linux only")
        folder = self.built()
        for name in NATIVE:
            build_data["force_include"][str(folder / name)] = f"strandline/_native/{name}"
        platform = os.environ.get("STRANDLINE_WHEEL_PLATFORM") or sysconfig.get_platform()
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-" + platform.replace("-", "_").replace(".", "_")

    def built(self):
        """A folder with what cargo built, without the debug information."""
        cargo = os.environ.get("CARGO", "cargo")
        if shutil.which(cargo) is None:
            raise RuntimeError("cargo was not found; install Rust 1.89 or newer (https://rustup.rs)")
        subprocess.run(
            [cargo, "build", "--release", "--locked", "--lib", "--bins"], cwd=self.root, check=True
        )
        told = subprocess.run(
            [cargo, "metadata", "--no-deps", "--format-version", "1"],
            cwd=self.root,
            check=True,
            capture_output=True,
        )
        target = Path(json.loads(told.stdout)["target_directory"])
        folder = target / "wheel"
        folder.mkdir(exist_ok=True)
        for name in NATIVE:
            shutil.copy(target / "release" / name, folder / name)
            if shutil.which("strip"):
                subprocess.run(["strip", "--strip-debug", folder / name], check=True)
        return folder

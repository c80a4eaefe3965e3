"""Builds the wheel: the Python package, the library that it loads, and the program. `pip install .` in a checkout needs Rust.

With the variable PACELINE_PREBUILT the library and the program are taken from that folder, and nothing is compiled.
"""

import os
import subprocess

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = os.path.dirname(os.path.abspath(__file__))
PREBUILT = os.environ.get("PACELINE_PREBUILT")
TARGET = PREBUILT or os.path.join(os.environ.get("CARGO_TARGET_DIR", os.path.join(ROOT, "target")), "release")


class Build(build_py):
    def run(self):
        if not PREBUILT:
            command = ["cargo", "build", "--release", "--locked", "--package", "paceline-python", "--package", "paceline"]
            subprocess.run(command, cwd=ROOT, check=True)
        super().run()
        self.copy_file(os.path.join(TARGET, "libpaceline_python.so"), os.path.join(self.build_lib, "paceline"))


class Binary(Distribution):
    def has_ext_modules(self):
        return True


class Wheel(bdist_wheel):
    """One wheel serves every Python: the library knows nothing of it."""

    def get_tag(self):
        return ("py3", "none", super().get_tag()[2])


setup(
    distclass=Binary,
    cmdclass={"build_py": Build, "bdist_wheel": Wheel},
    data_files=[("bin", [os.path.relpath(os.path.join(TARGET, "paceline"), ROOT)])],
)

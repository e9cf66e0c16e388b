"""kvcompress-cuda: the CUDA library as a wheel of its own, so that kvcompress' stays small. From the repository, with
nvcc: `pip wheel ./kvcompress-cuda` (KVCOMPRESS_CUDA=90 for one architecture; all unless given)."""

import os
import sys

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
sys.path.insert(0, ROOT)
import build_cuda  # noqa: E402


class Build(build_py):
    def run(self):
        super().run()
        os.chdir(ROOT)
        try:
            library = build_cuda.build(os.environ.get("KVCOMPRESS_CUDA", "all"))
        finally:
            os.chdir(HERE)
        if not library:
            sys.exit("kvcompress-cuda: expected nvcc and KVCOMPRESS_CUDA=all (or 90, or 80,90), got no library")
        self.copy_file(os.path.join(ROOT, library), os.path.join(self.build_lib, "kvcompress_cuda"))


class Wheel(bdist_wheel):
    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


class OfThisPlatform(Distribution):
    def has_ext_modules(self):
        return True


setup(
    name="kvcompress-cuda",
    version=build_cuda.version(),
    description="The CUDA library of kvcompress",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=["kvcompress_cuda"],
    install_requires=[f"kvcompress=={build_cuda.version()}"],
    distclass=OfThisPlatform,
    cmdclass={"build_py": Build, "bdist_wheel": Wheel},
)

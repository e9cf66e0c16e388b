"""Builds kvcompress._C: plain C, no torch at build time. KVCOMPRESS_SANITIZE=address,undefined adds sanitizers;
KVCOMPRESS_AMX_MODEL=1 a level "amx" for CPUs without it (slow: for tests), KVCOMPRESS_AVXVNNI_MODEL=1 "avxvnni" by the
instructions of AVX512-VNNI;
KVCOMPRESS_CUDA=all (or 90, or 80,90) the CUDA library (build_cuda.py)."""

import glob
import os
import shutil
import sys
import sysconfig

if sys.version_info < (3, 10):  # noqa: UP036 - pip looks at requires-python only after this has run
    sys.exit(
        f"kvcompress: expected Python 3.10 or newer, got {sys.version.split()[0]}; try python3.12 -m pip install ."
    )
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import numpy
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

import build_cuda

VERSION = "0.1.0"
if sysconfig.get_config_var("Py_GIL_DISABLED"):
    sys.exit(
        "kvcompress: expected a Python with the stable ABI, got a free-threaded one, which has none; build with its "
        "twin (python3.14, not python3.14t)"
    )
FLAGS = [
    "-std=c11",
    "-O3",
    "-g1",
    "-ffp-contract=off",
    "-fexceptions",
    "-fvisibility=hidden",
    "-D_GNU_SOURCE",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wconversion",
    "-Wshadow",
    "-Wvla",
]


class BuildExt(build_ext):
    """Compiles on all cores, and knows the headers that every object depends on."""

    def build_extensions(self):
        compiler = self.compiler.compiler_so[0]
        if not shutil.which(compiler):
            sys.exit(
                f"kvcompress: expected a C compiler, got none: {compiler} is not there; install gcc, or name another "
                "one (CC=clang)"
            )
        compile_one = self.compiler._compile

        def compile_all(objects, build, arguments):
            from concurrent.futures import ThreadPoolExecutor

            with ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(lambda obj: compile_one(obj, *build[obj], *arguments), build))
            return objects

        def compile(sources, output_dir=None, macros=None, include_dirs=None, debug=0, extra_preargs=None,
                    extra_postargs=None, depends=None):  # fmt: skip
            macros, objects, postargs, preprocess, build = self.compiler._setup_compile(
                output_dir, macros, include_dirs, sources, depends, extra_postargs
            )
            arguments = (self.compiler._get_cc_args(preprocess, debug, extra_preargs), postargs, preprocess)
            return compile_all(objects, build, arguments)

        self.compiler.compile = compile
        super().build_extensions()
        library = build_cuda.build(os.environ.get("KVCOMPRESS_CUDA", "off"))
        if library and not self.inplace:
            self.copy_file(library, os.path.join(self.build_lib, library))


sanitize = os.environ.get("KVCOMPRESS_SANITIZE")
extra = (
    [f"-fsanitize={sanitize}", "-fno-sanitize-recover=all", "-O1", "-g", "-fno-omit-frame-pointer"] if sanitize else []
)
model = [(f"KVC_{x}_MODEL", None) for x in ("AMX", "AVXVNNI") if os.environ.get(f"KVCOMPRESS_{x}_MODEL")]
sources = sorted(p for part in ("core/*", "torch", "python") for p in glob.glob(f"csrc/{part}/*.c"))

setup(
    version=VERSION,
    ext_modules=[
        Extension(
            "kvcompress._C",
            sources,
            depends=glob.glob("csrc/**/*.h", recursive=True) + glob.glob("csrc/**/*.def", recursive=True),
            define_macros=[("Py_LIMITED_API", "0x030a0000"), ("KVC_VERSION", f'"{VERSION}"'), *model],
            extra_compile_args=[
                *FLAGS,
                "-iquote",
                "csrc/core",
                "-iquote",
                "csrc/torch",
                "-iquote",
                "csrc/cuda",
                "-isystem",
                numpy.get_include(),
                *extra,
            ],
            extra_link_args=["-lm", "-lpthread", "-ldl", *extra],
            py_limited_api=True,
        )
    ],
    cmdclass={"build_ext": BuildExt},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)

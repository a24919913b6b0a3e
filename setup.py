"""Build zbpipe and its native executor: every csrc/*.cpp through ninja, no torch headers."""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pybind11
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
SOURCES = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*.cpp"))
INCLUDES = ["csrc", pybind11.get_include(), sysconfig.get_paths()["include"]]
CXXFLAGS = ["-std=c++17", "-O2", "-g1", "-fPIC", "-fvisibility=hidden", "-pthread"]
CXXFLAGS += ["-Wall", "-Wextra", "-Werror=return-type"]


class NinjaBuild(build_ext):
    """Write one build.ninja for the extension and let ninja compile what changed."""

    def build_extension(self, ext: Extension) -> None:
        out = Path(self.get_ext_fullpath(ext.name)).resolve()
        work = ROOT.resolve() / "build" / ("native-" + sysconfig.get_platform())
        out.parent.mkdir(parents=True, exist_ok=True)
        work.mkdir(parents=True, exist_ok=True)
        (work / "build.ninja").write_text(ninja_file(out, work))
        ninja = shutil.which("ninja", path=str(Path(sys.executable).parent)) or "ninja"
        subprocess.run([ninja, "-C", str(work)], check=True)


def ninja_file(out: Path, work: Path) -> str:
    """The build.ninja text: one compile edge a source, one link edge."""

    def escape(path: object) -> str:
        return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")

    flags = CXXFLAGS + [f"-I'{ROOT / i}'" for i in INCLUDES]
    lines = [
        "cxx = " + (sysconfig.get_config_var("CXX") or "c++").split()[0],
        "flags = " + " ".join(flags),
        "rule cc",
        "  command = $cxx $flags -MMD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        "  command = $cxx -shared -pthread $in -o $out -ldl",
    ]
    objects = []
    for source in SOURCES:
        obj = work / (source.replace("/", "_") + ".o")
        objects.append(escape(obj))
        lines.append(f"build {escape(obj)}: cc {escape(ROOT.resolve() / source)}")
    lines.append(f"build {escape(out)}: link {' '.join(objects)}")
    return "\n".join(lines) + "\n"


setup(
    ext_modules=[Extension("zbpipe._native", sources=SOURCES)],
    cmdclass={"build_ext": NinjaBuild},
)

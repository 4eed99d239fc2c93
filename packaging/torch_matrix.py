"""Builds a program against several versions of LibTorch, runs it on two ranks, and prints the table of what happened.

usage: torch_matrix.py [--cache FOLDER] [--cxx COMPILER] [--write FILE] [VERSION...]

Each version's `torch` package comes from PyPI with pip, for the machine that the script runs on: its CPU parts are unpacked
into FOLDER (about 500 MB each, kept for the next run), as cmake/LockstepTorchInstall.cmake does for the newest version.
lockstep is installed once; the program is packaging/conan/test_package, which finds both. Another one, foreign_errors, includes
all of lockstep/lockstep.hpp, and checks that lockstep understands the errors of that version's Gloo. Each stage prints a line to stderr with its time. With
CMAKE_CXX_COMPILER_LAUNCHER=ccache in the environment, a repeated run reuses what has not changed. --write replaces the
table and its record in FILE (docs/packaging.md). The exit code is 1 if a version failed.
"""

import argparse
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import time
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
VERSIONS = ["2.6.0", "2.7.1", "2.8.0", "2.9.1", "2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0"]
COMMAND = "python3 packaging/torch_matrix.py --write docs/packaging.md"
sys.path.insert(0, str(ROOT / "tools"))
import record


def run(*command: object, **more: object) -> str:
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, **more)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{result.stdout}{result.stderr}ended with {result.returncode}")
    return result.stdout + result.stderr


def stage(version: str, name: str, *command: object, **more: object) -> str:
    """Runs a command and prints how long it took."""
    start = time.monotonic()
    output = run(*command, **more)
    print(f"{version}: {name} ({time.monotonic() - start:.0f} s)", file=sys.stderr, flush=True)
    return output


def download(requirement: str, folder: pathlib.Path) -> pathlib.Path:
    """Downloads the wheel of `requirement` for Python 3.11, of which only the C++ parts are used."""
    platforms = []
    for tag in ("manylinux_2_28", "manylinux_2_27", "manylinux_2_25", "manylinux_2_17", "manylinux2014", "manylinux1"):
        platforms += ["--platform", f"{tag}_{platform.machine()}"]
    before = set(folder.glob("*.whl"))
    run(
        *(sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "--only-binary=:all:"),
        *("--implementation", "cp", "--python-version", "3.11", *platforms, "--dest", folder, requirement),
    )
    (wheel,) = set(folder.glob("*.whl")) - before
    return wheel


def cuda_requirements(wheel: pathlib.Path, folder: pathlib.Path) -> list[str]:
    """Returns the packages of the two CUDA libraries that libtorch_cpu.so of this wheel is linked to; none for a CPU build."""
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode()
        archive.extract("torch/lib/libtorch_cpu.so", folder)
    needed = re.findall(r"lib(cudart|cupti)\.so\.(\d+)", run("readelf", "-d", folder / "torch/lib/libtorch_cpu.so"))
    result = []
    for library, major in needed:
        name = {"cudart": "nvidia-cuda-runtime", "cupti": "nvidia-cuda-cupti"}[library]
        pinned = re.search(rf"^Requires-Dist: ({name}\S*) ?\(?==([\d.]+)", text, re.MULTILINE)
        if pinned:
            result.append(f"{pinned[1]}=={pinned[2]}")
        else:
            name += f"-cu{major}" if int(major) < 13 else ""
            result.append(f"{name}>={major},<{int(major) + 1}")
    return result


def libtorch(version: str, cache: pathlib.Path) -> pathlib.Path:
    """Returns the folder of this LibTorch in the cache, installing it where it is not there yet."""
    target = cache / f"libtorch-{version}"
    if not (target / "torch").exists():
        start = time.monotonic()
        work = cache / f"libtorch-{version}.part"
        shutil.rmtree(work, ignore_errors=True)
        (work / "wheels").mkdir(parents=True)
        wheels = [download(f"torch=={version}", work / "wheels")]
        wheels += [download(requirement, work / "wheels") for requirement in cuda_requirements(wheels[0], work / "peek")]
        run(sys.executable, ROOT / "cmake/unpack_libtorch.py", work / "libtorch", *wheels)
        (work / "libtorch").rename(target)
        shutil.rmtree(work)
        print(f"{version}: downloaded and unpacked ({time.monotonic() - start:.0f} s)", file=sys.stderr, flush=True)
    return target / "torch"


def configure_arguments(arguments: argparse.Namespace) -> list[str]:
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    return [*generator, f"-DCMAKE_CXX_COMPILER={arguments.cxx}"]


def abi_of(torch: pathlib.Path) -> str:
    config = (torch / "share/cmake/Torch/TorchConfig.cmake").read_text()
    abi = re.search(r"_GLIBCXX_USE_CXX11_ABI=([01])", config)
    return abi[1] if abi else "1"


def try_version(version: str, arguments: argparse.Namespace) -> list[str]:
    """Returns the table's cells: the ABI of std::string, whether the program ran, whether all headers compile, whether Gloo's errors are
    understood."""
    cells = ["", "FAILED", "not tried", "not tried"]
    try:
        torch = libtorch(version, arguments.cache)
        cells[0] = abi_of(torch)
        build = arguments.cache / f"program-{version}"
        shutil.rmtree(build, ignore_errors=True)
        project = ROOT / "packaging/conan/test_package"
        prefix = arguments.cache / "lockstep"
        stage(
            *(version, "configured", "cmake", "-S", project, "-B", build, *configure_arguments(arguments)),
            *("-DLOCKSTEP_FETCH_TORCH=OFF", f"-DCMAKE_PREFIX_PATH={prefix}", f"-DTorch_ROOT={torch}"),
        )
        stage(version, "program built", "cmake", "--build", build, "--target", "program")
        single_thread = os.environ | {"OMP_NUM_THREADS": "1"}
        output = stage(version, "program run", build / "program", "--nproc", 2, env=single_thread, timeout=120)
        if "2 ranks, their gradients are equal" not in output:
            raise RuntimeError(f"the program said: {output}")
        cells[1:3] = ["yes", "FAILED"]
        stage(version, "lockstep.hpp compiled", "cmake", "--build", build, "--target", "foreign_errors")
        cells[2:] = ["yes", "FAILED"]
        for mode in ("sizes", "closed"):
            stage(version, f"foreign_errors {mode}", build / "foreign_errors", mode, env=single_thread, timeout=120)
        cells[3] = "yes"
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        print(f"{version}: {error}", file=sys.stderr)
    return cells


def main() -> int:
    parser = argparse.ArgumentParser(description="Builds a program against several versions of LibTorch and runs it.")
    parser.add_argument("--cache", type=pathlib.Path, default=ROOT / "build/torch-matrix", metavar="FOLDER")
    parser.add_argument("--cxx", default="g++", metavar="COMPILER")
    parser.add_argument("--write", type=pathlib.Path, metavar="FILE", help="replace the table in FILE")
    parser.add_argument("versions", nargs="*", metavar="VERSION", default=VERSIONS)
    arguments = parser.parse_args()
    arguments.cache = arguments.cache.resolve()

    lockstep = arguments.cache / "lockstep-build"
    shutil.rmtree(lockstep, ignore_errors=True)
    shutil.rmtree(arguments.cache / "lockstep", ignore_errors=True)
    run(
        *("cmake", "-S", ROOT, "-B", lockstep, *configure_arguments(arguments), "-DLOCKSTEP_BUILD_TESTS=OFF"),
        *("-DLOCKSTEP_BUILD_EXAMPLES=OFF", f"-DCMAKE_INSTALL_PREFIX={arguments.cache / 'lockstep'}"),
    )
    run("cmake", "--install", lockstep)

    compiler = run(arguments.cxx, "--version").splitlines()[0]
    rows = []
    failed = False
    for version in arguments.versions:
        cells = try_version(version, arguments)
        failed = failed or "FAILED" in cells
        rows.append(f"| {version} | {' | '.join(cells)} |")
        print(rows[-1], flush=True)
    text = [
        f"With {compiler}, on {platform.machine()}, the `torch` packages of PyPI:",
        "",
        record.comment(COMMAND, "LibTorch, compilers"),
        "| LibTorch | `_GLIBCXX_USE_CXX11_ABI` | built, and run on two ranks | `lockstep.hpp` compiled | Gloo's errors understood |",
        "|---|---|---|---|---|",
        *rows,
    ]
    if arguments.write:
        page = arguments.write.read_text()
        found = re.search(rf"With .*\n\n<!-- record: {re.escape(COMMAND)} .*\n(\|.*\n)*", page)
        if not found:
            raise SystemExit(f"{arguments.write} has no record of {COMMAND}")
        arguments.write.write_text(page[: found.start()] + "\n".join(text) + "\n" + page[found.end() :])
    else:
        print("\n" + "\n".join(text))
    return 1 if failed else 0


sys.exit(main())

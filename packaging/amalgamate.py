"""Writes lockstep as one header: FOLDER/lockstep.hpp.

usage: amalgamate.py [--torch ROOT] FOLDER [HEADER...]

HEADER: the public headers to put together, such as lockstep/datasets/mnist.hpp; default lockstep/lockstep.hpp.

ProcessGroupGloo.hpp of LibTorch includes headers of Gloo, which no LibTorch ships. The script writes declarations of
the names it mentions into FOLDER/gloo/, which -I FOLDER puts on the include path. With --torch ROOT (the folder that
holds LibTorch's include/), the declarations and ROOT's ProcessGroupGloo.hpp become a part of the header itself: one
file alone, for this version of LibTorch.
"""

import argparse
import pathlib
import re
import shutil

INCLUDE = pathlib.Path(__file__).resolve().parent.parent / "include"
SHIM = INCLUDE / "lockstep/detail/gloo_shim"
QUOTED = re.compile(r'#include "(lockstep/[^"]+)"')
GLOO = re.compile(r"#include <(gloo/[^>]+)>")
PROCESS_GROUP_GLOO = "torch/csrc/distributed/c10d/ProcessGroupGloo.hpp"


class Amalgamation:
    """The lines of the header, in the order in which a compiler would read those of the headers."""

    def __init__(self, torch: pathlib.Path | None) -> None:
        self.torch = torch
        self.lines: list[str] = []
        self.seen: set[str] = set()  # read by a compiler whatever it defines
        self.seen_if: set[str] = set()  # read only under a condition
        self.guards: set[str] = set()

    def add(self, header: str, condition: bool = False) -> None:
        """Appends `header`, and before its own lines those that it includes, unless it was read before."""
        if header in self.seen or (condition and header in self.seen_if):
            return
        # A header that is first read under a condition may be read again without it.
        guard = condition or header in self.seen_if
        (self.seen_if if condition else self.seen).add(header)
        self.lines.append(f"// {'-' * 4} {header}")
        if guard:
            macro = "LOCKSTEP_SINGLE_" + re.sub(r"\W", "_", header.removeprefix("lockstep/")).upper()
            self.lines += [f"#ifndef {macro}", f"#define {macro}"]
        text = (INCLUDE / header).read_text()
        if header == "lockstep/detail/process_group_gloo.hpp" and self.torch:
            text = self.inlined_process_group_gloo(text)
        # Header-only: the definitions follow the declarations.
        text = re.sub(r'#ifndef LOCKSTEP_COMPILED\n(#include "[^"]+-inl\.hpp"\n)#endif\n', r"\1", text)
        depth = 0
        for line in text.splitlines():
            if re.match(r"#\s*if", line):
                depth += 1
            elif re.match(r"#\s*endif", line):
                depth -= 1
            included = QUOTED.match(line)
            if included:
                self.add(included[1], condition or depth > 0)
            elif line != "#pragma once":
                self.lines.append(line)
        if guard:
            self.lines.append("#endif")

    def inlined_process_group_gloo(self, text: str) -> str:
        """Returns process_group_gloo.hpp with the declarations and LibTorch's header in place of their includes."""
        assert self.torch
        version = torch_version(self.torch)
        theirs = (self.torch / "include" / PROCESS_GROUP_GLOO).read_text().replace("#pragma once\n", "")
        check = (
            "#include <torch/version.h>\n"
            + f"#if TORCH_VERSION_MAJOR != {version[0]} || TORCH_VERSION_MINOR != {version[1]}\n"
            + "#error \\\n"
            + f'    "lockstep: this header was made for LibTorch {".".join(version)}: make it anew with '
            + "packaging/amalgamate.py --torch ROOT for the LibTorch that is compiled with\"\n#endif\n"
        )
        text = re.sub(r"#if !__has_include\(<gloo/context.h>\)\n.*?#endif\n", check, text, count=1, flags=re.DOTALL)
        text = text.replace(
            f"#include <{PROCESS_GROUP_GLOO}>\n", f"// ProcessGroupGloo.hpp of LibTorch, under LibTorch's licence.\n{theirs}"
        )
        done = set()

        def declarations(match: re.Match[str]) -> str:
            name = match[1]
            if name in done:
                return ""
            done.add(name)
            return (SHIM / name).read_text().replace("#pragma once\n", "")

        return GLOO.sub(declarations, text)


def torch_version(torch: pathlib.Path) -> list[str]:
    """Returns the three numbers of the LibTorch in `torch`."""
    for name in ("torch/headeronly/version.h", "torch/csrc/api/include/torch/version.h"):
        path = torch / "include" / name
        numbers = re.findall(r"define TORCH_VERSION_(?:MAJOR|MINOR|PATCH) +(\d+)", path.read_text()) if path.exists() else []
        if numbers:
            return numbers
    raise SystemExit(f"amalgamate.py: there is no LibTorch in {torch}: give the folder that holds its include/")


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes lockstep as one header.")
    parser.add_argument("--torch", type=pathlib.Path, metavar="ROOT", help="make one file alone, for this LibTorch")
    parser.add_argument("folder", type=pathlib.Path, metavar="FOLDER")
    parser.add_argument("headers", nargs="*", metavar="HEADER", default=["lockstep/lockstep.hpp"])
    arguments = parser.parse_args()

    cmake = (INCLUDE.parent / "CMakeLists.txt").read_text()
    version = re.search(r"project\(lockstep VERSION ([\d.]+)", cmake)
    assert version
    result = Amalgamation(arguments.torch)
    result.lines = [
        f"// lockstep {version[1]} as one header, made by packaging/amalgamate.py.",
        *(f"// {line}".rstrip() for line in (INCLUDE.parent / "LICENSE").read_text().splitlines()),
        "#pragma once",
        "#ifdef LOCKSTEP_COMPILED",
        '#error "lockstep: the single header is header-only: leave LOCKSTEP_COMPILED undefined"',
        "#endif",
    ]
    for header in arguments.headers:
        result.add(header)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    target = arguments.folder / "lockstep.hpp"
    target.write_text("\n".join(result.lines) + "\n")
    if not arguments.torch:
        shutil.copytree(SHIM / "gloo", arguments.folder / "gloo", dirs_exist_ok=True)
    print(f"{target}: {len(result.lines):,} lines of {len(result.seen | result.seen_if)} headers")


main()

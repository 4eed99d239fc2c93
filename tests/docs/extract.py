"""The C++ blocks of the pages as sources.

usage: extract.py ROOT FOLDER CUDA PAGE...     CUDA: whether the blocks that need it are compiled, ON or OFF

Writes snippets.cpp, snippets_cuda.cpp, a file for each block with a main, what the pages show as printed, left_out.txt, and blocks.cmake,
which sets docs_programs and docs_outputs ("PROGRAM|ARGUMENTS"). Each line keeps its page and number, so that the compiler names them.

A block is one of these:
  ```cpp                       statements: the body of a function. The includes move to the top of the file.
  ```cpp declarations          at namespace scope; the later blocks of the page see them
  ```cpp cuda                  statements that need the target lockstep_cuda: in snippets_cuda.cpp, or left out
  ```cpp, with int main(       a program of its own
  ```cpp mpi, with int main(   the same with the target lockstep_mpi
  ```cpp no-compile: REASON    left out
Lines that a reader does not need are in a comment, which does not show: <!-- cpp ... --> before a block of statements adds to its
beginning, and <!-- cpp declarations ... --> is as above. preamble.hpp declares what the statements of all pages use.

<!-- output: COMMAND LINE --> and a fenced block: what the last program before it prints with these arguments.
"""

import pathlib
import re
import sys

BLOCK = re.compile(
    r"^ *(?:(?P<kind>```cpp|<!-- cpp)(?P<info>.*)\n(?P<text>(?:.*\n)*?) *(?:```|.*?-->)$|<!-- output: *(?P<arguments>.*?) *-->\n```\n"
    r"(?P<output>(?:.*\n)*?)```$)", re.M)  # fmt: skip


def write(path, text):
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def main():
    root, folder, cuda, *pages = sys.argv[1:]
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    sources, includes = {"": "", "_cuda": ""}, {"": {}, "_cuda": {}}
    programs, mpi_programs, outputs, left_out, count = [], [], [], [], 0
    for page in pages:
        whole = pathlib.Path(root, page).read_text()
        if other := re.search(r"```(c\+\+|C\+\+|cxx|CPP|cc)", whole):
            sys.exit(f"{page}: write ```cpp, not {other[0]}, so that the block is compiled")
        name = re.sub(r"[^A-Za-z0-9]", "_", page.removesuffix(".md").removeprefix("docs/"))
        setup, number, program = "", 0, None
        for block in BLOCK.finditer(whole):
            first = whole.count("\n", 0, block.start()) + 2
            if block["output"] is not None:
                if not program:
                    sys.exit(f"{page}:{first}: an output without a program before it")
                write(folder / f"output_{len(outputs)}.txt", block["output"])
                outputs.append(f"{program}|{block['arguments']}")
                continue
            info, text, hidden = block["info"].strip(), block["text"], block["kind"] != "```cpp"
            place = f'#line {first} "{page}"\n'
            count += not hidden
            if re.match("no-compile: ..", info):
                left_out.append(f"{page}:{first}: {info}")
            elif "int main(" in text and info in ("", "mpi") and not hidden:
                number += 1
                program = f"docs_{name}_{number}"
                write(folder / f"{program}.cpp", place + text)
                (mpi_programs if info else programs).append(program)
            else:
                kind = "_cuda" if info == "cuda" else ""
                if kind and cuda != "ON":
                    left_out.append(f"{page}:{first}: needs lockstep::cuda, which is not built")
                includes[kind] |= dict.fromkeys(re.findall("#include .*", text))
                text = re.sub("#include .*", "", text)
                if info == "declarations":
                    sources[""] += f"namespace docs::page_{name} {{\n{place}{text}}}\n"
                elif info not in ("", "cuda"):
                    sys.exit(f"{page}:{first}: unknown kind of block: cpp {info}")
                elif hidden:
                    setup += place + text
                else:
                    sources[kind] += (f"namespace docs::page_{name} {{\nstatic void lines_from_{first}() {{\n{setup}{place}{text}}}\n}}\n")
                    setup = ""
        if setup:
            sys.exit(f"{page}: hidden lines without a block after them")
    for kind in sources:
        write(folder / f"snippets{kind}.cpp", '#include "docs/preamble.hpp"\n' + "\n".join(includes[kind]) + "\n" + sources[kind])
    text = "".join(f"{line}\n" for line in left_out)
    write(folder / "left_out.txt", f"{count} C++ blocks in the pages, of which {len(left_out)} are not compiled:\n{text}")
    write(folder / "blocks.cmake", f"set(docs_programs {' '.join(programs)})\nset(docs_mpi_programs {' '.join(mpi_programs)})\nset(docs_outputs {' '.join(f'[[{o}]]' for o in outputs)})\n")


main()

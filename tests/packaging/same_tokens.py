"""Compares two preprocessed files token by token; line markers, and the file names and line numbers of TORCH_CHECK, aside.

usage: same_tokens.py FILE FILE
"""

import re
import sys


def tokens(name: str) -> list[str]:
    with open(name) as file:
        text = re.sub(r"^# \d+ .*$", "", file.read(), flags=re.MULTILINE)
    text = re.sub(r'"[^"\n]*/lockstep[^"\n]*\.hpp", static_cast<uint32_t>\(\d+\)', "HERE", text)
    text = re.sub(r'"/[^"\\\n]*\.h(pp)?', '"FILE', text)
    # Spaces between tokens differ where a macro comes of a folder given by -I, and not by -isystem.
    return re.findall(r'"(?:\\.|[^"\\\n])*"|\w+|[^\w\s]', text)


one, other = (tokens(name) for name in sys.argv[1:])
for at, (left, right) in enumerate(zip(one, other)):
    if left != right:
        sys.exit(f"token {at} differs: {' '.join(one[at - 10 : at + 10])}\nand: {' '.join(other[at - 10 : at + 10])}")
if len(one) != len(other):
    sys.exit(f"{len(one):,} tokens and {len(other):,}")
lockstep = sum("lockstep" in token for token in one)
if lockstep < 100:
    sys.exit(f"only {lockstep} tokens hold lockstep's name: these are not lockstep's headers")
print(f"{len(one):,} tokens are equal")

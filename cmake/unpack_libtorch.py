"""Unpacks the headers and the CPU libraries out of the wheels of torch and of the two CUDA libraries beside it.

usage: unpack_libtorch.py FOLDER WHEEL...
"""

import re
import sys
import zipfile

WANTED = re.compile(
    r"torch/(include|lib|share)/|torch\.libs/|torch/version\.py$|torch-[^/]*/licenses?/|nvidia/.*/lib/lib(cudart|cupti)\.so"
)
# Python's and CUDA's parts, most of the size.
UNWANTED = re.compile(
    r"torch/lib/(libtorch_cuda|libtorch_python|libtorch_nvshmem|libc10_cuda|libcaffe2_nvrtc|libtorch\.so"
    r"|libtorch_global_deps|libshm)"
)


def main() -> None:
    folder, wheels = sys.argv[1], sys.argv[2:]
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                if WANTED.match(member) and not UNWANTED.match(member):
                    archive.extract(member, folder)


main()

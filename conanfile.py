"""lockstep for Conan 2: conan create . --build=missing -s compiler.cppstd=20"""

import os
import re

from conan import ConanFile
from conan.errors import ConanInvalidConfiguration
from conan.tools.build import check_min_cppstd
from conan.tools.cmake import CMake, CMakeToolchain, cmake_layout
from conan.tools.files import load

required_conan_version = ">=2.1"


class LockstepConan(ConanFile):
    name = "lockstep"
    description = "Distributed data-parallel training on LibTorch"
    license = "MIT"
    topics = ("libtorch", "pytorch", "distributed", "header-only")
    package_type = "header-library"
    settings = "os", "arch", "compiler", "build_type"
    # libtorch: require Conan's package of this name. Conan Center builds it without torch.distributed, so the default is a
    # LibTorch that lockstep finds where the program is built (Torch_ROOT, Debian's, that of python3).
    options = {"libtorch": [True, False]}
    default_options = {"libtorch": False, "fmt/*:header_only": True}
    exports_sources = (
        "CMakeLists.txt", "cmake/*", "include/*", "docs/*", "examples/*", "README.md", "CHANGELOG.md",
        "CONTRIBUTING.md", "LICENSE",
    )
    no_copy_source = True
    test_package_folder = os.path.join("packaging", "conan", "test_package")

    def set_version(self):
        text = load(self, os.path.join(self.recipe_folder, "CMakeLists.txt"))
        self.version = re.search(r"project\(lockstep VERSION ([\d.]+)", text)[1]

    def layout(self):
        cmake_layout(self, src_folder=".")

    def requirements(self):
        self.requires("fmt/[>=9]")
        self.requires("zlib/[>=1.2.11 <2]")
        if self.options.libtorch:
            self.requires("libtorch/[>=2.6]")

    def validate(self):
        if self.settings.os != "Linux":
            raise ConanInvalidConfiguration(f"lockstep runs on Linux, not on {self.settings.os}")
        check_min_cppstd(self, 20)

    def package_id(self):
        self.info.clear()

    def generate(self):
        toolchain = CMakeToolchain(self)
        toolchain.user_presets_path = False
        toolchain.cache_variables["LOCKSTEP_BUILD_TESTS"] = False
        toolchain.cache_variables["LOCKSTEP_BUILD_EXAMPLES"] = False
        toolchain.generate()

    def build(self):
        CMake(self).configure()

    def package(self):
        CMake(self).install()

    def package_info(self):
        # The package's own lockstepConfig.cmake: it finds LibTorch and makes lockstep::compiled and lockstep::cuda.
        self.cpp_info.set_property("cmake_find_mode", "none")
        self.cpp_info.builddirs = [os.path.join("share", "cmake", "lockstep")]
        self.cpp_info.includedirs = [os.path.join("include", "lockstep", "detail", "gloo_shim"), "include"]
        self.cpp_info.bindirs = []
        self.cpp_info.libdirs = []
        if self.options.libtorch:
            self.buildenv_info.define_path("Torch_ROOT", self.dependencies["libtorch"].package_folder)

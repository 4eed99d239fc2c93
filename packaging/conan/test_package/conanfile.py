"""Builds a program with the package and runs it on two ranks."""

import os

from conan import ConanFile
from conan.tools.build import can_run
from conan.tools.cmake import CMake, CMakeDeps, CMakeToolchain, cmake_layout


class LockstepTestPackage(ConanFile):
    settings = "os", "arch", "compiler", "build_type"

    def requirements(self):
        self.requires(self.tested_reference_str)

    def layout(self):
        cmake_layout(self)

    def generate(self):
        CMakeDeps(self).generate()
        toolchain = CMakeToolchain(self)
        toolchain.user_presets_path = False  # leaves this folder as it is
        toolchain.generate()

    @property
    def _targets(self):
        """Targets to build instead of the program, which then does not run."""
        return self.conf.get("user.lockstep:targets", default=[], check_type=list)

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        if not self._targets:
            cmake.build()
        for target in self._targets:
            cmake.build(target=target)

    def test(self):
        if can_run(self) and not self._targets:
            self.run(os.path.join(self.cpp.build.bindir, "program") + " --nproc 2", env="conanrun")

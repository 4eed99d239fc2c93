#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>

/// A device that is none, of which LibTorch knows a default generator only: to see what is done with those of
/// GPUs.
inline const at::Device played_device(at::kPrivateUse1, 0);

struct PlayedDevice final : at::PrivateUse1HooksInterface {
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return generator; }
  void init() const override {}

  at::Generator generator = at::detail::createCPUGenerator(1);
};

/// Makes LibTorch know of it; once for the process.
inline void play_device() {
  static auto* device = [] {
    auto* made = new PlayedDevice;
    at::RegisterPrivateUse1HooksInterface(made);
    return made;
  }();
  (void)device;
}

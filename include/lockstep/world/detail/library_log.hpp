#pragma once

#include <algorithm>
#include <cstdio>
#include <string>

#include <c10/util/Exception.h>
#include <c10/util/Logging.h>

#include "lockstep/detail/linkage.hpp"
#include "lockstep/world/detail/environment.hpp"

namespace lockstep::inline v0_1::detail {

/// Prints each TORCH_WARN on one line.
struct PlainWarnings : c10::WarningHandler {
  void process(const c10::Warning& warning) override {
    const std::string line = "warning: " + warning.msg() + "\n";
    std::fwrite(line.data(), 1, line.size(), stderr);
  }
};

/// Stops c10d from logging a stack trace for each connection that ends with a store: lockstep's own error
/// explains it. TORCH_WARN of the calling thread is still printed. No-op if TORCH_CPP_LOG_LEVEL is set.
LOCKSTEP_PROCESS_WIDE inline void quiet_library_log() {
  if (process_variable("TORCH_CPP_LOG_LEVEL")) return;
  constexpr int error = 2;  // its name differs between versions of LibTorch, and with glog
  FLAGS_caffe2_log_level = std::max<int>(FLAGS_caffe2_log_level, error);
  static PlainWarnings warnings;
  c10::WarningUtils::set_warning_handler(&warnings);
}

}  // namespace lockstep::inline v0_1::detail

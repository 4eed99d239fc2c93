#pragma once

#include <unistd.h>

#include <cstdlib>
#include <string>

#include "support/catch.hpp"

namespace lockstep_test {

/// The torchrun beside LOCKSTEP_PYTHON; empty, with the reason printed, where there is none.
inline std::string torchrun() {
  const char* python = std::getenv("LOCKSTEP_PYTHON");
  const std::string path = python ? python : "";
  const auto found = path.substr(0, path.rfind('/') + 1) + "torchrun";
  if (!path.empty() && access(found.c_str(), X_OK) == 0) return found;
  WARN("SKIPPED: no torchrun beside LOCKSTEP_PYTHON='" << path << "'");
  return {};
}

}  // namespace lockstep_test

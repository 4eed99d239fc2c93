#pragma once

#include <initializer_list>
#include <vector>

namespace lockstep_test {

/// Sizes in bytes as DdpOptions::bucket_cap_mb takes them, exactly.
inline std::vector<double> mib(std::initializer_list<double> bytes) {
  std::vector<double> sizes;
  for (const double size : bytes) sizes.push_back(size / (1 << 20));
  return sizes;
}

}  // namespace lockstep_test

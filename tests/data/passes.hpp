#pragma once

#include <cstddef>
#include <vector>

#include "support/archive.hpp"

/// What tests of all samplers do.
namespace lockstep_test {

/// The rest of a sampler's pass.
template <class S>
std::vector<std::size_t> all(S& sampler, std::size_t batch_size = 7) {
  std::vector<std::size_t> indices;
  while (const auto batch = sampler.next(batch_size))
    indices.insert(indices.end(), batch->begin(), batch->end());
  return indices;
}

/// A pass from where `reset` puts it.
template <class S>
std::vector<std::size_t> pass(S& sampler) {
  sampler.reset();
  return all(sampler);
}

/// Saves one sampler and loads another from that.
template <class S>
void carry(const S& from, S& to) {
  load(to, saved(from));
}

}  // namespace lockstep_test

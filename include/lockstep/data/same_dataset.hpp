#pragma once

#include <ATen/ops/empty.h>

#include <optional>

#include "lockstep/comm/agreement.hpp"
#include "lockstep/comm/communicator.hpp"
#include "lockstep/data/dataset.hpp"
#include "lockstep/data/generator.hpp"
#include "lockstep/detail/format.hpp"

namespace lockstep::detail {

inline std::uint64_t hash_bytes(std::uint64_t hash, const void* bytes, std::size_t count) {
  const auto* at = static_cast<const unsigned char*>(bytes);
  for (std::size_t i = 0; i < count; ++i) hash = (hash ^ at[i]) * 0x100000001b3u;  // FNV-1a
  return mix_bits(hash);
}

inline std::uint64_t hash_value(std::uint64_t hash, const at::Tensor& tensor) {
  const at::Tensor dense = tensor.cpu().contiguous();
  const auto type = static_cast<std::int64_t>(dense.scalar_type());
  hash = hash_bytes(hash, &type, sizeof type);
  hash = hash_bytes(hash, dense.sizes().data(), dense.sizes().size() * sizeof(std::int64_t));
  return hash_bytes(hash, dense.const_data_ptr(), dense.nbytes());
}
template <class Data, class Target>
std::uint64_t hash_value(std::uint64_t hash, const torch::data::Example<Data, Target>& example) {
  hash = hash_value(hash, example.data);
  if constexpr (!std::is_void_v<Target>) hash = hash_value(hash, example.target);
  return hash;
}

}  // namespace lockstep::detail

namespace lockstep {

/// Returns a hash of the length and of the shapes, dtypes and bytes of up to `samples` samples, spread from
/// the first to the last. Detects another dataset or another order, but not every changed byte. Datasets that
/// draw their samples at random have no stable fingerprint.
template <Dataset D>
requires requires(BatchOf<D> batch) {
  detail::hash_value(0, batch);
}
std::uint64_t fingerprint(D& dataset, std::size_t samples = 16) {
  const std::size_t length = dataset_size(dataset);
  std::uint64_t hash = detail::hash_bytes(0xcbf29ce484222325u, &length, sizeof length);
  samples = std::min(samples, length);
  for (std::size_t i = 0; i < samples; ++i) {
    const std::size_t index = samples == 1 ? 0 : i * (length - 1) / (samples - 1);
    hash = detail::hash_value(hash, make_batch(dataset, c10::ArrayRef<std::size_t>(index)));
  }
  return hash;
}

}  // namespace lockstep

namespace lockstep {

/// Compares the length of the dataset over the ranks of `comm`, and its fingerprint if there is one.
/// Collective. Throws the same MismatchError on every rank if they differ: samplers of different lengths run
/// out of step and hang.
template <Gathering C>
void check_same_dataset(C& comm, std::size_t length,
                        std::optional<std::uint64_t> fingerprint = std::nullopt) {
  NamedValues values{{"its length", detail::formatted("{}", length)}};
  if (fingerprint) values.emplace_back("its fingerprint", detail::formatted("{:016x}", *fingerprint));
  require_equal(comm, values, "the ranks do not have the same dataset", "give every rank the same files");
}

/// Compares the dataset itself: its length, and its fingerprint if its samples can be hashed. Collective.
template <Gathering C, Dataset D>
void check_same_dataset(C& comm, D& dataset) {
  if constexpr (requires { fingerprint(dataset); })
    check_same_dataset(comm, dataset_size(dataset), fingerprint(dataset));
  else
    check_same_dataset(comm, dataset_size(dataset));
}

}  // namespace lockstep

#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/stack.h>
#include <c10/util/ArrayRef.h>
#include <torch/data/example.h>

#include "lockstep/comm/agreement.hpp"
#include "lockstep/comm/communicator.hpp"
#include "lockstep/data/generator.hpp"
#include "lockstep/detail/bytes.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/detail/served_call.hpp"
#include "lockstep/error.hpp"

namespace lockstep::inline v0_1::detail {

template <class B>
struct BatchTensors;  // undefined for types without known tensors

template <class B>
concept HoldsTensors = requires(B& batch, void (*visit)(at::Tensor&)) {
  BatchTensors<B>::each(batch, visit);
};

template <>
struct BatchTensors<at::Tensor> {
  static void each(at::Tensor& tensor, auto& visit) {
    if (tensor.defined()) visit(tensor);
  }
};
template <class Data, class Target>
requires HoldsTensors<Data> && HoldsTensors<Target>
struct BatchTensors<torch::data::Example<Data, Target>> {
  static void each(torch::data::Example<Data, Target>& batch, auto& visit) {
    BatchTensors<Data>::each(batch.data, visit);
    BatchTensors<Target>::each(batch.target, visit);
  }
};
template <HoldsTensors Data>
struct BatchTensors<torch::data::Example<Data, torch::data::example::NoTarget>> {
  static void each(torch::data::Example<Data, torch::data::example::NoTarget>& batch, auto& visit) {
    BatchTensors<Data>::each(batch.data, visit);
  }
};
template <HoldsTensors T>
struct BatchTensors<std::vector<T>> {
  static void each(std::vector<T>& batch, auto& visit) {
    for (T& part : batch) BatchTensors<T>::each(part, visit);
  }
};
template <HoldsTensors T, std::size_t N>
struct BatchTensors<std::array<T, N>> {
  static void each(std::array<T, N>& batch, auto& visit) {
    for (T& part : batch) BatchTensors<T>::each(part, visit);
  }
};
template <HoldsTensors T>
struct BatchTensors<std::optional<T>> {
  static void each(std::optional<T>& batch, auto& visit) {
    if (batch) BatchTensors<T>::each(*batch, visit);
  }
};
template <HoldsTensors T>
struct BatchTensors<std::map<std::string, T>> {
  static void each(std::map<std::string, T>& batch, auto& visit) {
    for (auto& [name, part] : batch) BatchTensors<T>::each(part, visit);
  }
};
template <HoldsTensors... T>
struct BatchTensors<std::tuple<T...>> {
  static void each(std::tuple<T...>& batch, auto& visit) {
    std::apply([&](T&... parts) { (BatchTensors<T>::each(parts, visit), ...); }, batch);
  }
};
template <HoldsTensors First, HoldsTensors Second>
struct BatchTensors<std::pair<First, Second>> {
  static void each(std::pair<First, Second>& batch, auto& visit) {
    BatchTensors<First>::each(batch.first, visit);
    BatchTensors<Second>::each(batch.second, visit);
  }
};
// A user-defined batch type enumerates its tensors itself.
template <class B>
requires requires(B& batch, void (*visit)(at::Tensor&)) {
  batch.each_tensor(visit);
}
struct BatchTensors<B> {
  static void each(B& batch, auto& visit) { batch.each_tensor(visit); }
};

}  // namespace lockstep::inline v0_1::detail

namespace lockstep::inline v0_1 {

/// A batch type whose tensors can be enumerated: a tensor, an Example, a vector, array, optional, tuple or
/// pair of such types, a std::map from names to such types, or a type with `each_tensor(f)`, which calls
/// `f(tensor)` with a reference to each of its tensors.
template <class B>
concept TensorBatch = detail::HoldsTensors<B>;

/// Calls `visit(tensor)` with a reference to each defined tensor of a batch, which `visit` may replace.
template <TensorBatch B, class Visit>
void for_each_tensor(B& batch, Visit&& visit) {
  detail::BatchTensors<B>::each(batch, visit);
}

/// A sample, or a stacked batch of samples: `data` and `target`.
using Example = torch::data::Example<>;

/// A map-style dataset: `get(i)` returns sample i, 0 <= i < `size()`. Workers call it concurrently.
/// torch::data's datasets model it. The members need to be const only if the dataset is.
template <class D>
concept IndexedDataset = requires(D& dataset, std::size_t index) {
  { dataset.size() } -> std::convertible_to<std::optional<std::size_t>>;
  dataset.get(index);
};

/// A dataset that loads a whole batch: `get_batch(indices)` returns it stacked, or as a vector of examples,
/// in the order of the indices. Workers call it concurrently.
template <class D>
concept BatchedDataset = requires(D& dataset, c10::ArrayRef<std::size_t> indices) {
  { dataset.size() } -> std::convertible_to<std::optional<std::size_t>>;
  dataset.get_batch(indices);
};

/// A dataset of either form.
template <class D>
concept Dataset = IndexedDataset<D> || BatchedDataset<D>;

/// Returns the number of samples. Throws DataError if the dataset does not know it (torch::data's datasets
/// return an optional).
template <class D>
requires Dataset<std::remove_reference_t<D>> std::size_t dataset_size(D&& dataset) {
  const std::optional<std::size_t> size = dataset.size();
  if (!size)
    throw DataError(
        "the dataset does not know its size, so it cannot be partitioned over the ranks: give a dataset with "
        "a size, or a stream, which has next()");
  return *size;
}

/// A dataset of two tensors in memory, both [N, ...]. Loads a batch by one index_select per tensor. Copies
/// share the tensors. Counterpart: torch.utils.data.TensorDataset.
class TensorDataset {
 public:
  /// Throws DataError if a tensor is undefined or has no dimension, or if their first dimensions differ.
  TensorDataset(at::Tensor data, at::Tensor target) : data_(std::move(data)), target_(std::move(target)) {
    if (!data_.defined() || !target_.defined() || data_.dim() == 0 || target_.dim() == 0)
      throw DataError("a TensorDataset needs data and target with a first dimension that counts the samples");
    if (data_.size(0) != target_.size(0))
      throw DataError(
          detail::formatted("a TensorDataset has {} samples and {} targets: give one target for each sample",
                            data_.size(0), target_.size(0)));
  }

  [[nodiscard]] std::size_t size() const { return static_cast<std::size_t>(data_.size(0)); }

  /// Returns sample `index` as views of the tensors.
  [[nodiscard]] Example get(std::size_t index) const {
    const auto i = static_cast<std::int64_t>(index);
    return {data_.select(0, i), target_.select(0, i)};
  }

  /// Returns a stacked copy of the samples `indices`.
  [[nodiscard]] Example get_batch(c10::ArrayRef<std::size_t> indices) const {
    // Indices are below a tensor's length, so size_t and int64 have the same bits.
    const at::Tensor index = at::from_blob(const_cast<std::size_t*>(indices.data()),
                                           {static_cast<std::int64_t>(indices.size())}, at::kLong);
    return {data_.index_select(0, index.to(data_.device())),
            target_.index_select(0, index.to(target_.device()))};
  }

  [[nodiscard]] const at::Tensor& data() const { return data_; }
  [[nodiscard]] const at::Tensor& target() const { return target_; }

 private:
  at::Tensor data_, target_;
};

/// Stacks Examples or TensorExamples into one batch, along a new first dimension. Returns a vector of any
/// other type unchanged. Counterpart: torch.utils.data.default_collate.
template <class E>
auto collate(std::vector<E> examples) {
  const auto stacked = [&](auto part) {  // a pointer to a member
    std::vector<at::Tensor> tensors;
    tensors.reserve(examples.size());
    for (E& example : examples) tensors.push_back(std::move(example.*part));
    return at::stack(tensors);
  };
  if constexpr (std::same_as<E, Example>) {
    return Example(stacked(&E::data), stacked(&E::target));
  } else if constexpr (std::same_as<E, torch::data::TensorExample>) {
    return E(stacked(&E::data));
  } else {
    return examples;
  }
}

/// Loads the samples `indices` of any dataset as one batch; uses `get_batch` if the dataset has it.
template <Dataset D>
auto make_batch(D& dataset, c10::ArrayRef<std::size_t> indices) {
  if constexpr (BatchedDataset<D>) {
    if constexpr (requires { lockstep::collate(dataset.get_batch(indices)); })
      return lockstep::collate(dataset.get_batch(indices));
    else
      return dataset.get_batch(indices);
  } else {
    std::vector<decltype(dataset.get(std::size_t{}))> examples;
    examples.reserve(indices.size());
    for (const std::size_t index : indices) examples.push_back(dataset.get(index));
    return collate(std::move(examples));
  }
}

/// The return type of `make_batch`.
template <Dataset D>
using BatchOf = decltype(make_batch(std::declval<D&>(), c10::ArrayRef<std::size_t>{}));

/// A data source of unknown length: `next()` returns this rank's next batch, or std::nullopt at the end of
/// its pass. The stream itself decides which data each rank gets.
///
/// Ranks may get batches of unequal size and run out at different times. A rank without data takes part in
/// the other ranks' steps with a weight of zero; all ranks stop together once none has data left. A rank has
/// no forward in such a step. For a model whose forward communicates (synchronized batch norm), every rank
/// therefore needs the same number of batches; otherwise all ranks throw DataError.
///
/// A stream with `set_epoch(e)` is repeatable: `set_epoch` is called before each pass with the epoch's
/// number. A stream without it has one pass. Used from the training thread only.
/// Counterpart: torch.utils.data.IterableDataset.
template <class S>
concept BatchStream = !Dataset<S> && requires(S & stream) {
  { std::optional(stream.next()) } -> std::same_as<std::remove_cvref_t<decltype(stream.next())>>;
};

/// A stream that supports several passes.
template <class S>
concept RepeatableStream = BatchStream<S> && requires(S& stream, std::int64_t epoch) {
  stream.set_epoch(epoch);
};

namespace detail {

template <class D>
auto batch_from(D& data) {
  if constexpr (Dataset<D>)
    return make_batch(data, {});
  else
    return std::move(*data.next());
}

/// A non-owning view of a dataset, for loaders, which hold their dataset by value.
template <Dataset D>
class DatasetView {
 public:
  explicit DatasetView(D& dataset) : dataset_(&dataset) {}

  [[nodiscard]] std::size_t size() const { return dataset_size(*dataset_); }
  decltype(auto) get(std::size_t index) const requires IndexedDataset<D> { return dataset_->get(index); }
  decltype(auto) get_batch(c10::ArrayRef<std::size_t> indices) const requires BatchedDataset<D> {
    return dataset_->get_batch(indices);
  }

 private:
  D* dataset_;
};

inline std::uint64_t hash_bytes(std::uint64_t hash, const void* bytes, std::size_t count) {
  return mix_bits(fnv1a({static_cast<const char*>(bytes), count}, hash));
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

}  // namespace detail

namespace detail {

/// The batch type of a dataset or of a stream.
template <class D>
requires Dataset<D> || BatchStream<D>
using BatchFrom = decltype(detail::batch_from(std::declval<D&>()));

}  // namespace detail

/// Returns a hash of the length and of the shapes, dtypes and bytes of up to `samples` samples, spread from
/// the first to the last. Detects another dataset or another order, but not every changed byte. Datasets that
/// draw their samples at random have no stable fingerprint.
template <Dataset D>
requires requires(BatchOf<D> batch) {
  detail::hash_value(0, batch);
}
std::uint64_t fingerprint(D& dataset, std::size_t samples = 16) {
  const std::size_t length = dataset_size(dataset);
  std::uint64_t hash = detail::hash_bytes(detail::fnv1a_basis, &length, sizeof length);
  samples = std::min(samples, length);
  for (std::size_t i = 0; i < samples; ++i) {
    const std::size_t index = samples == 1 ? 0 : i * (length - 1) / (samples - 1);
    hash = detail::hash_value(hash, make_batch(dataset, c10::ArrayRef<std::size_t>(index)));
  }
  return hash;
}

/// Compares the length of the dataset over the ranks of `comm`, and its fingerprint if there is one. Collective. Throws
/// the same MismatchError on every rank if they differ: samplers of different lengths run out of step and hang.
template <Communicator C>
void check_same_dataset(C& comm, std::size_t length,
                        std::optional<std::uint64_t> fingerprint = std::nullopt) {
  const detail::CallScope scope("check_same_dataset");
  NamedValues values{{"its length", detail::formatted("{}", length)}};
  if (fingerprint) values.emplace_back("its fingerprint", detail::formatted("{:016x}", *fingerprint));
  require_equal(comm, values, "the ranks do not have the same dataset", "give every rank the same files");
}

/// As above, with the length of `dataset`, and its fingerprint if its samples can be hashed. Collective.
template <Communicator C, Dataset D>
void check_same_dataset(C& comm, D& dataset) {
  if constexpr (requires { fingerprint(dataset); })
    check_same_dataset(comm, dataset_size(dataset), fingerprint(dataset));
  else
    check_same_dataset(comm, dataset_size(dataset));
}

}  // namespace lockstep::inline v0_1

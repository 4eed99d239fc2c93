#pragma once

#include <ATen/core/Tensor.h>
#include <torch/data/example.h>

#include <array>
#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace lockstep {

namespace detail {

template <class B>
struct BatchTensors;  // of what holds no tensors that anyone knows of

template <class B>
concept HoldsTensors = requires(B& batch, void (*visit)(at::Tensor&)) {
  BatchTensors<B>::each(batch, visit);
};

template <>
struct BatchTensors<at::Tensor> {
  template <class Visit>
  static void each(at::Tensor& tensor, Visit& visit) {
    if (tensor.defined()) visit(tensor);
  }
};
template <class Data, class Target>
requires HoldsTensors<Data> && HoldsTensors<Target>
struct BatchTensors<torch::data::Example<Data, Target>> {
  template <class Visit>
  static void each(torch::data::Example<Data, Target>& batch, Visit& visit) {
    BatchTensors<Data>::each(batch.data, visit);
    BatchTensors<Target>::each(batch.target, visit);
  }
};
template <HoldsTensors Data>
struct BatchTensors<torch::data::Example<Data, torch::data::example::NoTarget>> {
  template <class Visit>
  static void each(torch::data::Example<Data, torch::data::example::NoTarget>& batch, Visit& visit) {
    BatchTensors<Data>::each(batch.data, visit);
  }
};
template <class Range, class Visit>
void each_tensor_in(Range& range, Visit& visit) {
  for (auto& part : range) BatchTensors<std::remove_reference_t<decltype(part)>>::each(part, visit);
}
template <HoldsTensors T>
struct BatchTensors<std::vector<T>> {
  template <class Visit>
  static void each(std::vector<T>& batch, Visit& visit) {
    each_tensor_in(batch, visit);
  }
};
template <HoldsTensors T, std::size_t N>
struct BatchTensors<std::array<T, N>> {
  template <class Visit>
  static void each(std::array<T, N>& batch, Visit& visit) {
    each_tensor_in(batch, visit);
  }
};
template <HoldsTensors T>
struct BatchTensors<std::optional<T>> {
  template <class Visit>
  static void each(std::optional<T>& batch, Visit& visit) {
    if (batch) BatchTensors<T>::each(*batch, visit);
  }
};
template <HoldsTensors T>
struct BatchTensors<std::map<std::string, T>> {
  template <class Visit>
  static void each(std::map<std::string, T>& batch, Visit& visit) {
    for (auto& [name, part] : batch) BatchTensors<T>::each(part, visit);
  }
};
template <HoldsTensors... T>
struct BatchTensors<std::tuple<T...>> {
  template <class Visit>
  static void each(std::tuple<T...>& batch, Visit& visit) {
    std::apply([&](T&... parts) { (BatchTensors<T>::each(parts, visit), ...); }, batch);
  }
};
template <HoldsTensors First, HoldsTensors Second>
struct BatchTensors<std::pair<First, Second>> {
  template <class Visit>
  static void each(std::pair<First, Second>& batch, Visit& visit) {
    BatchTensors<First>::each(batch.first, visit);
    BatchTensors<Second>::each(batch.second, visit);
  }
};
// A batch of the user's own type says what is in it.
template <class B>
requires requires(B& batch, void (*visit)(at::Tensor&)) {
  batch.each_tensor(visit);
}
struct BatchTensors<B> {
  template <class Visit>
  static void each(B& batch, Visit& visit) {
    batch.each_tensor(visit);
  }
};

}  // namespace detail

/// A batch whose tensors can be found: a tensor, an Example, a vector, array, optional, tuple or pair of
/// such, a std::map from names to such, or a type with `each_tensor(f)`, which calls `f(tensor)` with a
/// reference to each of its tensors.
template <class B>
concept TensorBatch = detail::HoldsTensors<B>;

/// Calls `visit(tensor)` with each defined tensor of a batch, which may be replaced in place.
template <TensorBatch B, class Visit>
void for_each_tensor(B& batch, Visit&& visit) {
  detail::BatchTensors<B>::each(batch, visit);
}

}  // namespace lockstep

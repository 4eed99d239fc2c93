#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/GradMode.h>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/detail/fnv1a.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/grad/model.hpp"

namespace lockstep::detail {

/// Returns a checksum that changes when any one element changes: the sum of the elements' bits as integers,
/// which is exact in any order.
inline at::Tensor sum_of_bits(const at::Tensor& tensor) {
  const at::Tensor real = tensor.is_complex() ? at::view_as_real(tensor) : tensor;
  const std::size_t size = real.element_size();
  const at::ScalarType integer = size == 8   ? at::kLong
                                 : size == 4 ? at::kInt
                                 : size == 2 ? at::kShort
                                             : at::kByte;
  return real.view(integer).sum(at::kLong);
}

/// Returns the checksums of all parameters as bytes. Synchronizes with the device once.
inline std::string digest_of(const std::vector<NamedTensor>& parameters) {
  std::vector<at::Tensor> sums;
  for (const NamedTensor& parameter : parameters)
    sums.push_back(sum_of_bits(parameter.tensor).to(parameters[0].tensor.device(), /*non_blocking=*/true));
  const at::Tensor all = at::stack(sums).cpu();
  return {static_cast<const char*>(all.const_data_ptr()), all.nbytes()};
}

/// Returns the norm of the difference to rank 0's parameter, relative to the norm of rank 0's; 1 if that is
/// undefined. Collective.
template <Reducing Comm>
double relative_distance(const at::Tensor& parameter, Comm& comm) {
  at::Tensor first = parameter.detach().clone(at::MemoryFormat::Contiguous);
  comm.broadcast(first, 0).synchronize();
  const auto wide = [](const at::Tensor& tensor) {
    return tensor.to(tensor.is_complex() ? at::kComplexDouble : at::kDouble);
  };
  const auto norm = [](const at::Tensor& tensor) {
    return at::linalg_vector_norm(tensor).template item<double>();
  };
  const double distance = norm(wide(parameter.detach()) - wide(first)), length = norm(wide(first));
  if (distance == 0) return 0;
  return std::isfinite(distance) && length > 0 ? distance / length : 1;
}

}  // namespace lockstep::detail

namespace lockstep {

/// Compares the values of the parameters over all ranks. Collective.
///
/// Training steps keep the values equal. They diverge silently if the ranks' optimizers differ, one rank
/// alone loads a model, or gradients are changed on one rank. Sends 8 bytes per parameter, and rank 0's value
/// of each parameter that differs.
///
/// `parameters` must be the same on every rank except for their values. Returns the largest relative distance
/// of any rank's parameter from rank 0's: 0 if all bits are equal, and about the rounding error of the dtype
/// if the ranks' processors differ in kind. Throws the same MismatchError on every rank if it exceeds
/// `tolerance`.
template <class Comm>
requires Reducing<Comm> && Gathering<Comm>
double check_same_parameters(const std::vector<NamedTensor>& parameters, Comm& comm,
                             double tolerance = 1e-3) {
  if (comm.size() == 1 || parameters.empty()) return 0;
  const c10::NoGradGuard no_grad;
  const std::vector<std::string> digests = comm.all_gather_bytes(detail::digest_of(parameters));
  const std::size_t count = parameters.size();
  double worst = 0;
  std::string mine(count * sizeof(double), '\0');
  std::vector<std::size_t> differing;
  for (std::size_t i = 0; i < count; ++i)
    for (const std::string& digest : digests)
      if (std::memcmp(&digest[8 * i], &digests[0][8 * i], 8) != 0) {
        differing.push_back(i);
        break;
      }
  if (differing.empty()) return 0;
  for (const std::size_t i : differing) {
    const double distance = detail::relative_distance(parameters[i].tensor, comm);
    std::memcpy(&mine[8 * i], &distance, 8);
  }
  const std::vector<std::string> distances = comm.all_gather_bytes(mine);
  std::size_t farthest = differing[0], rank = 0;
  for (const std::size_t i : differing)
    for (std::size_t r = 0; r < distances.size(); ++r) {
      double distance = 0;
      std::memcpy(&distance, &distances[r][8 * i], 8);
      if (distance <= worst) continue;
      worst = distance;
      farthest = i;
      rank = r;
    }
  if (worst > tolerance) {
    const detail::RankNames name_of(comm);
    throw MismatchError(detail::formatted(
        "the ranks' models have parted: {} of {} parameters differ, most of all parameter {} '{}' on rank "
        "{}, "
        "which is {:.2g} of its norm away from rank {}'s; load, initialise and step the model alike on every "
        "rank, and change gradients only in the same way",
        differing.size(), count, farthest, parameters[farthest].name, name_of(rank), worst, name_of(0)));
  }
  return worst;
}

}  // namespace lockstep

namespace lockstep::detail {

/// The properties of one parameter or buffer that must be equal on every rank.
struct TensorDescription {
  std::string name, shape, dtype, trait;
  bool operator==(const TensorDescription&) const = default;
};

/// The properties of a model that must be equal on every rank, in registration order.
struct ModelDescription {
  std::vector<TensorDescription> parameters, buffers;
};

inline std::string list_text(c10::IntArrayRef numbers) {
  std::string text = "[";
  for (const std::int64_t number : numbers) text += (text.size() > 1 ? ", " : "") + std::to_string(number);
  return text + "]";
}

inline TensorDescription describe(const NamedTensor& item) {
  const at::Tensor& tensor = item.tensor;
  std::string trait;
  if (!tensor.is_contiguous()) trait = " with strides " + list_text(tensor.strides());
  return {item.name, list_text(tensor.sizes()), dtype_name(tensor.scalar_type()), std::move(trait)};
}

inline ModelDescription describe(const std::vector<NamedTensor>& parameters,
                                 const std::vector<NamedTensor>& buffers) {
  ModelDescription model;
  for (const NamedTensor& item : parameters) {
    model.parameters.push_back(describe(item));
    if (!item.tensor.requires_grad()) model.parameters.back().trait += ", without gradient";
  }
  for (const NamedTensor& item : buffers) model.buffers.push_back(describe(item));
  return model;
}

/// Returns the description as bytes: all fields in order, each terminated by a zero byte.
inline std::string serialize(const ModelDescription& model) {
  std::string bytes;
  auto put = [&](const std::string& field) { bytes.append(field.c_str(), field.size() + 1); };
  put(std::to_string(model.parameters.size()));
  for (const auto* list : {&model.parameters, &model.buffers})
    for (const TensorDescription& item : *list)
      for (const std::string* field : {&item.name, &item.shape, &item.dtype, &item.trait}) put(*field);
  return bytes;
}

inline ModelDescription deserialize(std::string_view bytes) {
  auto take = [&] {
    const std::string_view field = bytes.substr(0, bytes.find('\0'));
    bytes.remove_prefix(field.size() + 1);
    return std::string(field);
  };
  ModelDescription model;
  const std::size_t parameters = std::stoul(take());
  while (!bytes.empty()) {
    auto& list = model.parameters.size() < parameters ? model.parameters : model.buffers;
    std::array<std::string, 4> fields;
    for (std::string& field : fields) field = take();
    list.push_back({fields[0], fields[1], fields[2], fields[3]});
  }
  return model;
}

/// Returns a short text that differs for different `bytes`.
inline std::string digest(std::string_view bytes) {
  return detail::formatted("{:016x}{:x}", fnv1a(bytes), bytes.size());
}

/// Returns the first difference between the lists of ranks `first` and `rank` as text, or nullopt if they are
/// equal.
inline std::optional<std::string> difference(std::string_view kind,
                                             const std::vector<TensorDescription>& zero,
                                             const std::vector<TensorDescription>& other, int first,
                                             int rank) {
  auto text = [](const TensorDescription& item, bool with_name) {
    return detail::formatted("{}{} {}{}", with_name ? detail::formatted("'{}' ", item.name) : "", item.shape,
                             item.dtype, item.trait);
  };
  for (std::size_t i = 0; i < std::min(zero.size(), other.size()); ++i) {
    if (zero[i] == other[i]) continue;
    const bool named = zero[i].name != other[i].name;
    return detail::formatted("{} {}{}: rank {} {}, rank {} {}", kind, i,
                             named ? "" : detail::formatted(" '{}'", zero[i].name), first,
                             text(zero[i], named), rank, text(other[i], named));
  }
  if (zero.size() == other.size()) return std::nullopt;
  const bool more = zero.size() > other.size();
  const TensorDescription& extra = more ? zero[other.size()] : other[zero.size()];
  return detail::formatted("rank {} has {} {}s, rank {} has {}: {} {} {} is on rank {} alone", first,
                           zero.size(), kind, rank, other.size(), kind, std::min(zero.size(), other.size()),
                           text(extra, true), more ? first : rank);
}

/// Returns one sentence about the first difference between the ranks' models, the same on every rank, or
/// nullopt if they are equal.
inline std::optional<std::string> model_difference(const std::vector<std::string>& serialized,
                                                   const RankNames& name_of = {}) {
  const ModelDescription zero = deserialize(serialized.at(0));
  for (std::size_t rank = 1; rank < serialized.size(); ++rank) {
    if (serialized[rank] == serialized[0]) continue;
    const ModelDescription other = deserialize(serialized[rank]);
    auto text = difference("parameter", zero.parameters, other.parameters, name_of(0), name_of(rank));
    if (!text) text = difference("buffer", zero.buffers, other.buffers, name_of(0), name_of(rank));
    if (text) return "the models of the ranks differ: " + *text + "; build the same model on every rank";
  }
  return std::nullopt;
}

}  // namespace lockstep::detail

namespace lockstep {

/// Compares the parameters and buffers of all ranks: count, names, shapes, dtypes, layout, order and
/// requires_grad. Collective. Throws the same MismatchError on every rank, with the parameter's name and its
/// properties on two ranks.
template <Gathering Comm>
void check_same_model(const std::vector<NamedTensor>& parameters, const std::vector<NamedTensor>& buffers,
                      Comm& comm) {
  const std::string mine = detail::serialize(detail::describe(parameters, buffers));
  const std::vector<std::string> digests = comm.all_gather_bytes(detail::digest(mine));
  bool equal = true;
  for (const std::string& digest : digests) equal = equal && digest == digests[0];
  if (equal) return;
  if (const auto text = detail::model_difference(comm.all_gather_bytes(mine), detail::RankNames(comm)))
    throw MismatchError(*text);
}

}  // namespace lockstep

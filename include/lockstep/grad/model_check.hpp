#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/grad/named_tensors.hpp"

namespace lockstep {

namespace detail {

/// What must be equal on every rank of one parameter or buffer.
struct TensorDescription {
  std::string name, shape, dtype, trait;
  bool operator==(const TensorDescription&) const = default;
};

/// What must be equal on every rank of a model: its parameters, then its buffers, in registration order.
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

/// The description as bytes, one field after the other, each ended by a zero byte.
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

/// FNV-1a. Every rank runs the same build, but std::hash promises nothing even then.
inline std::string digest(std::string_view bytes) {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (const char byte : bytes) hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001b3;
  return fmt::format("{:016x}{:x}", hash, bytes.size());
}

/// The first difference between the first rank's list and another rank's in words, none where they are equal.
inline std::optional<std::string> difference(std::string_view kind,
                                             const std::vector<TensorDescription>& zero,
                                             const std::vector<TensorDescription>& other, int first,
                                             int rank) {
  auto text = [](const TensorDescription& item, bool with_name) {
    return fmt::format("{}{} {}{}", with_name ? fmt::format("'{}' ", item.name) : "", item.shape, item.dtype,
                       item.trait);
  };
  for (std::size_t i = 0; i < std::min(zero.size(), other.size()); ++i) {
    if (zero[i] == other[i]) continue;
    const bool named = zero[i].name != other[i].name;
    return fmt::format("{} {}{}: rank {} {}, rank {} {}", kind, i,
                       named ? "" : fmt::format(" '{}'", zero[i].name), first, text(zero[i], named), rank,
                       text(other[i], named));
  }
  if (zero.size() == other.size()) return std::nullopt;
  const bool more = zero.size() > other.size();
  const TensorDescription& extra = more ? zero[other.size()] : other[zero.size()];
  return fmt::format("rank {} has {} {}s, rank {} has {}: {} {} {} is on rank {} alone", first, zero.size(),
                     kind, rank, other.size(), kind, std::min(zero.size(), other.size()), text(extra, true),
                     more ? first : rank);
}

/// One sentence about how the models of the ranks differ, the same whoever asks; none where they are equal.
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

}  // namespace detail

/// Compares parameters and buffers of all ranks by count, name, shape, dtype, layout, order and
/// requires_grad. Collective. Throws one and the same MismatchError on every rank, naming the parameter and
/// what two ranks have of it.
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

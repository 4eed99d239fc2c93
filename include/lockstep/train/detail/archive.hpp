#pragma once

#include <caffe2/serialize/inline_container.h>
#include <caffe2/serialize/read_adapter_interface.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>
#include <torch/serialize/archive.h>

#include "lockstep/comm/agreement.hpp"
#include "lockstep/detail/bytes.hpp"
#include "lockstep/detail/describe.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/detail/libtorch_version.hpp"
#include "lockstep/detail/lists.hpp"
#include "lockstep/error.hpp"
#include "lockstep/grad/model.hpp"

namespace lockstep::inline v0_1::detail {

/// Adapts bytes in memory to LibTorch's reader.
class MemoryReader : public caffe2::serialize::ReadAdapterInterface {
 public:
  /// `bytes` must outlive the reader.
  explicit MemoryReader(std::string_view bytes) : bytes_(bytes) {}
  [[nodiscard]] std::size_t size() const override { return bytes_.size(); }
  std::size_t read(std::uint64_t offset, void* to, std::size_t count,
                   const char* /*what*/ = "") const override {
    if (offset >= bytes_.size()) return 0;
    count = std::min<std::size_t>(count, bytes_.size() - offset);
    std::memcpy(to, bytes_.data() + offset, count);
    return count;
  }

 private:
  std::string_view bytes_;
};

/// Verifies the CRC-32 of each record of an archive. LibTorch writes these checksums, and its reader ignores them. The
/// records must lie in the archive without overlaps. Those that are compressed, which hold code, have at most 64 MiB in
/// all. Throws CheckpointError with the offset of the damage or truncation, or if the bytes are not an archive.
inline void check_archive(std::string_view bytes) {
  if (!bytes.starts_with("PK\3\4")) throw CheckpointError("it is no archive that LibTorch wrote");
  const auto refuse = [](std::uint64_t offset, const std::string& what) {
    throw CheckpointError(detail::formatted(
        "it is damaged or cut short at offset {}: {}; restore it from a copy", offset, what));
  };
  const auto number = [&]<class Number>(std::uint64_t offset, Number) -> std::uint64_t {
    if (offset > bytes.size() || bytes.size() - offset < sizeof(Number))
      refuse(bytes.size(), "it has no directory");
    return little_endian<Number>(bytes, offset);
  };
  const auto two = [&](std::uint64_t offset) { return number(offset, std::uint16_t{}); };
  const auto four = [&](std::uint64_t offset) { return number(offset, std::uint32_t{}); };
  const auto eight = [&](std::uint64_t offset) { return number(offset, std::uint64_t{}); };

  constexpr std::uint64_t end_size = 22, locator_size = 20, entry_size = 46, most_unpacked = 64 << 20,
                          elsewhere = 0xFFFFFFFF;  // marks a number that is stored in a 64-bit field instead
  constexpr std::uint32_t end_signature = 0x06054b50, locator_signature = 0x07064b50,
                          entry_signature = 0x02014b50;
  const std::uint64_t end = bytes.size() - std::min<std::uint64_t>(bytes.size(), end_size);
  if (four(end) != end_signature) refuse(bytes.size(), "it has no end record");
  const bool wide = end >= locator_size && four(end - locator_size) == locator_signature;
  std::uint64_t at = wide ? eight(eight(end - locator_size + 8) + 48) : four(end + 16);
  try {
    caffe2::serialize::PyTorchStreamReader reader(std::make_shared<MemoryReader>(bytes));
    std::uint64_t total = 0;     // of the records' bytes in the archive
    std::uint64_t unpacked = 0;  // of the content of compressed records
    std::unordered_set<std::string> names;
    std::uint64_t previous = 0;  // the end of the record before
    for (const std::string& name : reader.getAllRecords()) {
      if (four(at) != entry_signature) refuse(at, "there is no entry of its directory");
      const std::uint64_t entry = at, crc = four(at + 16), name_size = two(at + 28);
      at += entry_size + name_size + two(at + 30) + two(at + 32);
      if (at > end || !bytes.substr(entry + entry_size, name_size).ends_with(name))
        refuse(entry, detail::formatted("its directory does not name the record '{}'", name));
      if (!names.insert(name).second)
        refuse(entry, detail::formatted("its directory names the record '{}' twice", name));
      const bool stored = two(entry + 10) == 0,
                 folder = (four(entry + 38) & 0x10) != 0 || name.ends_with('/');
      const std::uint64_t size = reader.getRecordSize(name), packed = stored ? size : four(entry + 20),
                          data = reader.getRecordOffset(name);
      // The reader returns no content for a folder and for a packed size of 0, whatever the other sizes are.
      const bool sizes_agree =
          size == 0 || (!folder && four(entry + 24) == std::min<std::uint64_t>(size, elsewhere) &&
                        (!stored || four(entry + 20) == four(entry + 24)));
      if (!sizes_agree || packed > bytes.size() - total || data > bytes.size() ||
          packed > bytes.size() - data || (!stored && size > most_unpacked - unpacked))
        refuse(entry, detail::formatted("the {} bytes of record '{}' do not fit into it", size, name));
      total += packed;
      unpacked += stored ? 0 : size;
      if (packed > 0 && data < std::exchange(previous, data + packed))
        refuse(entry, detail::formatted("the record '{}' overlaps another", name));
      std::uint32_t found = 0;
      if (stored) {
        found = crc32(bytes.substr(data, size));
      } else {
        const auto [content, length] = reader.getRecord(name);
        found = crc32({static_cast<const char*>(content.get()), length});
      }
      if (found != crc)
        refuse(data, detail::formatted("the {} bytes of record '{}' have the CRC-32 {:08x} instead of {:08x}",
                                       size, name, found, crc));
    }
  } catch (const CheckpointError&) {
    throw;
  } catch (const std::exception& error) {  // of the reader
    refuse(at, first_line(error));
  }
}

// In-memory archives, and readers that throw a CheckpointError with the name of a missing entry.

/// Serializes the archive to the bytes of its file.
inline std::string bytes_of(torch::serialize::OutputArchive& archive) {
  std::string bytes;
  archive.save_to([&](const void* data, std::size_t size) {
    bytes.append(static_cast<const char*>(data), size);
    return size;
  });
  return bytes;
}

/// Opens an archive with its tensors on the CPU. Every archive file that lockstep reads is opened here.
/// Throws CheckpointError if the bytes are damaged, c10::Error if they are another kind of archive.
inline torch::serialize::InputArchive archive_of(std::string_view bytes) {
  check_archive(bytes);
  torch::serialize::InputArchive archive;
  archive.load_from(bytes.data(), bytes.size(), at::kCPU);
  return archive;
}

/// Returns `read()`. Adds the file name `origin` to a CheckpointError and rethrows other lockstep errors.
/// Turns any other exception into a CheckpointError: an intact archive may hold unexpected values.
template <class Read>
decltype(auto) reading_file(std::string_view origin, std::string_view bytes, Read&& read) {
  try {
    return std::forward<Read>(read)();
  } catch (const CheckpointError& error) {
    throw CheckpointError(detail::formatted("'{}' ({} bytes): {}", origin, bytes.size(), error.what()));
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw CheckpointError(
        detail::formatted("'{}' ({} bytes): it was written by something else, or for another model: {}",
                          origin, bytes.size(), first_line(error)));
  }
}

/// Writes bytes as a uint8 tensor.
inline void write_bytes(torch::serialize::OutputArchive& archive, const std::string& key,
                        std::string_view bytes) {
  const at::Tensor tensor = at::empty({static_cast<std::int64_t>(bytes.size())}, at::kByte);
  if (!bytes.empty()) std::memcpy(tensor.mutable_data_ptr(), bytes.data(), bytes.size());
  archive.write(key, tensor, /*is_buffer=*/true);
}

/// Returns whether the elements of a tensor that LibTorch has read from a file lie in its storage.
inline bool in_storage(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage() || tensor.numel() == 0) return true;
  auto elements = static_cast<double>(tensor.storage_offset()) + 1;
  for (std::int64_t i = 0; i < tensor.dim(); ++i)
    elements += static_cast<double>(tensor.size(i) - 1) * static_cast<double>(tensor.stride(i));
  return elements * static_cast<double>(tensor.itemsize()) <= static_cast<double>(tensor.storage().nbytes());
}

[[noreturn]] inline void refuse_archive(const std::string& key) {
  throw CheckpointError(
      detail::formatted("the checkpoint has no \"{}\": it is damaged, or no checkpoint", key));
}

/// Reads a contiguous tensor of this dtype, or of any.
inline at::Tensor read_tensor(torch::serialize::InputArchive& archive, const std::string& key,
                              std::optional<at::ScalarType> type = {}) {
  at::Tensor tensor;
  if (!archive.try_read(key, tensor, /*is_buffer=*/true)) refuse_archive(key);
  if (type && (tensor.scalar_type() != *type || !tensor.is_contiguous())) refuse_archive(key);
  return tensor;
}
inline std::string read_bytes(torch::serialize::InputArchive& archive, const std::string& key) {
  const at::Tensor tensor = read_tensor(archive, key, at::kByte);
  return {static_cast<const char*>(tensor.const_data_ptr()), static_cast<std::size_t>(tensor.numel())};
}
inline c10::IValue read_value(torch::serialize::InputArchive& archive, const std::string& key,
                              bool (c10::IValue::*is)() const) {
  c10::IValue value;
  if (!archive.try_read(key, value) || !(value.*is)()) refuse_archive(key);
  return value;
}
inline std::int64_t read_integer(torch::serialize::InputArchive& archive, const std::string& key) {
  return read_value(archive, key, &c10::IValue::isInt).toInt();
}
inline constexpr std::int64_t most_counted = 1'000'000'000'000'000;
inline double read_number(torch::serialize::InputArchive& archive, const std::string& key) {
  return read_value(archive, key, &c10::IValue::isDouble).toDouble();
}
/// Reads a count or the length of a list. Throws CheckpointError if no run can have it.
inline std::int64_t read_length(torch::serialize::InputArchive& archive, const std::string& key) {
  const std::int64_t length = read_integer(archive, key);
  if (length < 0 || length > most_counted) refuse_archive(key);
  return length;
}
inline torch::serialize::InputArchive read_archive(torch::serialize::InputArchive& archive,
                                                   const std::string& key) {
  torch::serialize::InputArchive inner;
  if (!archive.try_read(key, inner)) refuse_archive(key);
  return inner;
}

/// Writes a nested archive, filled by `save(archive)`, under `key`.
template <class Save>
void write_archive(torch::serialize::OutputArchive& archive, const std::string& key, Save&& save) {
  torch::serialize::OutputArchive inner(archive.compilation_unit());
  save(inner);
  archive.write(key, inner);
}

/// Appends each parameter and buffer to `state`, in the order of Python's `state_dict()`.
inline void append_state(std::vector<NamedTensor>& state, const torch::nn::Module& module,
                         const std::string& prefix) {
  for (const auto& item : module.named_parameters(/*recurse=*/false))
    if (item.value().defined()) state.push_back({prefix + item.key(), item.value()});
  for (const auto& item : module.named_buffers(/*recurse=*/false))
    if (item.value().defined()) state.push_back({prefix + item.key(), item.value()});
  for (const auto& child : module.named_children())
    if (child.value()) append_state(state, *child.value(), prefix + child.key() + ".");
}

/// Appends the tensors of an archive of LibTorch, by the same names.
inline void append_state(std::vector<NamedTensor>& state, torch::serialize::InputArchive& archive,
                         const std::string& prefix) {
  for (const std::string& key : archive.keys()) {
    at::Tensor tensor;
    torch::serialize::InputArchive inner;
    if (archive.try_read(key, tensor))
      state.push_back({prefix + key, std::move(tensor)});
    else if (archive.try_read(key, inner))
      append_state(state, inner, prefix + key + ".");
  }
}

/// Appends to `text`: "; KIND "a", "b"".
inline void list_names(std::string& text, std::string_view kind, const std::vector<std::string>& names) {
  if (names.empty()) return;
  text += formatted("{}{} \"{}\"", text.empty() ? "" : "; ", kind, joined(names, "\", \""));
}

/// A model's tensors with the values to copy into them, and the names without a counterpart.
struct MatchedTensors {
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;
  std::vector<std::string> missing, unexpected;

  void copy() const {
    const at::NoGradGuard no_grad;
    for (const auto& [own, value] : pairs) copyable(own).copy_(copyable(value));
  }
};

/// Where the values come from.
enum class StateSource { archive, state_dict };

/// Pairs a model's tensors with `entries`, whose names begin with `prefix` more characters. Throws
/// CheckpointError, which lists all entries of another shape, or of another dtype (of a state dict: one that
/// cannot be converted), and with `strict` those that are missing or unexpected.
inline MatchedTensors match_tensors(const std::vector<NamedTensor>& own,
                                    const std::vector<NamedTensor>& entries, StateSource source,
                                    std::size_t prefix = 0, bool strict = true) {
  const bool archive = source == StateSource::archive;
  std::unordered_map<std::string_view, std::pair<const NamedTensor*, bool>> given;  // and whether it is used
  std::vector<std::string> repeated, misshapen;
  for (const NamedTensor& entry : entries)
    if (!given.emplace(std::string_view(entry.name).substr(prefix), std::pair(&entry, false)).second)
      repeated.push_back(entry.name);

  MatchedTensors matched;
  for (const auto& [name, tensor] : own) {
    const auto found = given.find(name);
    if (found == given.end()) {
      matched.missing.push_back(name);
      continue;
    }
    found->second.second = true;
    const at::Tensor& value = found->second.first->tensor;
    if (value.defined() && value.sizes() == tensor.sizes() &&
        (value.scalar_type() == tensor.scalar_type() ||
         (!archive && c10::canCast(value.scalar_type(), tensor.scalar_type()) &&
          value.scalar_type() != float4_e2m1fn_x2 && tensor.scalar_type() != float4_e2m1fn_x2)))
      matched.pairs.emplace_back(tensor, value);
    else
      misshapen.push_back(formatted("\"{}\" is {} in the {} and {} in the model", name,
                                    value.defined() ? describe(value) : "no tensor",
                                    archive ? "file" : "state dict", describe(tensor)));
  }
  for (const NamedTensor& entry : entries)
    if (!given.at(std::string_view(entry.name).substr(prefix)).second)
      matched.unexpected.push_back(entry.name);

  // A module of before PyTorch 0.4.1 has none of them: the model's own stay, as in Python.
  const auto counts_batches = [](std::string_view name) { return name.ends_with("num_batches_tracked"); };
  if (!archive && std::none_of(entries.begin(), entries.end(),
                               [&](const NamedTensor& entry) { return counts_batches(entry.name); }))
    std::erase_if(matched.missing, counts_batches);

  std::string text;
  if (strict) list_names(text, "missing", matched.missing);
  if (strict) list_names(text, "unexpected", matched.unexpected);
  list_names(text, "given twice", repeated);
  if (!misshapen.empty()) text += (text.empty() ? "" : "; ") + joined(misshapen, "; ");
  if (text.empty()) return matched;
  if (archive) throw CheckpointError("it does not fit the model: " + text);
  throw CheckpointError(
      formatted("the state dict does not fit the model: {}; build the model that it was saved from{}", text,
                strict ? ", or set strict to false to skip names" : ""));
}

/// Pairs the model's tensors with those of an archive.
inline MatchedTensors match_tensors(const torch::nn::Module& model, torch::serialize::InputArchive& archive) {
  std::vector<NamedTensor> own, entries;
  append_state(own, model, "");
  append_state(entries, archive, "");
  return match_tensors(own, entries, StateSource::archive);
}

}  // namespace lockstep::inline v0_1::detail

#pragma once

#include <nlohmann/json.hpp>

#include "lockstep/interchange/detail/pickle.hpp"
#include "lockstep/interchange/safetensors.hpp"

namespace lockstep::inline v0_1::detail {

using Json = nlohmann::json;

inline constexpr const char* metadata_key = "__metadata__";
inline constexpr std::uint64_t length_size = 8;  // bytes of the header's length

/// Where a tensor's data lies: bytes [begin, end) after the header.
struct SafetensorsEntry {
  std::string name;
  at::ScalarType type = at::ScalarType::Undefined;  // if LibTorch does not have it
  std::vector<std::int64_t> shape = {};
  std::uint64_t begin = 0, end = 0;
};

[[noreturn]] inline void refuse_header(const std::string& what) {
  throw CheckpointError(detail::formatted("the header is invalid: {}; restore it from a copy", what));
}

inline std::vector<std::int64_t> whole_numbers(const Json& list, const std::string& tensor) {
  std::vector<std::int64_t> numbers;
  for (const Json& number : list) {
    const auto* value = number.get_ptr<const Json::number_unsigned_t*>();
    if (value == nullptr || *value > std::uint64_t{INT64_MAX} || list.size() > 64)
      refuse_header(detail::formatted(
          "tensor \"{}\" has a list that is not one of at most 64 whole numbers from 0", tensor));
    numbers.push_back(static_cast<std::int64_t>(*value));
  }
  return numbers;
}

inline SafetensorsEntry entry_of(const std::string& name, const Json& fields) {
  SafetensorsEntry entry{.name = name};
  for (const auto& [key, value] : fields.items())
    if (key != "dtype" && key != "shape" && key != "data_offsets")
      refuse_header(detail::formatted("tensor \"{}\" has an unknown key \"{}\"", name, key));
  const auto field = [&](const char* key, Json::value_t type) -> const Json& {
    const auto found = fields.find(key);
    if (found == fields.end() || found->type() != type)
      refuse_header(detail::formatted("tensor \"{}\" has no dtype, shape and two data_offsets", name));
    return *found;
  };
  const std::string_view dtype = field("dtype", Json::value_t::string).get_ref<const std::string&>();
  const std::vector<std::int64_t> offsets = whole_numbers(field("data_offsets", Json::value_t::array), name);
  entry.shape = whole_numbers(field("shape", Json::value_t::array), name);
  if (offsets.size() != 2)
    refuse_header(detail::formatted("tensor \"{}\" has no dtype, shape and two data_offsets", name));
  entry.begin = static_cast<std::uint64_t>(offsets[0]);
  entry.end = static_cast<std::uint64_t>(offsets[1]);
  const FileDtype* known = dtype.empty() ? nullptr : file_dtype(&FileDtype::safetensors, dtype);
  if (known == nullptr && entry.begin <= entry.end) return entry;
  entry.type = known ? known->type : at::kByte;
  // A file counts values, two of which are one element of a tensor.
  const bool pairs = known && known->type == float4_e2m1fn_x2;
  // `span` ignores sizes of 0: strides are computed from it.
  std::optional<std::uint64_t> span = c10::elementSize(entry.type);
  bool empty = false;
  for (const std::int64_t extent : entry.shape) {
    empty = empty || extent == 0;
    if (span && extent != 0) span = product(*span, static_cast<std::uint64_t>(extent));
    if (span && *span > std::uint64_t{1} << 62) span = std::nullopt;
  }
  if (pairs && !empty && span) span = *span % 2 == 0 ? std::optional(*span / 2) : std::nullopt;
  if (!span || entry.begin > entry.end || entry.end - entry.begin != (empty ? 0 : *span))
    throw CheckpointError(
        detail::formatted("tensor \"{}\" of shape {} and dtype {} has the data_offsets {} and {}, which do "
                          "not fit; restore the file from a copy",
                          name, shape_text(entry.shape), dtype, entry.begin, entry.end));
  // As in Python, a tensor has no half elements: nobody can ask for it.
  if (pairs && entry.shape.back() % 2 != 0)
    entry.type = at::ScalarType::Undefined;
  else if (pairs)
    entry.shape.back() /= 2;
  return entry;
}

/// Reads the entries and the metadata of a header, one by one: a hostile header has no deep or large value.
inline std::vector<SafetensorsEntry> read_header(std::string_view header, SafetensorsMetadata& metadata) {
  std::vector<SafetensorsEntry> entries;
  std::unordered_set<std::string> names, keys;  // of the header, and of one of its objects
  std::string name;
  const auto read = [&](int depth, Json::parse_event_t event, Json& value) {
    using Event = Json::parse_event_t;
    const bool object = event == Event::object_start || event == Event::object_end;
    if (event == Event::key) {
      std::string key = value.get<std::string>();
      if (!(depth == 1 ? names : keys).insert(key).second)
        refuse_header(detail::formatted("the key \"{}\" is repeated", key));
      if (depth == 1) name = std::move(key);
    } else if (depth > 3 || (depth == 2 && object) || (depth == 1 && !object)) {
      refuse_header(detail::formatted("\"{}\" is no object of strings and lists", name));
    } else if (depth == 1 && event == Event::object_start) {
      keys.clear();
    } else if (depth == 1 && name != metadata_key) {
      entries.push_back(entry_of(name, value));
      return false;  // read: not kept
    } else if (depth == 1) {
      for (const auto& [key, text] : value.items()) {
        if (!text.is_string()) refuse_header(detail::formatted("the metadata \"{}\" is no string", key));
        metadata[key] = text.get<std::string>();
      }
      return false;
    }
    return true;
  };
  try {
    [[maybe_unused]] const Json parsed = Json::parse(header.begin(), header.end(), read);
  } catch (const Json::exception& error) {
    refuse_header(error.what());
  }
  return entries;
}

/// Throws CheckpointError unless the entries' data fills `size` bytes, each byte once.
inline void check_coverage(const std::vector<SafetensorsEntry>& entries, std::uint64_t size) {
  std::vector<const SafetensorsEntry*> sorted;
  for (const SafetensorsEntry& entry : entries) sorted.push_back(&entry);
  std::sort(sorted.begin(), sorted.end(), [](const SafetensorsEntry* a, const SafetensorsEntry* b) {
    return std::pair(a->begin, a->end) < std::pair(b->begin, b->end);
  });
  std::uint64_t end = 0;
  for (const SafetensorsEntry* entry : sorted) {
    if (entry->begin != end)
      throw CheckpointError(
          detail::formatted("the data of tensor \"{}\" begins at {}, where the data before it ends at {}: "
                            "the file has a gap or an overlap; restore it from a copy",
                            entry->name, entry->begin, end));
    end = entry->end;
  }
  if (end != size)
    throw CheckpointError(
        detail::formatted("its tensors have {} bytes, the file has {} after its header: it is cut short, or "
                          "has trailing bytes; restore it from a copy",
                          end, size));
}

inline Safetensors read_safetensors(std::string_view bytes) {
  if (bytes.size() < length_size)
    throw CheckpointError(
        "it is cut short: a safetensors file begins with the 8 bytes of its header's length");
  const auto length = little_endian<std::uint64_t>(bytes);
  if (length > safetensors_header_limit)
    throw CheckpointError(detail::formatted(
        "its header has {} bytes, more than {}: it is no safetensors file, or a damaged one", length,
        safetensors_header_limit));
  if (length > bytes.size() - length_size)
    throw CheckpointError(detail::formatted(
        "its header has {} bytes, of which the file has {}: it is cut short, or no safetensors file", length,
        bytes.size() - length_size));
  const std::string_view header = bytes.substr(length_size, length),
                         data = bytes.substr(length_size + length);
  if (!header.starts_with('{')) refuse_header("it does not begin with '{'");

  Safetensors content;
  std::vector<SafetensorsEntry> entries = read_header(header, content.metadata);
  check_coverage(entries, data.size());
  for (SafetensorsEntry& entry : entries) {
    if (entry.type == at::ScalarType::Undefined) {
      content.tensors.push_back({std::move(entry.name), {}});
      continue;
    }
    const std::string_view source = data.substr(entry.begin, entry.end - entry.begin);
    if (entry.type == at::kBool && !are_bools(source.data(), source.size()))
      throw CheckpointError(detail::formatted(
          "tensor \"{}\" has a bool that is neither 0 nor 1; restore the file from a copy", entry.name));
    at::Tensor tensor = at::empty(entry.shape, entry.type);
    if (!source.empty()) std::memcpy(tensor.mutable_data_ptr(), source.data(), source.size());
    content.tensors.push_back({std::move(entry.name), std::move(tensor)});
  }
  return content;
}

}  // namespace lockstep::inline v0_1::detail

namespace lockstep::inline v0_1 {

LOCKSTEP_INLINE std::string serialize_safetensors(const StateDict& entries,
                                                  const SafetensorsMetadata& metadata) {
  std::unordered_set<std::string_view> names{detail::metadata_key};
  std::vector<const NamedTensor*> ordered;
  for (const NamedTensor& entry : entries) {
    if (!names.insert(entry.name).second)
      throw UsageError(detail::formatted(
          "save_safetensors: the name \"{}\" is taken: give each tensor a name of its own", entry.name));
    if (const auto why = detail::unwritable(entry.tensor, &detail::FileDtype::safetensors); !why.empty())
      throw UsageError(detail::formatted(
          "save_safetensors: \"{}\" is {}: save dense tensors of a dtype of the format", entry.name, why));
    ordered.push_back(&entry);
  }
  // Large elements first, so that every tensor is aligned in a file that is mapped into memory.
  std::stable_sort(ordered.begin(), ordered.end(), [](const NamedTensor* a, const NamedTensor* b) {
    return a->tensor.element_size() > b->tensor.element_size();
  });

  std::string header = "{";
  std::uint64_t offset = 0;
  try {
    const auto add = [&](const std::string& name, const detail::Json& value) {
      header += (header.size() > 1 ? "," : "") + detail::Json(name).dump() + ':' + value.dump();
    };
    if (!metadata.empty()) add(detail::metadata_key, metadata);
    for (const NamedTensor* entry : ordered) {
      const at::Tensor& tensor = entry->tensor;
      std::vector<std::int64_t> shape = tensor.sizes().vec();
      if (tensor.scalar_type() == detail::float4_e2m1fn_x2) shape.back() *= 2;
      const std::uint64_t begin = std::exchange(offset, offset + tensor.nbytes());
      add(entry->name,
          {{"dtype", detail::file_dtype(&detail::FileDtype::type, tensor.scalar_type())->safetensors},
           {"shape", shape},
           {"data_offsets", {begin, offset}}});
    }
  } catch (const detail::Json::type_error&) {
    throw UsageError(
        "save_safetensors: a name or a text of the metadata is not UTF-8, which the format needs: rename it");
  }
  header += '}';
  header.resize((header.size() + 7) / 8 * 8, ' ');
  if (header.size() > safetensors_header_limit)
    throw UsageError(detail::formatted(
        "save_safetensors: the names and metadata need a header of {} bytes, more than {}: split the file",
        header.size(), safetensors_header_limit));

  std::string bytes;
  bytes.reserve(detail::length_size + header.size() + offset);
  detail::append_little_endian(bytes, std::uint64_t{header.size()});
  bytes += header;
  for (const NamedTensor* entry : ordered) {
    const at::Tensor tensor = detail::written_values(detail::copyable(entry->tensor)).contiguous();
    if (tensor.nbytes() != 0)
      bytes.append(static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes());
  }
  return bytes;
}

LOCKSTEP_INLINE Safetensors deserialize_safetensors(std::string_view bytes, std::string_view origin) {
  return detail::reading_file(origin, bytes, [&] { return detail::read_safetensors(bytes); });
}

LOCKSTEP_INLINE void save_safetensors(const StateDict& entries, const std::filesystem::path& path,
                                      const SafetensorsMetadata& metadata) {
  write_file_atomically(path, serialize_safetensors(entries, metadata));
}

LOCKSTEP_INLINE Safetensors load_safetensors(const std::filesystem::path& path) {
  return deserialize_safetensors(read_file(path), path.string());
}

}  // namespace lockstep::inline v0_1

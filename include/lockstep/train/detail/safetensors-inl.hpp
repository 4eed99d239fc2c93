#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>

#include "lockstep/comm/detail/describe.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/detail/json.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/error.hpp"
#include "lockstep/train/detail/archive.hpp"
#include "lockstep/train/detail/pickle.hpp"
#include "lockstep/train/safetensors.hpp"

namespace lockstep::detail {

struct SafetensorsDtype {
  std::string_view name;
  at::ScalarType type;
};
inline constexpr std::array<SafetensorsDtype, 11> safetensors_dtypes{{{"F64", at::kDouble},
                                                                      {"F32", at::kFloat},
                                                                      {"F16", at::kHalf},
                                                                      {"BF16", at::kBFloat16},
                                                                      {"I64", at::kLong},
                                                                      {"I32", at::kInt},
                                                                      {"I16", at::kShort},
                                                                      {"I8", at::kChar},
                                                                      {"U8", at::kByte},
                                                                      {"BOOL", at::kBool},
                                                                      {"C64", at::kComplexFloat}}};

inline constexpr std::string_view metadata_key = "__metadata__";
inline constexpr std::uint64_t length_size = 8;  // bytes of the header's length

/// Reads the JSON of a safetensors header, whose grammar is: an object of objects that hold strings or lists
/// of numbers. Each call skips white space.
class HeaderReader {
 public:
  explicit HeaderReader(std::string_view text) : text_(text) {}

  /// Throws CheckpointError with the offset in the file.
  [[noreturn]] void refuse(const std::string& what) const {
    throw CheckpointError(detail::formatted("the header is invalid at offset {}: {}; restore it from a copy",
                                            length_size + next_, what));
  }

  void expect(char wanted) {
    if (!accept(wanted)) refuse(detail::formatted("there is no '{}'", wanted));
  }
  bool accept(char wanted) {
    skip_space();
    if (next_ == text_.size() || text_[next_] != wanted) return false;
    ++next_;
    return true;
  }
  void end() {
    skip_space();
    if (next_ != text_.size()) refuse("there is text after it");
  }

  /// Calls `read(key)` for each key of an object, which reads the value.
  template <class Read>
  void object(const Read& read) {
    std::unordered_set<std::string> keys;
    expect('{');
    if (accept('}')) return;
    do {
      std::string key = string();
      expect(':');
      if (!keys.insert(key).second) refuse(detail::formatted("the key \"{}\" is repeated", key));
      read(std::move(key));
    } while (accept(','));
    expect('}');
  }

  std::string string() {
    expect('"');
    std::string text;
    for (;;) {
      if (next_ == text_.size()) refuse("a string does not end");
      const char c = text_[next_];
      if (c == '"') break;
      if (static_cast<unsigned char>(c) < 0x20) refuse("a string has a control character");
      if (c == '\\') {
        ++next_;
        escape(text);
        continue;
      }
      const std::size_t length = utf8_length(text_.substr(next_));
      if (length == 0) refuse("a string is not UTF-8");
      text += text_.substr(next_, length);
      next_ += length;
    }
    ++next_;
    return text;
  }

  /// A whole number from 0, without a sign, a fraction or leading zeros.
  std::uint64_t number() {
    skip_space();
    const std::size_t begin = next_;
    std::uint64_t value = 0;
    for (; next_ < text_.size() && text_[next_] >= '0' && text_[next_] <= '9'; ++next_) {
      const auto digit = static_cast<std::uint64_t>(text_[next_] - '0');
      if (value > (largest - digit) / 10) refuse("a number has more than 63 bits");
      value = 10 * value + digit;
    }
    if (next_ == begin || (text_[begin] == '0' && next_ - begin > 1))
      refuse("there is no whole number from 0");
    return value;
  }
  std::vector<std::int64_t> numbers() {
    std::vector<std::int64_t> list;
    expect('[');
    if (accept(']')) return list;
    do {
      if (list.size() == 64) refuse("a list has more than 64 numbers");
      list.push_back(static_cast<std::int64_t>(number()));
    } while (accept(','));
    expect(']');
    return list;
  }

 private:
  static constexpr auto largest = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());

  void skip_space() {
    while (next_ < text_.size() &&
           (text_[next_] == ' ' || text_[next_] == '\n' || text_[next_] == '\t' || text_[next_] == '\r'))
      ++next_;
  }

  void escape(std::string& text) {
    static constexpr std::string_view letters = "\"\\/bfnrt", meanings = "\"\\/\b\f\n\r\t";
    const char c = next_ < text_.size() ? text_[next_] : '\0';
    ++next_;
    if (c == 'u') {
      std::uint32_t code = four_digits();
      if (code >= 0xDC00 && code <= 0xDFFF) refuse("a string has half a surrogate pair");
      if (code >= 0xD800 && code <= 0xDBFF) {
        if (text_.substr(next_, 2) != "\\u") refuse("a string has half a surrogate pair");
        next_ += 2;
        const std::uint32_t low = four_digits();
        if (low < 0xDC00 || low > 0xDFFF) refuse("a string has half a surrogate pair");
        code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
      }
      append_utf8(text, code);
      return;
    }
    const std::size_t letter = letters.find(c);
    if (c == '\0' || letter == std::string_view::npos) {
      --next_;
      refuse("a string has an unknown escape");
    }
    text += meanings[letter];
  }

  std::uint32_t four_digits() {
    std::uint32_t code = 0;
    for (int i = 0; i < 4; ++i, ++next_) {
      const char c = next_ < text_.size() ? text_[next_] : '\0';
      const int digit = c >= '0' && c <= '9'   ? c - '0'
                        : c >= 'a' && c <= 'f' ? c - 'a' + 10
                        : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                               : -1;
      if (digit < 0) refuse("a string has an unknown escape");
      code = code << 4 | static_cast<std::uint32_t>(digit);
    }
    return code;
  }
  static void append_utf8(std::string& text, std::uint32_t code) {
    const auto rest = [&](int shift) { text += static_cast<char>(0x80 | (code >> shift & 0x3F)); };
    if (code < 0x80) {
      text += static_cast<char>(code);
    } else if (code < 0x800) {
      text += static_cast<char>(0xC0 | code >> 6);
      rest(0);
    } else if (code < 0x10000) {
      text += static_cast<char>(0xE0 | code >> 12);
      rest(6);
      rest(0);
    } else {
      text += static_cast<char>(0xF0 | code >> 18);
      rest(12);
      rest(6);
      rest(0);
    }
  }

  std::string_view text_;
  std::size_t next_ = 0;
};

/// Where a tensor's data lies: bytes [begin, end) after the header.
struct SafetensorsEntry {
  std::string name;
  at::ScalarType type = at::kFloat;
  std::vector<std::int64_t> shape = {};
  std::uint64_t begin = 0, end = 0;
};

inline at::ScalarType safetensors_type(std::string_view dtype, const std::string& tensor) {
  for (const SafetensorsDtype& one : safetensors_dtypes)
    if (one.name == dtype) return one.type;
  std::string known;
  for (const SafetensorsDtype& one : safetensors_dtypes)
    known += (known.empty() ? "" : ", ") + std::string(one.name);
  throw CheckpointError(detail::formatted(
      "the dtype \"{}\" of tensor \"{}\" is not one that is read ({}): convert the tensor in Python", dtype,
      tensor, known));
}

inline SafetensorsEntry read_entry(HeaderReader& reader, std::string name) {
  SafetensorsEntry entry{.name = std::move(name)};
  std::optional<std::string> dtype;
  std::optional<std::vector<std::int64_t>> shape, offsets;
  reader.object([&](const std::string& key) {
    if (key == "dtype")
      dtype = reader.string();
    else if (key == "shape")
      shape = reader.numbers();
    else if (key == "data_offsets")
      offsets = reader.numbers();
    else
      reader.refuse(detail::formatted("tensor \"{}\" has an unknown key \"{}\"", entry.name, key));
  });
  if (!dtype || !shape || !offsets || offsets->size() != 2)
    reader.refuse(detail::formatted("tensor \"{}\" has no dtype, shape and two data_offsets", entry.name));
  entry.type = safetensors_type(*dtype, entry.name);
  entry.shape = std::move(*shape);
  entry.begin = static_cast<std::uint64_t>((*offsets)[0]);
  entry.end = static_cast<std::uint64_t>((*offsets)[1]);
  // `span` ignores sizes of 0: strides are computed from it.
  std::optional<std::uint64_t> span = c10::elementSize(entry.type);
  bool empty = false;
  for (const std::int64_t extent : entry.shape) {
    empty = empty || extent == 0;
    if (span && extent != 0) span = product(*span, static_cast<std::uint64_t>(extent));
    if (span && *span > std::uint64_t{1} << 62) span = std::nullopt;
  }
  const bool fits = span && entry.begin <= entry.end && entry.end - entry.begin == (empty ? 0 : *span);
  if (!fits)
    throw CheckpointError(
        detail::formatted("tensor \"{}\" of shape {} and dtype {} has the data_offsets {} and {}, which do "
                          "not fit; restore the "
                          "file from a copy",
                          entry.name, shape_text(entry.shape), *dtype, entry.begin, entry.end));
  return entry;
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
                            "the file has a gap or "
                            "an overlap; restore it from a copy",
                            entry->name, entry->begin, end));
    end = entry->end;
  }
  if (end != size)
    throw CheckpointError(detail::formatted(
        "its tensors have {} bytes, the file has {} after its header: it is cut short, or has "
        "trailing bytes; restore it from a copy",
        end, size));
}

inline Safetensors read_safetensors(std::string_view bytes) {
  if (bytes.size() < length_size)
    throw CheckpointError(
        "it is cut short: a safetensors file begins with the 8 bytes of its header's length");
  const auto length = little_endian<std::uint64_t>(bytes, 0);
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

  Safetensors content;
  std::vector<SafetensorsEntry> entries;
  HeaderReader reader(header);
  if (!header.starts_with('{')) reader.refuse("it does not begin with '{'");
  reader.object([&](std::string key) {
    if (key == metadata_key)
      reader.object([&](std::string name) { content.metadata[std::move(name)] = reader.string(); });
    else
      entries.push_back(read_entry(reader, std::move(key)));
  });
  reader.end();
  check_coverage(entries, data.size());

  for (SafetensorsEntry& entry : entries) {
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

/// Appends a JSON string. Throws UsageError unless `text` is UTF-8.
inline void append_json(std::string& json, std::string_view text) {
  if (valid_utf8(text) != text)
    throw UsageError(
        "save_safetensors: a name or a text of the metadata is not UTF-8, which the format needs: rename it");
  json += json_string(text);
}

inline std::string_view safetensors_name(const NamedTensor& entry) {
  const at::Tensor& tensor = entry.tensor;
  if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.is_quantized() || tensor.is_meta())
    throw UsageError(detail::formatted(
        "save_safetensors: \"{}\" is undefined, sparse, quantized or without data: save dense tensors",
        entry.name));
  for (const SafetensorsDtype& one : safetensors_dtypes)
    if (one.type == tensor.scalar_type()) return one.name;
  throw UsageError(detail::formatted("save_safetensors: \"{}\" is {}, which is not written: convert it",
                                     entry.name, dtype_name(tensor.scalar_type())));
}

}  // namespace lockstep::detail

namespace lockstep {

LOCKSTEP_INLINE std::string serialize_safetensors(const StateDict& entries,
                                                  const SafetensorsMetadata& metadata) {
  std::unordered_set<std::string> names{std::string(detail::metadata_key)};
  std::vector<const NamedTensor*> ordered;
  std::uint64_t total = 0;
  for (const NamedTensor& entry : entries) {
    if (!names.insert(entry.name).second)
      throw UsageError(detail::formatted(
          "save_safetensors: the name \"{}\" is taken: give each tensor a name of its own", entry.name));
    detail::safetensors_name(entry);
    ordered.push_back(&entry);
    total += entry.tensor.numel() * entry.tensor.element_size();
  }
  // Large elements first, so that every tensor is aligned in a file that is mapped into memory.
  std::stable_sort(ordered.begin(), ordered.end(), [](const NamedTensor* a, const NamedTensor* b) {
    return a->tensor.element_size() > b->tensor.element_size();
  });

  std::string header = "{";
  if (!metadata.empty()) {
    detail::append_json(header, detail::metadata_key);
    header += ":{";
    for (const auto& [key, text] : metadata) {
      if (header.back() != '{') header += ',';
      detail::append_json(header, key);
      header += ':';
      detail::append_json(header, text);
    }
    header += '}';
  }
  std::uint64_t offset = 0;
  for (const NamedTensor* entry : ordered) {
    const std::uint64_t size = entry->tensor.numel() * entry->tensor.element_size();
    if (header.size() > 1) header += ',';
    detail::append_json(header, entry->name);
    std::string shape;
    for (const std::int64_t extent : entry->tensor.sizes())
      shape += (shape.empty() ? "" : ",") + std::to_string(extent);
    header += detail::formatted(R"(:{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})",
                                detail::safetensors_name(*entry), shape, offset, offset + size);
    offset += size;
  }
  header += '}';
  header.resize((header.size() + 7) / 8 * 8, ' ');
  if (header.size() > safetensors_header_limit)
    throw UsageError(
        detail::formatted("save_safetensors: the names and metadata need a header of {} bytes, more "
                          "than {}: split the file",
                          header.size(), safetensors_header_limit));

  std::string bytes;
  bytes.reserve(detail::length_size + header.size() + total);
  for (std::size_t i = 0; i < detail::length_size; ++i)
    bytes += static_cast<char>(std::uint64_t{header.size()} >> 8 * i & 0xFF);
  bytes += header;
  for (const NamedTensor* entry : ordered) {
    const at::Tensor tensor = entry->tensor.detach().cpu().resolve_conj().resolve_neg().contiguous();
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

}  // namespace lockstep

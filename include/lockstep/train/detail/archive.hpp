#pragma once

#include <caffe2/serialize/inline_container.h>
#include <caffe2/serialize/read_adapter_interface.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <exception>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/serialize/archive.h>

#include "lockstep/comm/detail/own_error.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"

namespace lockstep::detail {

/// Eight tables of 256 remainders, for a CRC-32 of eight bytes at a time.
using Crc32Tables = std::array<std::array<std::uint32_t, 256>, 8>;
inline constexpr Crc32Tables crc32_tables = [] {
  Crc32Tables tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = value >> 1 ^ (value & 1 ? 0xEDB88320U : 0U);
    tables[0][byte] = value;
  }
  for (std::size_t table = 1; table < tables.size(); ++table)
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t before = tables[table - 1][byte];
      tables[table][byte] = before >> 8 ^ tables[0][before & 0xFF];
    }
  return tables;
}();

/// Returns the unsigned little-endian number at `offset`, which must lie inside `bytes`.
template <class Number>
Number little_endian(std::string_view bytes, std::uint64_t offset) {
  Number value = 0;
  for (std::size_t i = sizeof(Number); i > 0; --i)
    value =
        static_cast<Number>(std::uint64_t{value} << 8 | static_cast<unsigned char>(bytes[offset + i - 1]));
  return value;
}

/// Returns the CRC-32 that ZIP and gzip use.
inline std::uint32_t crc32(std::string_view bytes) {
  const auto& tables = crc32_tables;
  std::uint32_t crc = ~0U;
  for (; bytes.size() >= 8; bytes.remove_prefix(8)) {
    const std::uint32_t low = little_endian<std::uint32_t>(bytes, 0) ^ crc;
    const auto high = little_endian<std::uint32_t>(bytes, 4);
    crc = tables[7][low & 0xFF] ^ tables[6][low >> 8 & 0xFF] ^ tables[5][low >> 16 & 0xFF] ^
          tables[4][low >> 24] ^ tables[3][high & 0xFF] ^ tables[2][high >> 8 & 0xFF] ^
          tables[1][high >> 16 & 0xFF] ^ tables[0][high >> 24];
  }
  for (const char byte : bytes) crc = crc >> 8 ^ tables[0][(crc ^ static_cast<unsigned char>(byte)) & 0xFF];
  return ~crc;
}

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

/// Verifies the structure of a ZIP archive and the CRC-32 of each of its records. LibTorch writes these
/// checksums, but its reader does not verify them. Verifies everything that the reader uses: the directory at
/// the end, each record's own header against the directory, and the content.
class ArchiveCheck {
 public:
  /// `bytes` must outlive the check.
  explicit ArchiveCheck(std::string_view bytes) : bytes_(bytes) {}

  /// Throws CheckpointError with the offset of the damage or truncation, or if the bytes are not an archive.
  void run() {
    if (!bytes_.starts_with("PK\3\4")) throw CheckpointError("it is no archive that LibTorch wrote");
    const Directory directory = find_directory();
    std::uint64_t at = directory.begin;
    for (std::uint64_t record = 0; record < directory.records; ++record) at = check_record(at, directory);
    if (at != directory.end) refuse(at, "its directory has another length than its end record says");
  }

 private:
  /// The list of records at the end of an archive: bytes [begin, end).
  struct Directory {
    std::uint64_t begin, end, records;
  };

  static constexpr std::uint64_t end_size = 22, locator_size = 20, wide_end_size = 56, entry_size = 46,
                                 header_size = 30;
  // Marks a number that is stored in a 64-bit field instead.
  static constexpr auto elsewhere = std::numeric_limits<std::uint32_t>::max();

  [[noreturn]] static void refuse(std::uint64_t offset, const std::string& what) {
    throw CheckpointError(detail::formatted(
        "it is damaged or cut short at offset {}: {}; restore it from a copy", offset, what));
  }
  void require(bool good, std::uint64_t offset, const char* what) const {
    if (!good) refuse(offset, what);
  }
  /// Returns whether `count` bytes at `offset` lie before `end`.
  static bool fits(std::uint64_t offset, std::uint64_t count, std::uint64_t end) {
    return offset <= end && count <= end - offset;
  }
  template <class Number>
  [[nodiscard]] std::uint64_t number(std::uint64_t offset) const {
    return little_endian<Number>(bytes_, offset);
  }
  [[nodiscard]] std::uint64_t two(std::uint64_t offset) const { return number<std::uint16_t>(offset); }
  [[nodiscard]] std::uint64_t four(std::uint64_t offset) const { return number<std::uint32_t>(offset); }
  [[nodiscard]] std::uint64_t eight(std::uint64_t offset) const { return number<std::uint64_t>(offset); }
  [[nodiscard]] bool signed_as(std::uint64_t offset, std::string_view signature) const {
    return bytes_.substr(offset, signature.size()) == signature;
  }

  /// Returns the offset of the end record, which is followed only by a comment of at most 64 KiB. The record
  /// holds the comment's length.
  [[nodiscard]] std::uint64_t find_end() const {
    require(bytes_.size() >= end_size, bytes_.size(), "it has no end record");
    const std::uint64_t last = bytes_.size() - end_size;
    const std::uint64_t first = last > 0xFFFF ? last - 0xFFFF : 0;
    for (std::uint64_t at = last + 1; at-- > first;)
      if (signed_as(at, "PK\5\6") && two(at + 20) == last - at) return at;
    refuse(bytes_.size(), "it has no end record");
  }

  [[nodiscard]] Directory find_directory() const {
    const std::uint64_t end = find_end();
    std::uint64_t records = two(end + 10), size = four(end + 12), begin = four(end + 16);
    require(four(end + 4) == 0 && two(end + 8) == records, end, "its end record contradicts itself");
    std::uint64_t directory_end = end;
    if (end >= locator_size + wide_end_size && signed_as(end - locator_size, "PK\6\7")) {
      directory_end = end - locator_size - wide_end_size;
      require(signed_as(directory_end, std::string_view("PK\6\6\x2c\0\0\0\0\0\0\0", 12)) &&
                  eight(end - locator_size + 8) == directory_end,
              directory_end, "its 64-bit end record is not where it should be");
      const std::uint64_t wide_records = eight(directory_end + 32), wide_size = eight(directory_end + 40),
                          wide_begin = eight(directory_end + 48);
      require(eight(directory_end + 24) == wide_records &&
                  records == std::min<std::uint64_t>(wide_records, 0xFFFF) &&
                  size == std::min<std::uint64_t>(wide_size, elsewhere) &&
                  begin == std::min<std::uint64_t>(wide_begin, elsewhere),
              end, "its two end records contradict each other");
      records = wide_records;
      size = wide_size;
      begin = wide_begin;
    }
    require(size <= directory_end && begin == directory_end - size, end,
            "its directory is not where its end record says");
    return {begin, directory_end, records};
  }

  /// Verifies the record that the directory's entry at offset `at` names. Returns the offset of the next
  /// entry.
  std::uint64_t check_record(std::uint64_t at, const Directory& directory) {
    require(fits(at, entry_size, directory.end) && signed_as(at, "PK\1\2"), at,
            "there is no entry of its directory");
    const std::uint64_t flags = two(at + 8), method = two(at + 10), crc = four(at + 16);
    std::uint64_t packed = four(at + 20), size = four(at + 24), header = four(at + 42);
    const std::uint64_t name_size = two(at + 28), extra_size = two(at + 30);
    const std::uint64_t entry_end = at + entry_size + name_size + extra_size + two(at + 32);
    require(entry_end <= directory.end, at, "an entry of its directory is too long");
    const std::string_view name = bytes_.substr(at + entry_size, name_size);
    read_wide_fields(at + entry_size + name_size, extra_size, {&size, &packed, &header});

    // Allowed flags: compression hints, a data descriptor after the data, and UTF-8 names.
    require((flags & ~std::uint64_t{0x080E}) == 0 && (method == 0 || method == 8), at,
            "an entry of its directory has an unknown format");
    const bool folder = name.ends_with('/') || (four(at + 38) & 0x10) != 0;
    require(!folder || (packed == 0 && size == 0), at, "an entry of its directory is a folder with content");
    require(fits(header, header_size, directory.begin) && signed_as(header, "PK\3\4"), header,
            "there is no record where the directory names one");
    const std::uint64_t data = header + header_size + two(header + 26) + two(header + 28);
    require(two(header + 26) == name_size && fits(data, packed, directory.begin) &&
                bytes_.substr(header + header_size, name_size) == name && two(header + 8) == method,
            header, "a record is not the one that the directory names");
    if (method == 0) require(packed == size, at, "a record that is not compressed has two sizes");
    const std::uint32_t found = method == 0 ? crc32(bytes_.substr(data, size)) : unpacked_crc(name, size, at);
    if (found != crc)
      refuse(data, detail::formatted("the {} bytes of record '{}' have the CRC-32 {:08x} instead of {:08x}",
                                     size, name, found, crc));
    return entry_end;
  }

  /// Replaces each number that does not fit into 32 bits by the one in the entry's 64-bit field.
  void read_wide_fields(std::uint64_t extra, std::uint64_t extra_size,
                        std::array<std::uint64_t*, 3> numbers) const {
    const std::uint64_t end = extra + extra_size;
    std::uint64_t wide = end, wide_end = end;
    for (std::uint64_t at = extra; fits(at, 4, end); at += 4 + two(at + 2))
      if (two(at) == 1 && fits(at + 4, two(at + 2), end)) {
        wide = at + 4;
        wide_end = wide + two(at + 2);
        break;
      }
    for (std::uint64_t* value : numbers) {
      if (*value != elsewhere) continue;
      require(fits(wide, 8, wide_end), extra, "an entry of its directory has no 64-bit size");
      *value = eight(wide);
      wide += 8;
    }
  }

  /// Returns the CRC-32 of a compressed record after LibTorch has decompressed it.
  std::uint32_t unpacked_crc(std::string_view name, std::uint64_t size, std::uint64_t at) {
    if (!reader_) reader_.emplace(std::make_shared<MemoryReader>(bytes_));
    // The reader's names omit the top folder of the archive.
    const auto [content, length] = reader_->getRecord(std::string(name.substr(name.find('/') + 1)));
    require(length == size, at, "a compressed record has another size than its directory says");
    return crc32({static_cast<const char*>(content.get()), length});
  }

  std::string_view bytes_;
  std::optional<caffe2::serialize::PyTorchStreamReader> reader_;
};

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
  ArchiveCheck(bytes).run();
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

[[noreturn]] inline void refuse_archive(const std::string& key) {
  throw CheckpointError(
      detail::formatted("the checkpoint has no \"{}\": it is damaged, or no checkpoint", key));
}

inline std::string read_bytes(torch::serialize::InputArchive& archive, const std::string& key) {
  at::Tensor tensor;
  if (!archive.try_read(key, tensor, /*is_buffer=*/true)) refuse_archive(key);
  if (tensor.scalar_type() != at::kByte || !tensor.is_contiguous()) refuse_archive(key);
  return {static_cast<const char*>(tensor.const_data_ptr()), static_cast<std::size_t>(tensor.numel())};
}

inline std::int64_t read_integer(torch::serialize::InputArchive& archive, const std::string& key) {
  c10::IValue value;
  if (!archive.try_read(key, value) || !value.isInt()) refuse_archive(key);
  return value.toInt();
}

/// Reads the length of a list. Throws CheckpointError if it is negative.
inline std::int64_t read_length(torch::serialize::InputArchive& archive, const std::string& key) {
  const std::int64_t length = read_integer(archive, key);
  if (length < 0) refuse_archive(key);
  return length;
}

inline double read_number(torch::serialize::InputArchive& archive, const std::string& key) {
  c10::IValue value;
  if (!archive.try_read(key, value) || !value.isDouble()) refuse_archive(key);
  return value.toDouble();
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

}  // namespace lockstep::detail

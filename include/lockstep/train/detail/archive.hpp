#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/serialize/archive.h>

#include <cstdint>
#include <cstring>
#include <exception>
#include <string>
#include <string_view>
#include <utility>

#include "lockstep/comm/detail/own_error.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/train/detail/archive_check.hpp"

namespace lockstep::detail {

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

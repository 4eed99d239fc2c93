#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "lockstep/error.hpp"
#include "lockstep/files.hpp"

namespace lockstep::detail {

/// read_file for data: throws DataError instead of CheckpointError.
inline std::string read_data_file(const std::filesystem::path& path) try {
  return read_file(path);
} catch (const CheckpointError& error) {
  throw DataError(error.what());
}

/// write_file_atomically for data: throws DataError instead of CheckpointError.
inline void write_data_file(const std::filesystem::path& path, std::string_view bytes) try {
  write_file_atomically(path, bytes);
} catch (const CheckpointError& error) {
  throw DataError(error.what());
}

}  // namespace lockstep::detail

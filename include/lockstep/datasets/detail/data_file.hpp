#pragma once

#include "lockstep/error.hpp"
#include "lockstep/files.hpp"

namespace lockstep::inline v0_1::detail {

/// Calls read_file or write_file_atomically for data: throws DataError instead of CheckpointError.
template <class Function>
auto as_data_file(Function&& function) try {
  return function();
} catch (const CheckpointError& error) {
  throw DataError(error.what());
}

}  // namespace lockstep::inline v0_1::detail

#pragma once

#include "lockstep/interchange/state_dict.hpp"

namespace lockstep::inline v0_1 {

/// The text entries of a safetensors file. Libraries of Python that load models look for {"format": "pt"}.
using SafetensorsMetadata = std::map<std::string, std::string>;

/// The content of a safetensors file: its tensors, in the order of its header, and its metadata.
struct Safetensors {
  StateDict tensors;             ///< In the order of the header.
  SafetensorsMetadata metadata;  ///< Empty if the file has none.
};

/// The longest header that is read, in bytes: that of the reference implementation.
inline constexpr std::size_t safetensors_header_limit = 100'000'000;

/// Returns the bytes of save_safetensors's file.
std::string serialize_safetensors(const StateDict& entries,
                                  const SafetensorsMetadata& metadata = {{"format", "pt"}});

/// Returns the content of a safetensors file. `origin` names the bytes in errors.
Safetensors deserialize_safetensors(std::string_view bytes, std::string_view origin);

/// Writes tensors in the safetensors format. Takes the dtypes float64, float32, float16, bfloat16, int64,
/// int32, int16, int8, uint8, uint16, uint32, uint64, bool, complex64, float8_e4m3fn, float8_e5m2,
/// float8_e4m3fnuz, float8_e5m2fnuz and, from LibTorch 2.7 and 2.8 on, float8_e8m0fnu and float4_e2m1fn_x2. A tensor
/// under several names is written under each. The file is written atomically. Throws UsageError for another dtype, a
/// sparse tensor, a repeated name and a name or text that is not UTF-8; CheckpointError if writing fails.
/// Counterpart: safetensors.torch.save_file.
void save_safetensors(const StateDict& entries, const std::filesystem::path& path,
                      const SafetensorsMetadata& metadata = {{"format", "pt"}});

/// Reads a safetensors file; all tensors are on the CPU. Verifies the whole header before any tensor is
/// made: its length (at most safetensors_header_limit), its JSON, in which a repeated or an unknown key is
/// an error, and that the tensors fill the rest of the file without gaps or overlaps. A tensor of a dtype that
/// LibTorch does not have is undefined. Throws CheckpointError with the tensor's name or the offset in the file. The
/// format has no checksums: changed data is not detected.
/// Counterpart: safetensors.torch.load_file.
Safetensors load_safetensors(const std::filesystem::path& path);

/// Writes rank 0's tensors. Collective: every rank returns once they are written, or throws the same error.
template <Communicator C>
void save_safetensors(const StateDict& entries, const std::filesystem::path& path, C& comm,
                      const SafetensorsMetadata& metadata = {{"format", "pt"}}) {
  forbid_in_rank_zero_scope("save_safetensors");
  const detail::CallScope scope("save_safetensors");
  agree_with_rank_zero<CheckpointError>(comm, [&] { save_safetensors(entries, path, metadata); });
}

/// Reads a file on rank 0 and returns its content on every rank. Collective. Every rank throws the same
/// CheckpointError.
template <Communicator C>
Safetensors load_safetensors(const std::filesystem::path& path, C& comm) {
  forbid_in_rank_zero_scope("load_safetensors");
  const detail::CallScope scope("load_safetensors");
  const std::string bytes = agree_with_rank_zero<CheckpointError>(comm, [&] { return read_file(path); });
  Safetensors content;
  agree<CheckpointError>(comm, [&] { content = deserialize_safetensors(bytes, path.string()); });
  return content;
}

}  // namespace lockstep::inline v0_1

#ifndef LOCKSTEP_COMPILED
#include "lockstep/interchange/detail/safetensors-inl.hpp"
#endif

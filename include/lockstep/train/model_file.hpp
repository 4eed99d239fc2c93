#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <filesystem>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>
#include <torch/serialize/archive.h>

#include "lockstep/comm/agreement.hpp"
#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/detail/describe.hpp"
#include "lockstep/comm/detail/own_error.hpp"
#include "lockstep/detail/descriptor.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/grad/model.hpp"
#include "lockstep/train/detail/archive.hpp"
#include "lockstep/world/world.hpp"

namespace lockstep::detail {

/// Returns what `path` is if it cannot be replaced by a file, such as "a folder"; empty if it is a regular
/// file or does not exist. Renaming a file over a device, such as /dev/null, would remove the device for the
/// whole machine.
inline std::string kind_if_no_file(const std::filesystem::path& path) {
  std::error_code error;
  const auto type = std::filesystem::status(path, error).type();
  if (error == std::errc::too_many_symbolic_link_levels) return "a link that leads to itself";
  switch (type) {
    case std::filesystem::file_type::directory:
      return "a folder";
    case std::filesystem::file_type::fifo:
      return "a pipe";
    case std::filesystem::file_type::socket:
      return "a socket";
    case std::filesystem::file_type::block:
    case std::filesystem::file_type::character:
      return "a device";
    case std::filesystem::file_type::unknown:
      return "no regular file";
    default:
      return "";
  }
}

/// Returns the target of the symbolic links at `path`, which need not exist, so that saving keeps the links.
inline std::filesystem::path behind_links(std::filesystem::path path) {
  std::error_code error;
  for (int hops = 0; hops < 40 && std::filesystem::is_symlink(path, error); ++hops)
    path = path.parent_path() / std::filesystem::read_symlink(path, error);
  return path;
}

inline std::string temporary_beside(const std::filesystem::path& path) {
  return detail::formatted("{}.{}.tmp", path.string(), ::getpid());
}

inline bool write_all(int descriptor, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(descriptor, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    bytes.remove_prefix(static_cast<std::size_t>(written));
  }
  return true;
}

}  // namespace lockstep::detail

namespace lockstep {

/// Throws UsageError unless a file can be created at `path`. Call it before training, to fail early. An
/// existing file is left unchanged; an existing path that is not a regular file, such as a device, is
/// rejected.
inline void require_writable(const std::filesystem::path& path) {
  if (path.empty()) throw UsageError("cannot save to '': it is no file name; give one");
  if (const auto kind = detail::kind_if_no_file(path); !kind.empty())
    throw UsageError(
        detail::formatted("cannot save to '{}': it is {}; give the name of a file", path.string(), kind));
  const std::string probe = detail::temporary_beside(detail::behind_links(path));
  if (!detail::open_new_file(probe.c_str()).open())
    throw UsageError(
        detail::formatted("cannot save to '{}': {}; give a path in a folder that exists and can be written",
                          path.string(), std::strerror(errno)));
  ::unlink(probe.c_str());
}

/// Writes `bytes` to `name` atomically: to a temporary file beside it, synced, then renamed. After a crash, a
/// full disk or a kill the previous content remains. A symbolic link stays a link; its target is replaced.
/// Throws CheckpointError if writing fails or if `name` exists and is not a regular file.
inline void write_whole(const std::filesystem::path& name, std::string_view bytes) {
  if (const auto kind = detail::kind_if_no_file(name); !kind.empty())
    throw CheckpointError(
        detail::formatted("could not write {} bytes to '{}': it is {}; give the name of a file", bytes.size(),
                          name.string(), kind));
  const std::filesystem::path path = detail::behind_links(name);
  const std::string temporary = detail::temporary_beside(path);
  detail::Descriptor file = detail::open_new_file(temporary.c_str());
  if (!file.open() || !detail::write_all(file.get(), bytes) || ::fsync(file.get()) != 0 || !file.close() ||
      ::rename(temporary.c_str(), path.c_str()) != 0) {
    const int reason = errno;
    ::unlink(temporary.c_str());
    throw CheckpointError(
        detail::formatted("could not write {} bytes to '{}': {}; what was there before is unchanged",
                          bytes.size(), path.string(), std::strerror(reason)));
  }
  // The sync of the folder makes the rename survive a power failure. Not every file system supports it.
  const auto folder = path.has_parent_path() ? path.parent_path() : std::filesystem::path(".");
  const detail::Descriptor directory(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (directory.open()) ::fsync(directory.get());
}

/// Returns the content of a regular file. Does not block on a pipe. Throws CheckpointError if `path` is not a
/// regular file, is empty, or cannot be read.
inline std::string read_whole(const std::filesystem::path& path) {
  const auto refuse = [&](std::string_view why) {
    throw CheckpointError(detail::formatted("could not read '{}': {}", path.string(), why));
  };
  // Before opening: opening a device may have side effects.
  if (const auto kind = detail::kind_if_no_file(path); !kind.empty())
    refuse(detail::formatted("it is {}; give the name of a file", kind));
  const detail::Descriptor file(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  struct ::stat status {};
  if (!file.open() || ::fstat(file.get(), &status) != 0) refuse(std::strerror(errno));
  if (!S_ISREG(status.st_mode)) refuse("it is no regular file; give the name of one");
  if (status.st_size == 0) refuse("it is empty");
  std::string bytes;
  try {
    bytes.resize(static_cast<std::size_t>(status.st_size));
  } catch (const std::exception&) {  // std::bad_alloc or std::length_error
    refuse(detail::formatted("there is no memory for its {} bytes", status.st_size));
  }
  std::size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t got = ::read(file.get(), bytes.data() + done, bytes.size() - done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) refuse(std::strerror(errno));
    if (got == 0) refuse(detail::formatted("it ended after {} of {} bytes", done, bytes.size()));
    done += static_cast<std::size_t>(got);
  }
  return bytes;
}

/// Returns the bytes of a file that `torch::load(model, path)` reads. It serializes to memory, since
/// `torch::save` to a path ends the process when the disk is full.
inline std::string serialize_model(const torch::nn::Module& model) {
  torch::serialize::OutputArchive archive;
  model.save(archive);
  return detail::bytes_of(archive);
}

}  // namespace lockstep

namespace lockstep::detail {

// Pairs every tensor of `module` with the archive's. Appends each mismatch to `faults`.
inline void match_tensors(const torch::nn::Module& module, torch::serialize::InputArchive& archive,
                          const std::string& prefix, std::vector<std::pair<at::Tensor, at::Tensor>>& pairs,
                          std::vector<std::string>& faults) {
  std::vector<std::string> known;
  auto match = [&](const auto& named, bool is_buffer) {
    for (const auto& item : named) {
      known.push_back(item.key());
      at::Tensor read;
      if (!item.value().defined()) continue;
      if (!archive.try_read(item.key(), read, is_buffer))
        faults.push_back(detail::formatted("{}{} is not in the file", prefix, item.key()));
      else if (read.sizes() != item.value().sizes() || read.scalar_type() != item.value().scalar_type())
        faults.push_back(detail::formatted("{}{} is {} in the file and {} in the model", prefix, item.key(),
                                           describe(read), describe(item.value())));
      else
        pairs.emplace_back(item.value(), read);
    }
  };
  match(module.named_parameters(/*recurse=*/false), false);
  match(module.named_buffers(/*recurse=*/false), true);
  for (const auto& child : module.named_children()) {
    known.push_back(child.key());
    torch::serialize::InputArchive inner;
    if (!archive.try_read(child.key(), inner)) {
      if (child.value()->is_serializable() && !child.value()->named_parameters().is_empty())
        faults.push_back(detail::formatted("{}{} is not in the file", prefix, child.key()));
      continue;
    }
    match_tensors(*child.value(), inner, prefix + child.key() + ".", pairs, faults);
  }
  for (const auto& key : archive.keys())
    if (key != "training" && std::find(known.begin(), known.end(), key) == known.end())
      faults.push_back(detail::formatted("{}{} is in the file only", prefix, key));
}

/// Pairs the model's tensors with the archive's. Throws CheckpointError that names every tensor that is
/// missing, unexpected, or of another shape or dtype.
inline std::vector<std::pair<at::Tensor, at::Tensor>> matched_tensors(
    const torch::nn::Module& model, torch::serialize::InputArchive& archive) {
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;
  std::vector<std::string> faults;
  match_tensors(model, archive, "", pairs, faults);
  if (faults.empty()) return pairs;
  std::string text = "it does not fit the model: ";
  for (std::size_t i = 0; i < faults.size(); ++i) text += (i ? "; " : "") + faults[i];
  throw CheckpointError(text);
}

inline void copy_tensors(const std::vector<std::pair<at::Tensor, at::Tensor>>& pairs) {
  const at::NoGradGuard no_grad;
  for (const auto& [own, read] : pairs) own.copy_(read);
}

/// The key of the model in a checkpoint. A file of a model alone does not have it.
inline constexpr const char* checkpoint_model = "checkpoint_model";

}  // namespace lockstep::detail

namespace lockstep {

/// Copies tensors into `model` from `bytes` of serialize_model, torch::save or a checkpoint. Throws
/// CheckpointError if the bytes are damaged (see ArchiveCheck), or naming every tensor that is missing,
/// unexpected, or of another shape or dtype; the model is unchanged then. `origin` names the bytes in errors.
inline void deserialize_model(torch::nn::Module& model, std::string_view bytes, std::string_view origin) {
  detail::copy_tensors(detail::reading_file(origin, bytes, [&] {
    torch::serialize::InputArchive archive = detail::archive_of(bytes), inner;
    const bool whole_run = archive.try_read(detail::checkpoint_model, inner);
    return detail::matched_tensors(model, whole_run ? inner : archive);
  }));
}

/// Saves and loads a model in a single process. `Trainer::save` and `load` do it for all ranks.
inline void save_model(const torch::nn::Module& model, const std::filesystem::path& path) {
  write_whole(path, serialize_model(model));
}
inline void load_model(torch::nn::Module& model, const std::filesystem::path& path) {
  deserialize_model(model, read_whole(path), path.string());
}

}  // namespace lockstep

namespace lockstep {

/// Writes rank 0's model atomically. Collective: every rank returns once the file is written, or throws the
/// same CheckpointError.
template <Gathering C>
void save_model(const torch::nn::Module& model, const std::filesystem::path& path, C& comm) {
  forbid_in_rank_zero_scope("save_model");
  agree_with_rank_zero<CheckpointError>(comm, [&] { save_model(model, path); });
}

/// Reads a model on rank 0 and copies it to every rank; the other ranks need no access to the file.
/// Collective. Every rank throws the same error of load_model.
template <Gathering C>
void load_model(torch::nn::Module& model, const std::filesystem::path& path, C& comm) {
  forbid_in_rank_zero_scope("load_model");
  const std::string bytes = agree_with_rank_zero<CheckpointError>(comm, [&] { return read_whole(path); });
  agree<CheckpointError>(comm, [&] { deserialize_model(model, bytes, path.string()); });
}

}  // namespace lockstep

#pragma once

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/serialize/archive.h>

#include "lockstep/comm/agreement.hpp"
#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/detail/own_error.hpp"
#include "lockstep/data/generator.hpp"
#include "lockstep/detail/const_data.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/detail/served_call.hpp"
#include "lockstep/error.hpp"
#include "lockstep/files.hpp"
#include "lockstep/grad/model.hpp"
#include "lockstep/train/detail/archive.hpp"
#include "lockstep/train/detail/matched_tensors.hpp"
#include "lockstep/train/metrics.hpp"
#include "lockstep/world/world.hpp"

namespace lockstep {

/// Returns the bytes of a file that `torch::load(model, path)` reads. It serializes to memory, since
/// `torch::save` to a path ends the process when the disk is full.
inline std::string serialize_model(const torch::nn::Module& model) {
  torch::serialize::OutputArchive archive;
  model.save(archive);
  return detail::bytes_of(archive);
}

}  // namespace lockstep

namespace lockstep::detail {

/// The key of the model in a checkpoint. A file of a model alone does not have it.
inline constexpr const char* checkpoint_model = "checkpoint_model";

}  // namespace lockstep::detail

namespace lockstep {

/// Copies tensors into `model` from `bytes` of serialize_model, torch::save or a checkpoint. Throws
/// CheckpointError if the bytes are damaged (see detail::check_archive), or if a tensor is missing, unexpected, or of
/// another shape or dtype; the error names each such tensor, and the model is unchanged. `origin` names the
/// bytes in errors.
inline void deserialize_model(torch::nn::Module& model, std::string_view bytes, std::string_view origin) {
  detail::reading_file(origin, bytes, [&] {
    torch::serialize::InputArchive archive = detail::archive_of(bytes), inner;
    const bool whole_run = archive.try_read(detail::checkpoint_model, inner);
    return detail::match_tensors(model, whole_run ? inner : archive);
  }).copy();
}

/// Writes a model atomically to a file that `torch::load(model, path)` reads. Not collective: call it on one
/// rank. Throws CheckpointError if writing fails.
inline void save_model(const torch::nn::Module& model, const std::filesystem::path& path) {
  write_file_atomically(path, serialize_model(model));
}
/// Reads a file of save_model, torch::save or a checkpoint into `model`. Not collective. Throws
/// CheckpointError as read_file and deserialize_model do.
inline void load_model(torch::nn::Module& model, const std::filesystem::path& path) {
  deserialize_model(model, read_file(path), path.string());
}

/// Writes rank 0's model atomically. Collective: every rank returns once the file is written, or throws the
/// same CheckpointError.
template <Communicator C>
void save_model(const torch::nn::Module& model, const std::filesystem::path& path, C& comm) {
  forbid_in_rank_zero_scope("save_model");
  const detail::CallScope scope("save_model");
  agree_with_rank_zero<CheckpointError>(comm, [&] { save_model(model, path); });
}

/// Reads a model on rank 0 and copies it to every rank; the other ranks need no access to the file.
/// Collective. Throws the CheckpointError of load_model, the same on every rank.
template <Communicator C>
void load_model(torch::nn::Module& model, const std::filesystem::path& path, C& comm) {
  forbid_in_rank_zero_scope("load_model");
  const detail::CallScope scope("load_model");
  const std::string bytes = agree_with_rank_zero<CheckpointError>(comm, [&] { return read_file(path); });
  agree<CheckpointError>(comm, [&] { deserialize_model(model, bytes, path.string()); });
}

/// State that a checkpoint can hold besides the run itself, such as a MovingAverage or a
/// torch::optim::Optimizer. `save(archive)` writes it and `load(archive)` restores it, identically on every
/// rank. A checkpoint holds the extras and the precision of a Trainer if they model this concept.
template <class T>
concept Checkpointed = requires(T& part, const T& saved, torch::serialize::OutputArchive& out,
                                torch::serialize::InputArchive& in) {
  saved.save(out);
  part.load(in);
};

}  // namespace lockstep

namespace lockstep::detail {

inline constexpr std::int64_t checkpoint_format = 1;

/// The per-rank state of a checkpoint: generators, loss so far in the epoch, local buffers, and data
/// position.
struct RankState {
  Total loss;
  std::vector<Total> parts;                // of the loss, in their order
  at::Tensor generator, device_generator;  // of the CPU, and of the model's device if that is not the CPU
  std::vector<at::Tensor> buffers;
  std::string data_position;  // an archive; empty between epochs

  [[nodiscard]] std::string bytes() const {
    torch::serialize::OutputArchive archive;
    archive.write("loss_sum", c10::IValue(loss.sum));
    archive.write("loss_count", c10::IValue(loss.count));
    std::vector<double> numbers;
    for (const Total& part : parts) numbers.insert(numbers.end(), {part.sum, part.count});
    archive.write("loss_parts", c10::IValue(numbers));
    archive.write("generator", generator, /*is_buffer=*/true);
    if (device_generator.defined()) archive.write("device_generator", device_generator, /*is_buffer=*/true);
    archive.write("buffers", c10::IValue(static_cast<std::int64_t>(buffers.size())));
    for (std::size_t i = 0; i < buffers.size(); ++i)
      archive.write(detail::formatted("buffer_{}", i), buffers[i], /*is_buffer=*/true);
    write_bytes(archive, "data position", data_position);
    return bytes_of(archive);
  }
  static RankState read(std::string_view bytes) {
    torch::serialize::InputArchive archive = archive_of(bytes);
    RankState state;
    state.loss = {read_number(archive, "loss_sum"), read_number(archive, "loss_count")};
    if (c10::IValue parts; archive.try_read("loss_parts", parts) && parts.isDoubleList()) {
      const std::vector<double> numbers = parts.toDoubleVector();
      for (std::size_t i = 0; i + 1 < numbers.size(); i += 2)
        state.parts.push_back({numbers[i], numbers[i + 1]});
    }
    if (!archive.try_read("generator", state.generator, /*is_buffer=*/true)) refuse_archive("generator");
    (void)archive.try_read("device_generator", state.device_generator, /*is_buffer=*/true);
    const std::int64_t buffers = read_length(archive, "buffers");
    for (std::int64_t i = 0; i < buffers; ++i)
      if (const std::string key = detail::formatted("buffer_{}", i);
          !archive.try_read(key, state.buffers.emplace_back(), /*is_buffer=*/true))
        refuse_archive(key);
    state.data_position = read_bytes(archive, "data position");
    return state;
  }
};

/// Returns the state that rank `rank` of `size` restores from the saved ranks' states. On another number of
/// ranks, each saved loss is added on one rank, and additional ranks keep their generators.
inline RankState state_of_rank(const std::vector<RankState>& saved, int rank, int size) {
  const auto own = static_cast<std::size_t>(rank);
  if (saved.size() == static_cast<std::size_t>(size)) return saved[own];
  RankState state;
  for (std::size_t i = own; i < saved.size(); i += static_cast<std::size_t>(size)) {
    state.loss += saved[i].loss;
    state.parts.resize(std::max(state.parts.size(), saved[i].parts.size()));
    for (std::size_t part = 0; part < saved[i].parts.size(); ++part)
      state.parts[part] += saved[i].parts[part];
  }
  if (own < saved.size()) {
    state.generator = saved[own].generator;
    state.device_generator = saved[own].device_generator;
  }
  state.data_position = saved[0].data_position;
  return state;
}

/// Writes the parts of a checkpoint to an archive, each under its own key.
class CheckpointWriter {
 public:
  explicit CheckpointWriter(torch::serialize::OutputArchive& archive) : archive_(archive) {
    archive_.write("format", c10::IValue(checkpoint_format));
  }

  template <class Part>
  void add(const std::string& key, const Part& part) {
    write_archive(archive_, key, [&](torch::serialize::OutputArchive& inner) { part.save(inner); });
  }
  /// Adds the bytes of each rank's RankState, and those of DistributedDataParallel::state.
  void add_ranks(const std::vector<std::string>& ranks, const std::string& ddp) {
    archive_.write("ranks", c10::IValue(static_cast<std::int64_t>(ranks.size())));
    for (std::size_t rank = 0; rank < ranks.size(); ++rank)
      write_bytes(archive_, detail::formatted("rank_{}", rank), ranks[rank]);
    write_bytes(archive_, "ddp", ddp);
  }

 private:
  torch::serialize::OutputArchive& archive_;
};

/// Reads the parts of a checkpoint. Throws CheckpointError or c10::Error for a missing part.
class CheckpointReader {
 public:
  explicit CheckpointReader(std::string_view bytes) : archive_(archive_of(bytes)) {
    c10::IValue format;
    if (!archive_.try_read("format", format) || !format.isInt())
      throw CheckpointError("it is no checkpoint of a Trainer; the file of a model alone is for load");
    if (format.toInt() != checkpoint_format)
      throw CheckpointError(
          detail::formatted("it is a checkpoint of format {}, and this version of lockstep reads format {}: "
                            "load it with the version that saved it",
                            format.toInt(), checkpoint_format));
  }

  torch::serialize::InputArchive part(const std::string& key) { return read_archive(archive_, key); }
  template <class Part>
  void read(const std::string& key, Part& part_) {
    auto inner = part(key);
    part_.load(inner);
  }
  std::vector<RankState> ranks() {
    std::vector<RankState> states;
    const std::int64_t ranks = read_length(archive_, "ranks");
    if (ranks == 0) refuse_archive("ranks");
    for (std::int64_t rank = 0; rank < ranks; ++rank)
      states.push_back(RankState::read(read_bytes(archive_, detail::formatted("rank_{}", rank))));
    return states;
  }
  std::string ddp() { return read_bytes(archive_, "ddp"); }

 private:
  torch::serialize::InputArchive archive_;
};

}  // namespace lockstep::detail

#pragma once

#include <filesystem>

#include "lockstep/data/generator.hpp"
#include "lockstep/files.hpp"
#include "lockstep/grad/model.hpp"
#include "lockstep/train/detail/archive.hpp"
#include "lockstep/train/metrics.hpp"

namespace lockstep::inline v0_1 {

/// The key of the model in a checkpoint. A file of a model alone does not have it.
namespace detail {
inline constexpr const char* checkpoint_model = "checkpoint_model";
}  // namespace detail

/// Returns the bytes of a file that `torch::load(model, path)` reads. It serializes to memory, since
/// `torch::save` to a path ends the process when the disk is full.
inline std::string serialize_model(const torch::nn::Module& model) {
  torch::serialize::OutputArchive archive;
  model.save(archive);
  return detail::bytes_of(archive);
}

/// Copies tensors into `model` from `bytes` of serialize_model, torch::save or a checkpoint. Throws CheckpointError if
/// the bytes are damaged (see detail::check_archive), or if a tensor is missing, unexpected, or of another shape or
/// dtype; the error names each such tensor, and the model is unchanged. `origin` names the bytes in errors.
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

/// Writes rank 0's model. Collective: every rank returns once it is written, or throws the same error.
template <Communicator C>
void save_model(const torch::nn::Module& model, const std::filesystem::path& path, C& comm) {
  forbid_in_rank_zero_scope("save_model");
  const detail::CallScope scope("save_model");
  agree_with_rank_zero<CheckpointError>(comm, [&] { save_model(model, path); });
}

/// Reads a model on rank 0 and copies it to every rank. Collective. Throws the same error on every rank.
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
concept Checkpointed = requires(T& part, const std::remove_reference_t<T>& saved,
                                torch::serialize::OutputArchive& out, torch::serialize::InputArchive& in) {
  saved.save(out);
  part.load(in);
};

/// A part of a checkpoint whose state differs between the ranks, such as an environment, a replay buffer or a
/// carried hidden state: each rank saves its own, and loads it on the same number of ranks only. Any other part
/// is saved by rank 0 and loaded on every rank.
///
///   trainer.save_checkpoint(path, lockstep::PerRank{environment});
template <class Part>
struct PerRank {
  static constexpr bool per_rank = true;  ///< Marks the part for the Trainer.
  Part& part;                             ///< Must outlive this object.

  void save(torch::serialize::OutputArchive& archive) const { part.save(archive); }
  void load(torch::serialize::InputArchive& archive) { part.load(archive); }
};
template <class Part>
PerRank(Part&) -> PerRank<Part>;

namespace detail {
inline constexpr std::int64_t checkpoint_format = 1;

template <class Part>
concept PerRankPart = requires {
  requires Part::per_rank;
};

/// The per-rank state of a checkpoint: generators, loss so far in the epoch, local buffers, and data position.
struct RankState {
  Total loss;
  std::vector<Total> parts;                // of the loss, in their order
  at::Tensor generator, device_generator;  // of the CPU, and of the model's device if that is not the CPU
  std::vector<at::Tensor> buffers;
  std::string data_position;           // an archive; empty between epochs
  std::vector<std::string> own_parts;  // archives of the PerRank parts

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
    archive.write("own_parts", c10::IValue(static_cast<std::int64_t>(own_parts.size())));
    for (std::size_t i = 0; i < own_parts.size(); ++i)
      write_bytes(archive, formatted("own_part_{}", i), own_parts[i]);
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
    state.generator = read_tensor(archive, "generator");
    (void)archive.try_read("device_generator", state.device_generator, /*is_buffer=*/true);
    const std::int64_t buffers = read_length(archive, "buffers");
    for (std::int64_t i = 0; i < buffers; ++i)
      state.buffers.push_back(read_tensor(archive, formatted("buffer_{}", i)));
    state.data_position = read_bytes(archive, "data position");
    const std::int64_t own_parts = read_length(archive, "own_parts");
    for (std::int64_t i = 0; i < own_parts; ++i)
      state.own_parts.push_back(read_bytes(archive, formatted("own_part_{}", i)));
    return state;
  }
};

/// Returns the state that rank `rank` of `size` restores from the saved ranks' states. On another number of
/// ranks, each saved loss is added on one rank, and additional ranks keep their generators.
inline RankState state_of_rank(const std::vector<RankState>& saved, int rank, int size) {
  const auto own = static_cast<std::size_t>(rank);
  RankState state;
  if (saved.size() == static_cast<std::size_t>(size)) {
    state = saved[own];
    c10::IValue of_all;
    if (const std::string& position = saved[0].data_position;
        !position.empty() && archive_of(position).try_read("from_rank_zero", of_all))
      state.data_position = position;
    return state;
  }
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

template <class Part>
std::string part_bytes(const Part& part) {
  torch::serialize::OutputArchive archive;
  part.save(archive);
  return bytes_of(archive);
}
/// Writes a part of a checkpoint under its own key.
template <class Part>
void write_part(torch::serialize::OutputArchive& archive, const std::string& key, const Part& part) {
  write_archive(archive, key, [&](torch::serialize::OutputArchive& inner) { part.save(inner); });
}
template <class Part>
void read_part(torch::serialize::InputArchive& archive, const std::string& key, Part& part) {
  torch::serialize::InputArchive inner = read_archive(archive, key);
  part.load(inner);
}

/// Writes the bytes of each rank's RankState.
inline void write_ranks(torch::serialize::OutputArchive& archive, const std::vector<std::string>& ranks) {
  archive.write("ranks", c10::IValue(static_cast<std::int64_t>(ranks.size())));
  for (std::size_t rank = 0; rank < ranks.size(); ++rank)
    write_bytes(archive, formatted("rank_{}", rank), ranks[rank]);
}
inline std::vector<RankState> read_ranks(torch::serialize::InputArchive& archive) {
  std::vector<RankState> states;
  const std::int64_t ranks = read_length(archive, "ranks");
  if (ranks == 0) refuse_archive("ranks");
  for (std::int64_t rank = 0; rank < ranks; ++rank)
    states.push_back(RankState::read(read_bytes(archive, formatted("rank_{}", rank))));
  return states;
}

/// Opens a checkpoint. Throws CheckpointError for another kind of archive, or another format.
inline torch::serialize::InputArchive checkpoint_of(std::string_view bytes) {
  torch::serialize::InputArchive archive = archive_of(bytes);
  c10::IValue format;
  if (!archive.try_read("format", format) || !format.isInt())
    throw CheckpointError("it is no checkpoint of a Trainer; the file of a model alone is for load");
  if (format.toInt() != checkpoint_format)
    throw CheckpointError(
        formatted("it is a checkpoint of format {}, and this version of lockstep reads format {}: "
                  "load it with the version that saved it",
                  format.toInt(), checkpoint_format));
  return archive;
}
}  // namespace detail

}  // namespace lockstep::inline v0_1

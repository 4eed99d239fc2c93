#pragma once

#include <unistd.h>

#include <filesystem>
#include <string>

#include <fmt/format.h>

#include "lockstep/comm/cpu_comm.hpp"
#include "lockstep/world/world.hpp"

/// A temporary folder that all ranks of a host use. The constructor is collective. Rank 0's destructor removes
/// the folder.
struct CommonFolder {
  explicit CommonFolder(const lockstep::World& world) : comm(world) {
    path = comm.broadcast_bytes(
        fmt::format("{}/lockstep-ranks-{}", std::filesystem::temp_directory_path().string(), ::getpid()), 0);
    if (comm.rank() == 0) std::filesystem::create_directory(path);
    comm.barrier();
  }
  CommonFolder(const CommonFolder&) = delete;
  CommonFolder& operator=(const CommonFolder&) = delete;
  ~CommonFolder() {
    if (comm.rank() == 0) std::filesystem::remove_all(path);
  }
  [[nodiscard]] std::filesystem::path operator/(const std::string& name) const { return path / name; }
  /// Returns whether rank 0 sees the file, on every rank. Collective.
  [[nodiscard]] bool has(const std::string& name) {
    return comm.broadcast_bytes(std::filesystem::exists(path / name) ? "1" : "", 0) == "1";
  }

  lockstep::CpuComm comm;
  std::filesystem::path path;
};

#pragma once

#include <sys/stat.h>
#include <sys/types.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <string>
#include <system_error>
#include <tuple>
#include <vector>

#include "lockstep/detail/bytes.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/detail/lists.hpp"
#include "lockstep/log/detail/console.hpp"
#include "lockstep/world/detail/environment.hpp"
#include "lockstep/world/detail/socket.hpp"
#include "lockstep/world/detail/store_protocol.hpp"

namespace lockstep::inline v0_1::detail {

/// What each rank says about itself when it joins a run.
struct RankIdentity {
  std::string process = {};        ///< "nodeA pid 811"
  std::string host = {};           ///< equal on all ranks of a host, see host_identity
  std::string address = {};        ///< at which other hosts reach the rank, or empty
  std::string threads = {};        ///< the number of its threads
  std::string thread_source = {};  ///< what determines that number
  /// The place on the host that a launcher has assigned, and the variable that holds it; or empty. Without
  /// `local_size`, `local_rank` is a place that the ranks which join must confirm.
  std::string local_rank = {}, local_size = {}, local_variable = {};
  std::string program = {};  ///< see program_text; empty where all ranks run one

  [[nodiscard]] std::string host_text() const { return process.substr(0, process.find(' ')); }
};
template <>
inline constexpr auto fields_of<RankIdentity> =
    std::tuple{&RankIdentity::process,    &RankIdentity::host,           &RankIdentity::address,
               &RankIdentity::threads,    &RankIdentity::thread_source,  &RankIdentity::local_rank,
               &RankIdentity::local_size, &RankIdentity::local_variable, &RankIdentity::program};

/// Identifies the host and network namespace of this process: processes with one identity reach each other by
/// the loopback.
inline std::string host_identity() {
  struct stat network {};
  stat("/proc/self/ns/net", &network);
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return formatted("{}/{}/{}", boot, network.st_ino, host_name());
}

/// Returns the name of a process of this host in errors: "nodeA pid 811".
inline std::string process_name(pid_t pid) {
  return formatted("{} pid {}", host_name(), pid);
}

/// Returns the file name of this process's program and a hash of its first 64 MiB: "mnist 1f2e55aa0123456f".
inline std::string program_text() {
  std::error_code unknown;
  const auto path = std::filesystem::read_symlink("/proc/self/exe", unknown);
  std::ifstream file("/proc/self/exe", std::ios::binary);
  std::vector<std::uint64_t> block(1 << 17);
  std::uint64_t hash = fnv1a_basis;
  for (int i = 0; i < 64 && file; ++i) {
    std::fill(block.begin(), block.end(), 0);
    file.read(reinterpret_cast<char*>(block.data()), 1 << 20);
    const auto* words = block.data();
    for (int at = 0; at < 1 << 17; ++at)  // as FNV-1a, which takes eight times as long by bytes
      hash = ((hash << 29 | hash >> 35) ^ words[at]) * 0x100000001b3;
  }
  return formatted("{} {:016x}", path.filename().string(), hash);
}

/// What the store knows of a rank.
struct KnownRank {
  std::optional<RankIdentity> identity{};  // once it has joined
  bool lost = false;                       // its connection has closed before it made a communicator
  std::optional<int> exit_code{};          // once it has ended; -1 if it is unknown

  [[nodiscard]] bool is(const RankIdentity& other) const {
    return identity && identity->process == other.process && identity->host == other.host;
  }
};
template <>
inline constexpr auto fields_of<KnownRank> =
    std::tuple{&KnownRank::identity, &KnownRank::lost, &KnownRank::exit_code};

/// What the store says to a process that joins: whose the rank is, and who has said first how many ranks there are.
struct JoinAnswer {
  KnownRank rank{};
  int size = 0, sized_by = -1;
};
template <>
inline constexpr auto fields_of<JoinAnswer> =
    std::tuple{&JoinAnswer::rank, &JoinAnswer::size, &JoinAnswer::sized_by};

/// Returns the error about a LOCAL_RANK without LOCAL_WORLD_SIZE that is not the rank's number among those of
/// its host, empty if there is none.
inline std::string unconfirmed_local_rank(const std::vector<RankIdentity>& ranks) {
  std::map<std::string, int> ranks_on;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    const RankIdentity& identity = ranks[rank];
    const int number = ranks_on[identity.host]++;
    if (!identity.local_rank.empty() && identity.local_size.empty() &&
        identity.local_rank != std::to_string(number))
      return formatted(
          "LOCAL_RANK={} of rank {} contradicts the other ranks on {}, among which it is number {}: set "
          "LOCAL_WORLD_SIZE too if that is meant, or unset LOCAL_RANK",
          identity.local_rank, rank, identity.host_text(), number);
  }
  return {};
}

/// Returns the error about two ranks of a host that have one local rank; empty if there are none. The ranks
/// of a host may be several complete sets: launchers can imitate several hosts on one.
inline std::string repeated_local_rank(const std::vector<RankIdentity>& ranks) {
  // By host with its number of ranks, and local rank.
  std::map<std::string, std::map<std::string, std::vector<std::size_t>>> hosts;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank)
    if (const RankIdentity& one = ranks[rank]; !one.local_size.empty())
      hosts[one.host + " " + one.local_size][one.local_rank].push_back(rank);
  for (const auto& [host, places] : hosts) {
    const std::size_t sets = places.rbegin()->second.size(), size = places.size();
    for (const auto& [local_rank, holders] : places) {
      const RankIdentity& one = ranks[holders[0]];
      if (holders.size() == 1 || (holders.size() == sets && one.local_size == std::to_string(size))) continue;
      return formatted(
          "ranks {} and {} on {} both have {}={} of {}: pass the launcher's whole environment on to each "
          "process, or give each rank of a host its own",
          holders[0], holders[1], one.host_text(),
          one.local_variable.empty() ? std::string("local rank") : one.local_variable, local_rank,
          one.local_size);
    }
  }
  return {};
}

/// Groups the ranks by what `key` returns of them, in the order of the groups' first ranks.
template <class Key>
std::vector<std::vector<std::size_t>> grouped(const std::vector<RankIdentity>& ranks, Key key) {
  std::map<std::string, std::size_t> numbers;
  std::vector<std::vector<std::size_t>> groups;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    const auto number = numbers.emplace(std::invoke(key, ranks[rank]), groups.size()).first->second;
    if (number == groups.size()) groups.emplace_back();
    groups[number].push_back(rank);
  }
  return groups;
}

/// Returns the warning about ranks that run different programs; empty if there are none.
inline std::string different_programs(const std::vector<RankIdentity>& ranks) {
  // By hash: a copy may have another name.
  const auto groups =
      grouped(ranks, [](const RankIdentity& one) { return one.program.substr(one.program.rfind(' ') + 1); });
  if (groups.size() < 2) return {};
  std::vector<std::string> parts;
  for (const auto& group : groups)
    parts.push_back(formatted("{} on {} {}", ranks[group[0]].program, group.size() == 1 ? "rank" : "ranks",
                              joined(group, ", ", " and ", 8)));
  return formatted("warning: the ranks run different programs: {}; build and copy one to every host",
                   joined(parts, ", ", ", ", 4));
}

/// Returns one line about a run whose ranks have all joined: the number of ranks, their hosts, what started them, the
/// rendezvous unless `launch` has set it for this host alone, and the threads of each rank.
inline std::string run_summary(const Environment& env, const std::vector<RankIdentity>& ranks) {
  const auto hosts = grouped(ranks, &RankIdentity::host);
  std::vector<std::string> counts;
  for (const auto& host : hosts)
    counts.push_back(formatted("{}: {}", ranks[host[0]].host_text(), host.size()));
  std::string text =
      formatted("{} rank{} on {} host{} ({}), started by {}", ranks.size(), ranks.size() == 1 ? "" : "s",
                hosts.size(), hosts.size() == 1 ? "" : "s", joined(counts, ", ", ", ", 8),
                env.launcher.empty() ? std::string("hand") : env.launcher);
  if (env.launcher != "--nproc" || hosts.size() > 1 ||
      !env.rendezvous.starts_with("tcp://" + loopback_address() + ":")) {
    if (!env.rank_variables.empty()) text += formatted(" ({})", env.rank_variables);
    if (!env.rendezvous.empty()) text += formatted(", rendezvous at {}", env.rendezvous);
  }
  const auto values = [&](std::string RankIdentity::*member) {
    std::vector<std::string> all;
    for (const auto& group : grouped(ranks, member)) all.push_back(ranks[group[0]].*member);
    return joined(all, " or ");
  };
  return text + formatted("; threads per rank: {}, from {}", values(&RankIdentity::threads),
                          values(&RankIdentity::thread_source));
}

/// Writes the line about the run and different_programs() to stderr: stdout belongs to the program.
inline void write_run_summary(const Environment& env, const std::vector<RankIdentity>& ranks) {
  write_lines(stderr, "lockstep: " + run_summary(env, ranks) + "\n");
  if (const auto warning = different_programs(ranks); !warning.empty()) write_lines(stderr, warning + "\n");
}

}  // namespace lockstep::inline v0_1::detail

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <string>
#include <vector>

#include "lockstep/detail/format.hpp"
#include "lockstep/detail/lists.hpp"
#include "lockstep/log/detail/console.hpp"
#include "lockstep/world/detail/store.hpp"
#include "lockstep/world/environment.hpp"

namespace lockstep::detail {

/// Returns one line about a run whose ranks have all joined: the number of ranks, their hosts, what started them, the
/// rendezvous and the threads of each rank. Where `launch` has started all of them on this host, it has set the
/// variables and the rendezvous itself, and the line leaves them out. A single rank has no rendezvous.
inline std::string run_summary(const Environment& env, const std::vector<RankIdentity>& ranks) {
  constexpr std::size_t hosts_shown = 8;
  struct Host {
    std::string identity, name;
    int ranks = 0;
  };
  std::vector<Host> hosts;
  std::vector<std::string> threads, sources;
  const auto add = [](std::vector<std::string>& known, const std::string& text) {
    if (std::find(known.begin(), known.end(), text) == known.end()) known.push_back(text);
  };
  for (const RankIdentity& rank : ranks) {
    const auto known = std::find_if(hosts.begin(), hosts.end(),
                                    [&](const Host& host) { return host.identity == rank.host; });
    if (known == hosts.end())
      hosts.push_back({rank.host, rank.host_text(), 1});
    else
      ++known->ranks;
    add(threads, rank.threads);
    add(sources, rank.thread_source);
  }
  std::string text = detail::formatted("{} rank{} on {} host{} (", ranks.size(), ranks.size() == 1 ? "" : "s",
                                       hosts.size(), hosts.size() == 1 ? "" : "s");
  std::vector<std::string> counts;
  for (const Host& host : hosts) counts.push_back(detail::formatted("{}: {}", host.name, host.ranks));
  text += joined(counts, ", ", ", ", hosts_shown);
  text += detail::formatted("), started by {}", env.launcher.empty() ? std::string("hand") : env.launcher);
  if (env.launcher != "--nproc" || hosts.size() > 1 ||
      !env.rendezvous.starts_with("tcp://" + loopback_address() + ":")) {
    if (!env.rank_variables.empty()) text += detail::formatted(" ({})", env.rank_variables);
    if (!env.rendezvous.empty()) text += detail::formatted(", rendezvous at {}", env.rendezvous);
  }
  return text + detail::formatted("; threads per rank: {}, from {}", joined(threads, " or "),
                                  joined(sources, " or "));
}

/// Writes the line about the run to stderr: stdout belongs to the program.
inline void write_run_summary(const Environment& env, const std::vector<RankIdentity>& ranks) {
  write_lines(stderr, "lockstep: " + run_summary(env, ranks) + "\n");
}

}  // namespace lockstep::detail

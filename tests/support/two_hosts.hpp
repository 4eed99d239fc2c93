#pragma once

#include <fmt/format.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

namespace lockstep_test {

/// Two hosts on one machine, "nodeA" and "nodeB": network namespaces joined by a cable, each with a hosts
/// file as Debian writes it, in which a host's own name is one for its loopback. Needs root and iproute2.
class TwoHosts {
 public:
  TwoHosts() : tag_(fmt::format("lockstep{}", getpid())) {
    if (geteuid() != 0) {
      missing_ = "no root";
    } else if (!run("command -v ip nsenter unshare") || !run("ip netns add {}A", tag_)) {
      missing_ = "no network namespaces";
    } else if (!run("ip netns add {}B", tag_) ||
               !run("ip link add e0 netns {0}A type veth peer name e0 netns {0}B", tag_)) {
      missing_ = "no virtual network";
    }
    for (const char* host : {"A", "B"}) {
      const int own = *host == 'A' ? 1 : 2;
      if (missing_.empty() &&
          !(run("ip -n {}{} addr add 10.177.0.{}/24 dev e0", tag_, host, own) &&
            run("ip -n {}{} link set lo up", tag_, host) && run("ip -n {}{} link set e0 up", tag_, host)))
        missing_ = "no virtual network";
      std::ofstream{hosts_file(host)} << fmt::format(
          "127.0.0.1 localhost\n127.0.1.1 node{}\n10.177.0.{} node{}\n", host, 3 - own, own == 1 ? "B" : "A");
    }
  }
  ~TwoHosts() {
    for (const char* host : {"A", "B"}) {
      run("ip netns del {}{}", tag_, host);
      unlink(hosts_file(host).c_str());
    }
  }
  TwoHosts(const TwoHosts&) = delete;
  TwoHosts& operator=(const TwoHosts&) = delete;

  /// Why there are none; empty where there are.
  [[nodiscard]] const std::string& missing() const { return missing_; }

  /// The command that runs `command` on host "A" or "B".
  [[nodiscard]] std::vector<std::string> on(const std::string& host, std::vector<std::string> command) const {
    std::vector<std::string> all{
        "nsenter",
        fmt::format("--net=/run/netns/{}{}", tag_, host),
        "unshare",
        "--uts",
        "--mount",
        "sh",
        "-c",
        fmt::format("mount --bind {} /etc/hosts && hostname node{} && exec \"$@\"", hosts_file(host), host),
        "sh"};
    all.insert(all.end(), command.begin(), command.end());
    return all;
  }

  /// A shell script for launchers to run in place of ssh: SCRIPT [OPTION ...] HOST COMMAND ... runs the command on `host`.
  [[nodiscard]] std::string remote_shell(const std::string& host) const {
    std::string script =
        "#!/bin/sh\nwhile case $1 in -*) true ;; *) false ;; esac do shift; done\nshift\nexec";
    for (const std::string& word : on(host, {"sh", "-c"})) script += " '" + word + "'";
    return script + " \"$*\"\n";
  }
  /// Pulls the cable, or plugs it in again.
  void link(bool up) const { run("ip -n {}A link set e0 {}", tag_, up ? "up" : "down"); }

 private:
  template <class... Args>
  static bool run(fmt::format_string<Args...> command, Args&&... args) {
    const auto text = fmt::format(command, std::forward<Args>(args)...) + " >/dev/null 2>&1";
    return std::system(text.c_str()) == 0;
  }
  [[nodiscard]] std::string hosts_file(const std::string& host) const {
    return fmt::format("/tmp/{}{}.hosts", tag_, host);
  }

  std::string tag_, missing_;
};

}  // namespace lockstep_test

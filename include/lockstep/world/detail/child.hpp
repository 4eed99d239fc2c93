#pragma once

#include <fcntl.h>
#include <signal.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/detail/failure.hpp"
#include "lockstep/world/detail/process.hpp"

extern "C" char** environ;  // NOLINT: POSIX declares it in no header

namespace lockstep::detail {

/// Returns the path of the running program, so that `ps` shows its name, or /proc/self/exe if the file was
/// replaced. Throws Error if /proc is not mounted.
inline std::string own_program() {
  const std::string running = "/proc/self/exe";
  std::error_code error;
  const auto path = std::filesystem::read_symlink(running, error);
  if (error)
    throw Error(
        formatted("cannot find this program's own file, to start it once for each rank: {}: {}. Mount "
                  "/proc (`mount -t proc proc /proc`), or start the ranks with torchrun",
                  running, error.message()));
  return std::filesystem::equivalent(path, running, error) ? path.string() : running;
}

/// Returns this process's environment with `changes` applied: "NAME=value" sets, "NAME" removes. It points into both.
inline std::vector<char*> changed_environment(const std::vector<std::string>& changes) {
  const auto name_of = [](std::string_view entry) { return entry.substr(0, entry.find('=')); };
  std::vector<char*> result;
  for (char** entry = environ; *entry != nullptr; ++entry)
    if (std::none_of(changes.begin(), changes.end(),
                     [&](const auto& change) { return name_of(change) == name_of(*entry); }))
      result.push_back(*entry);
  for (const auto& change : changes)
    if (change.find('=') != std::string::npos) result.push_back(const_cast<char*>(change.c_str()));
  result.push_back(nullptr);
  return result;
}

/// Starts `program` in its own process group, with `changes` to this process's environment. The kernel kills it
/// when the calling thread ends for any reason. It gets three descriptors as 0, 1 and 2, and keeps `report_to`.
/// `mask` is its initial signal mask. Throws Error.
inline pid_t start_child(const std::string& program, const std::vector<std::string>& arguments,
                         const std::vector<std::string>& changes, const int (&descriptors)[3], int report_to,
                         const sigset_t& mask) {
  // Allocate before the fork: another thread may hold the allocator's lock.
  std::vector<char*> argv;
  for (const auto& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  const auto envp = changed_environment(changes);
  auto report = report_of({.code = 127, .message = "the program could not be executed again: "});
  report.reserve(report.size() + 256);
  const pid_t parent = getpid();
  // Until the child has reset this process's handlers, a signal would run them in the child.
  sigset_t all, own;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &own);
  const pid_t child = fork();
  if (child != 0) {
    const int reason = errno;
    pthread_sigmask(SIG_SETMASK, &own, nullptr);
    if (child < 0)
      throw Error(formatted("cannot start a process: {}: start fewer, or raise `ulimit -u` or the memory",
                            std::strerror(reason)));
    setpgid(child, child);  // in parent and child: the group exists for both, whichever runs first
    return child;
  }
  setpgid(0, 0);
  if (!die_with_parent(parent)) _exit(127);
  for (int number : {0, 1, 2}) dup2(descriptors[number], number);
  fcntl(report_to, F_SETFD, 0);
  for (int number = 1; number < NSIG; ++number) {
    struct sigaction action {};
    if (sigaction(number, nullptr, &action) == 0 && action.sa_handler != SIG_IGN &&
        action.sa_handler != SIG_DFL)
      signal(number, SIG_DFL);
  }
  sigprocmask(SIG_SETMASK, &mask, nullptr);
  execve(program.c_str(), argv.data(), envp.data());
  // strerror takes locks, which another thread of the parent may have held at the fork.
  if (const char* why = strerrordesc_np(errno)) report += why;
  if (write(report_to, report.data(), report.size()) < 0) {  // nobody reads it
  }
  _exit(127);
}

}  // namespace lockstep::detail

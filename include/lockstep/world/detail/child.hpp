#pragma once

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/detail/descriptor.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/detail/failure.hpp"

extern "C" char** environ;  // NOLINT: POSIX declares it in no header

namespace lockstep::detail {

struct Pipe {
  Descriptor read, write;
};

/// Creates a pipe that no other child inherits. Its read end is non-blocking. Throws Error.
inline Pipe make_pipe() {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0)
    throw Error(detail::formatted("cannot make a pipe to a rank: {}", std::strerror(errno)));
  fcntl(ends[0], F_SETFL, O_NONBLOCK);
  return {Descriptor(ends[0]), Descriptor(ends[1])};
}

/// Opens /dev/null for each of 0, 1 and 2 that is closed (`>&-`): the next socket would get that number and
/// receive printed output.
inline void fill_standard_descriptors() {
  for (int number : {0, 1, 2})
    if (fcntl(number, F_GETFD) < 0 && errno == EBADF) {
      const int opened = open("/dev/null", O_RDWR);  // returns the lowest free number, which is `number`
      if (opened > 2) ::close(opened);
    }
}

/// Returns the path of the running program, so that `ps` shows its name, or /proc/self/exe if the file was
/// replaced. Throws Error if /proc is not mounted.
inline std::string own_program() {
  char path[4096];
  const ssize_t length = readlink("/proc/self/exe", path, sizeof path - 1);
  if (length <= 0)
    throw Error(detail::formatted(
        "cannot find this program's own file, to start it once for each rank: /proc/self/exe: {}. Mount "
        "/proc (`mount -t proc proc /proc`), or start the ranks with torchrun",
        std::strerror(errno)));
  path[length] = '\0';
  struct stat named {
  }, running{};
  if (stat(path, &named) == 0 && stat("/proc/self/exe", &running) == 0 && named.st_ino == running.st_ino &&
      named.st_dev == running.st_dev)
    return path;
  return "/proc/self/exe";
}

/// Returns this process's environment with `changes` applied: "NAME=value" sets, "NAME" removes.
inline std::vector<std::string> changed_environment(const std::vector<std::string>& changes) {
  const auto name_of = [](std::string_view entry) { return entry.substr(0, entry.find('=')); };
  std::vector<std::string> result;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    bool kept = true;
    for (const auto& change : changes) kept = kept && name_of(change) != name_of(*entry);
    if (kept) result.emplace_back(*entry);
  }
  for (const auto& change : changes)
    if (change.find('=') != std::string::npos) result.push_back(change);
  return result;
}

inline std::vector<char*> as_c_strings(const std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  for (const auto& text : strings) pointers.push_back(const_cast<char*>(text.c_str()));
  pointers.push_back(nullptr);
  return pointers;
}

/// Makes the kernel kill this process when the thread of `parent` that forked it ends for any reason. Returns
/// false if `parent` ended before that took effect. Async-signal-safe.
inline bool die_with_parent(pid_t parent) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  return getppid() == parent;
}

/// The descriptors of a child: for 0, 1 and 2, and one more that stays open.
struct ChildStreams {
  int in, out, error, report;
};

/// Starts `program` in its own process group. The kernel kills it when the calling thread ends for any
/// reason. `mask` is its initial signal mask. Throws Error.
inline pid_t start_child(const std::string& program, const std::vector<std::string>& arguments,
                         const std::vector<std::string>& environment, const ChildStreams& streams,
                         const sigset_t& mask) {
  // Allocate before the fork: another thread may hold the allocator's lock.
  const auto argv = as_c_strings(arguments);
  const auto envp = as_c_strings(environment);
  const auto report = report_of({.code = 127, .message = "the program could not be executed again"});
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
      throw Error(
          detail::formatted("cannot start a process: {}: start fewer, or raise `ulimit -u` or the memory",
                            std::strerror(reason)));
    setpgid(child, child);  // in parent and child: the group exists for both, whichever runs first
    return child;
  }
  setpgid(0, 0);
  if (!die_with_parent(parent)) _exit(127);
  dup2(streams.in, 0);
  dup2(streams.out, 1);
  dup2(streams.error, 2);
  fcntl(streams.report, F_SETFD, 0);
  for (int number = 1; number < NSIG; ++number) {
    struct sigaction action {};
    if (sigaction(number, nullptr, &action) == 0 && action.sa_handler != SIG_IGN &&
        action.sa_handler != SIG_DFL)
      signal(number, SIG_DFL);
  }
  sigprocmask(SIG_SETMASK, &mask, nullptr);
  execve(program.c_str(), argv.data(), envp.data());
  const int reason = errno;
  const char* why = nullptr;
#ifdef __GLIBC__  // strerror takes locks, which another thread of the parent may have held at the fork
  why = strerrordesc_np(reason);
#endif
  iovec parts[3]{{const_cast<char*>(report.data()), report.size()}};
  const char* texts[] = {why ? ": " : "", why ? why : ""};
  for (int i = 0; i < 2; ++i) parts[i + 1] = {const_cast<char*>(texts[i]), std::strlen(texts[i])};
  if (writev(streams.report, parts, 3) < 0) {  // in one call: the launcher may read between two
  }
  _exit(127);
}

}  // namespace lockstep::detail

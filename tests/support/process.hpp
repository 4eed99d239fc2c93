#pragma once

#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <pty.h>
#include <sched.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

/// Processes that tests start, break and look at.
namespace lockstep_test {

using Milliseconds = std::chrono::milliseconds;
/// Names and values; an empty value removes the variable.
using Variables = std::map<std::string, std::string>;

/// The variable in which a test marks all processes that come of what it starts.
inline constexpr const char* marker_variable = "LOCKSTEP_TEST_MARKER";

/// A text that no other test of any session has as its marker.
inline std::string new_marker() {
  static int count = 0;
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  return fmt::format("{}-{}-{}.{}", getpid(), count++, now.tv_sec, now.tv_nsec);
}

/// A file of a process in /proc; what could be read if the process ends meanwhile, where std::ifstream throws.
inline std::string text_of_process(pid_t pid, const char* file) {
  std::string all;
  const int fd = open(fmt::format("/proc/{}/{}", pid, file).c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return all;
  char buffer[65536];
  for (ssize_t length = 0; (length = read(fd, buffer, sizeof buffer)) > 0;)
    all.append(buffer, static_cast<std::size_t>(length));
  close(fd);
  return all;
}

/// The processes (zombies too) whose environment holds a marker, without the caller.
inline std::vector<pid_t> processes_with(const std::string& marker) {
  std::vector<pid_t> found;
  DIR* folder = opendir("/proc");
  while (const dirent* entry = readdir(folder)) {
    const pid_t pid = std::atoi(entry->d_name);
    if (pid <= 0 || pid == getpid()) continue;
    const std::string all = text_of_process(pid, "environ");
    if (all.find(fmt::format("{}={}", marker_variable, marker)) != std::string::npos) found.push_back(pid);
  }
  closedir(folder);
  return found;
}

/// How many processes with the marker are left once they have had `timeout` to end.
inline int processes_left(const std::string& marker, Milliseconds timeout = Milliseconds(2000)) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  while (true) {
    const auto count = static_cast<int>(processes_with(marker).size());
    if (count == 0 || std::chrono::steady_clock::now() > deadline) return count;
    usleep(10000);
  }
}

/// The state of a process as the kernel names it ('R' runs, 'T' is stopped, 'Z' has ended and nobody knows),
/// and its parent; '?' where there is none.
struct ProcessState {
  char state = '?';
  pid_t parent = 0;
};
inline ProcessState process_state(pid_t pid) {
  const std::string all = text_of_process(pid, "stat");
  const auto end = all.rfind(')');  // behind the name, which may hold anything
  ProcessState found;
  if (end == std::string::npos ||
      std::sscanf(all.c_str() + end + 1, " %c %d", &found.state, &found.parent) != 2)
    return {};
  return found;
}

/// The threads of a process, its main thread first.
inline std::vector<pid_t> threads_of(pid_t pid) {
  std::vector<pid_t> found;
  DIR* folder = opendir(fmt::format("/proc/{}/task", pid).c_str());
  if (folder == nullptr) return found;
  while (const dirent* entry = readdir(folder))
    if (const pid_t thread = std::atoi(entry->d_name); thread > 0) found.push_back(thread);
  closedir(folder);
  return found;
}

/// The children of a process that have ended without being waited for.
inline int zombies_of(pid_t parent) {
  int count = 0;
  DIR* folder = opendir("/proc");
  while (const dirent* entry = readdir(folder)) {
    if (std::atoi(entry->d_name) <= 0) continue;
    const auto found = process_state(std::atoi(entry->d_name));
    if (found.parent == parent && found.state == 'Z') ++count;
  }
  closedir(folder);
  return count;
}

/// How often `part` stands in `text`.
inline int count(const std::string& text, const std::string& part) {
  int found = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

struct StartOptions {
  bool terminal = false;    ///< stdin, stdout and stderr are one terminal (all of it comes out as `out`)
  bool own_session = true;  ///< in a session of its own: signals of this one do not reach it
  bool no_pipes = false;    ///< inherits stdout and stderr
};

/// A process, its output so far, and its end. Killed (with its whole group) when it goes out of scope.
class Process {
 public:
  Process(std::vector<std::string> command, Variables variables, StartOptions options) {
    marker_ = variables.contains(marker_variable) ? variables[marker_variable] : new_marker();
    variables[marker_variable] = marker_;
    int out[2] = {-1, -1}, error[2] = {-1, -1}, terminal = -1;
    if (options.terminal) {
      winsize size{24, 100, 0, 0};
      if (openpty(&out[0], &terminal, nullptr, nullptr, &size) != 0)
        throw std::runtime_error("no pseudo-terminal");
      fcntl(out[0], F_SETFD, FD_CLOEXEC);
    } else if (pipe2(out, O_CLOEXEC) != 0 || pipe2(error, O_CLOEXEC) != 0) {
      throw std::runtime_error("no pipe");
    }
    pid_ = fork();
    if (pid_ == 0) {
      if (options.own_session) setsid();
      if (options.terminal) {
        ioctl(terminal, TIOCSCTTY, 0);
        for (int fd : {0, 1, 2}) dup2(terminal, fd);
      } else {
        dup2(open("/dev/null", O_RDONLY), 0);
        if (!options.no_pipes) {
          dup2(out[1], 1);
          dup2(error[1], 2);
        }
      }
      for (const auto& [name, value] : variables)
        value.empty() ? unsetenv(name.c_str()) : setenv(name.c_str(), value.c_str(), 1);
      std::vector<char*> argv;
      for (auto& argument : command) argv.push_back(argument.data());
      argv.push_back(nullptr);
      execvp(argv[0], argv.data());
      _exit(127);
    }
    if (terminal >= 0) close(terminal);
    for (int fd : {out[1], error[1]})
      if (fd >= 0) close(fd);
    fds_[0] = out[0];
    fds_[1] = error[0];
    for (int fd : fds_)
      if (fd >= 0) fcntl(fd, F_SETFL, O_NONBLOCK);
  }

  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;
  ~Process() {
    if (!ended_) {
      for (pid_t left : processes_with(marker_)) kill(left, SIGKILL);
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
    for (int fd : fds_)
      if (fd >= 0) close(fd);
  }

  [[nodiscard]] pid_t pid() const { return pid_; }
  [[nodiscard]] const std::string& marker() const { return marker_; }
  [[nodiscard]] const std::string& out() const { return text_[0]; }
  /// Without the line about a run on this host that no launcher but `launch` has started: few cases look at it.
  [[nodiscard]] std::string error() const {
    std::string text = text_[1];
    const auto begin = about_run_begin();
    if (begin != std::string::npos) text.erase(begin, about_run().size());
    return text;
  }
  /// That line; empty where there is none.
  [[nodiscard]] std::string about_run() const {
    const auto begin = about_run_begin();
    if (begin == std::string::npos) return {};
    const auto end = text_[1].find('\n', begin);
    return text_[1].substr(begin, end == std::string::npos ? end : end + 1 - begin);
  }

  void signal(int number) const { kill(pid_, number); }
  /// As a terminal does on Ctrl-C: to the whole foreground process group.
  void signal_group(int number) const { kill(-pid_, number); }
  /// Types into the terminal.
  void type(const std::string& text) const {
    if (write(fds_[0], text.data(), text.size()) < 0) throw std::runtime_error("cannot type");
  }

  /// Reads until `text` has been seen in what it wrote; false when it ended or `timeout` was over before.
  bool wait_for_output(const std::string& text, Milliseconds timeout = Milliseconds(30000)) {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    while (true) {
      const bool more = read_for(Milliseconds(20));
      if (text_[0].find(text) != std::string::npos || text_[1].find(text) != std::string::npos) return true;
      if (!more || std::chrono::steady_clock::now() > deadline) return false;
    }
  }

  /// Waits for its end; false when `timeout` was over before. Then `exit_code` (128 + signal for a killed one).
  bool wait(Milliseconds timeout = Milliseconds(60000)) {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    while (!ended_) {
      read_for(Milliseconds(10));
      int status = 0;
      if (waitpid(pid_, &status, WNOHANG) == pid_) {
        ended_ = true;
        code_ = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
      } else if (std::chrono::steady_clock::now() > deadline) {
        return false;
      }
    }
    read_for(Milliseconds(0));
    return true;
  }
  [[nodiscard]] int exit_code() const { return code_; }

 private:
  [[nodiscard]] std::string::size_type about_run_begin() const {
    for (const char* starter : {", started by --nproc; ", ", started by hand ("})
      if (const auto middle = text_[1].find(starter); middle != std::string::npos) {
        const auto before = text_[1].rfind('\n', middle);
        const auto begin = before == std::string::npos ? 0 : before + 1;
        if (text_[1].find(" on 1 host (", begin) < middle) return begin;
      }
    return std::string::npos;
  }
  // Reads what comes within `time`; false when both streams have ended.
  bool read_for(Milliseconds time) {
    pollfd polled[2] = {{fds_[0], POLLIN, 0}, {fds_[1], POLLIN, 0}};
    if (fds_[0] < 0 && fds_[1] < 0) {
      usleep(static_cast<useconds_t>(time.count() * 1000));
      return false;
    }
    poll(polled, 2, static_cast<int>(time.count()));
    for (int i : {0, 1}) {
      char buffer[65536];
      ssize_t length = 0;
      while (fds_[i] >= 0 && (length = read(fds_[i], buffer, sizeof buffer)) > 0)
        text_[i].append(buffer, static_cast<std::size_t>(length));
      if (fds_[i] >= 0 && (length == 0 || (length < 0 && errno != EAGAIN && errno != EINTR))) {
        close(fds_[i]);
        fds_[i] = -1;
      }
    }
    return true;
  }

  pid_t pid_ = -1;
  std::string marker_;
  int fds_[2] = {-1, -1};
  std::string text_[2];
  bool ended_ = false;
  int code_ = -1;
};

/// Starts a command with some variables changed.
inline Process start(std::vector<std::string> command, Variables variables = {}, StartOptions options = {}) {
  return Process(std::move(command), std::move(variables), options);
}

/// Starts a command and waits for its end; throws when it takes longer than `timeout`.
struct Ended {
  int code;
  std::string out, error;
  int left;                    ///< processes that remain
  std::string about_run = {};  ///< see Process::about_run
};
inline Ended run(std::vector<std::string> command, Variables variables = {},
                 Milliseconds timeout = Milliseconds(60000), StartOptions options = {}) {
  Process process(std::move(command), std::move(variables), options);
  if (!process.wait(timeout))
    throw std::runtime_error(fmt::format("still running after {} ms; it wrote: {}{}", timeout.count(),
                                         process.out(), process.error()));
  return {process.exit_code(), process.out(), process.error(), processes_left(process.marker()),
          process.about_run()};
}

/// The path of a program of this folder's tests (see lockstep_fault_test).
inline std::string test_program(const std::string& name) {
  const char* folder = std::getenv("LOCKSTEP_TEST_PROGRAMS");
  return fmt::format("{}/{}", folder ? folder : ".", name);
}

/// The name of this host.
inline std::string host_name() {
  char name[256] = "?";
  gethostname(name, sizeof name - 1);
  return name;
}

/// How many threads each of several ranks on this host gets where nobody says otherwise.
inline int share_of_cores(int ranks) {
  cpu_set_t set;
  CPU_ZERO(&set);
  sched_getaffinity(0, sizeof set, &set);
  return std::max(1, CPU_COUNT(&set) / ranks);
}

/// A port of the loopback that is taken: a socket of this process listens on it.
class TakenPort {
 public:
  TakenPort() : fd_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    auto* const any = reinterpret_cast<sockaddr*>(&address);
    if (bind(fd_, any, length) != 0 || listen(fd_, SOMAXCONN) != 0 || getsockname(fd_, any, &length) != 0)
      throw std::runtime_error("no port is free");
    number_ = ntohs(address.sin_port);
  }
  TakenPort(const TakenPort&) = delete;
  TakenPort& operator=(const TakenPort&) = delete;
  ~TakenPort() { close(fd_); }
  [[nodiscard]] int number() const { return number_; }

 private:
  int fd_, number_ = 0;
};

/// A port that nobody listens on now.
inline int free_port() {
  return TakenPort().number();
}

}  // namespace lockstep_test

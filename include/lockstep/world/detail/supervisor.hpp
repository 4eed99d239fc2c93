#pragma once

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/detail/descriptor.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/detail/event_log.hpp"
#include "lockstep/world/detail/failure.hpp"
#include "lockstep/world/detail/failure_text.hpp"
#include "lockstep/world/detail/line_relay.hpp"
#include "lockstep/world/detail/process.hpp"
#include "lockstep/world/detail/timeouts.hpp"
#include "lockstep/world/launch_options.hpp"

extern "C" char** environ;  // NOLINT: POSIX declares it in no header

namespace lockstep::inline v0_1::detail {

/// Returns the path of the running program, so that `ps` shows its name, or /proc/self/exe if the file was replaced.
inline std::string own_program() {
  const std::string running = "/proc/self/exe";
  std::error_code error;
  const auto path = std::filesystem::read_symlink(running, error);
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

/// Returns the failure of a rank whose process ended at `time` with `status` and without a report.
inline Failure failure_by_status(int rank, pid_t pid, int status, std::int64_t time) {
  const int number = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
  const char* why = number == SIGKILL ? ", perhaps for lack of memory" : "";
  return {.kind = FailureKind::died,
          .rank = rank,
          .pid = pid,
          .code = number == 0 ? WEXITSTATUS(status) : 128 + number,
          .message = number == 0 ? formatted("ended with exit code {}", WEXITSTATUS(status))
                                 : formatted("died ({}{})", signal_name(number), why),
          .time = time};
}

/// Returns the failure that a launcher reports, given the ranks that had ended before with exit code 0: one
/// of them is the cause if `failure` blames it or waited for it alone. Removes it from `gone`.
inline Failure judged(Failure failure, std::vector<int>& gone) {
  const bool blames = failure.kind == FailureKind::consequence || failure.kind == FailureKind::timed_out;
  if (blames && std::erase(gone, failure.cause) > 0) {
    failure.message = ended_early(failure.cause, failure.rank, failure.call).message;
    failure.kind = FailureKind::consequence;
    failure.cause_kind = FailureKind::left_early;
  }
  return failure;
}

/// A process to start: its rank for messages, and the changes to its environment, see start_child.
struct Job {
  int rank = 0;
  std::vector<std::string> environment;
};

struct SupervisorOptions {
  std::string program = own_program();
  std::vector<std::string> arguments;
  std::vector<Job> jobs;  ///< by rank
  Prefix prefix = Prefix::automatic;
  /// The time from SIGTERM to SIGKILL.
  std::chrono::milliseconds grace{3000};
  /// The timeout of ranks that handle a forwarded signal, until the first and from then until the last ends.
  std::chrono::milliseconds interrupt_grace = interrupt_limit;
  /// Called once after all processes are started, before any of their output is read.
  std::function<void()> started = [] {};
  /// Called once, when the first failure is known or when a rank has ended by a forwarded signal. Its message
  /// is that of the rank.
  std::function<void(const Failure&)> failed = [](const Failure&) {};
  /// Called for each rank that ends with exit code 0 while no failure is known. Must not throw.
  std::function<void(int rank)> ended_well = [](int) {};
};

/// Starts processes of one program, relays their lines and signals, and ends all of them when one fails. It
/// has no thread of its own and does not use LibTorch. At most one runs at a time in a process.
class Supervisor {
 public:
  explicit Supervisor(SupervisorOptions options)
      : options_(std::move(options)),
        relay_(options_.jobs.at(0).rank, options_.jobs.size(), options_.prefix, isatty(1) == 1,
               isatty(2) == 1, [this](int sink, std::string_view bytes) { output_.put(sink, bytes); }) {}

  /// Returns the first failure after run(), nothing if a signal to this process has asked the ranks to end.
  [[nodiscard]] std::optional<Failure> failure() const {
    return expected_ || interrupted() ? std::nullopt : failure_;
  }
  /// Returns whether a signal to this process has asked the ranks to end, or just may have.
  [[nodiscard]] bool interrupted() const { return interrupted_ != 0 || Clock::now() < noted_until_; }

  /// Blocks until all processes have ended. Returns 0, the exit code of the first failure, or 128 + signal.
  int run() {
    LauncherScope scope;
    try {
      start(scope);
      options_.started();
    } catch (...) {
      kill_all(SIGKILL);
      for (const auto& child : children_) waitpid(child.pid, nullptr, 0);
      throw;
    }
    while (alive()) {
      wait_for_events(scope);
      reap();
      read_all();
      judge();
      enforce();
    }
    read_all();
    relay_.tick(Clock::now() + std::chrono::hours(1));
    drain(scope);
    reap_left();
    read_signals(scope);
    return exit_code();
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr auto never = Clock::time_point::max();

  enum Source : int { report, out, error };
  struct Child {
    std::size_t first_stream = 0;  // of its two in the relay
    int rank = 0;
    pid_t pid = 0;
    Descriptor pipes[3] = {};  // by Source
    std::string report_bytes = {};
    bool ordered_to_end = false;
    bool ended = false;
    int status = 0;
    std::int64_t ended_at = 0;

    [[nodiscard]] bool reported() const { return !report_bytes.empty(); }
  };

  void start(const LauncherScope& scope) {
    Descriptor nothing(open("/dev/null", O_RDONLY | O_CLOEXEC));
    for (const Job& job : options_.jobs) {
      Pipe pipes[] = {make_pipe(), make_pipe(), make_pipe()};
      auto changes = job.environment;
      changes.push_back(formatted("LOCKSTEP_REPORT_FD={}", pipes[report].write.get()));
      // The kernel stops a process outside the terminal's foreground group that reads from the terminal.
      const int in = children_.empty() && isatty(0) != 1 ? 0 : nothing.get();
      const pid_t pid = start_child(options_.program, options_.arguments, changes,
                                    {in, pipes[out].write.get(), pipes[error].write.get()},
                                    pipes[report].write.get(), scope.mask_before());
      children_.push_back({2 * children_.size(), job.rank, pid, {}});
      for (const Source source : {report, out, error})
        children_.back().pipes[source] = std::move(pipes[source].read);
    }
  }

  [[nodiscard]] bool alive() const {
    return std::any_of(children_.begin(), children_.end(), [](const Child& child) { return !child.ended; });
  }

  void wait_for_events(const LauncherScope& scope) {
    std::vector<pollfd> polled{{scope.descriptor(), POLLIN, 0}};
    for (const auto& child : children_)
      for (const Source source : {report, out, error})
        if (is_read(child, source)) polled.push_back({child.pipes[source].get(), POLLIN, 0});
    output_.poll_for(polled);
    // The poll timeout only bounds how late a deadline or an idle line is seen; every other event wakes it.
    const auto most = !failures_.empty() || interrupted_ != 0 ? ending_look : running_look;
    poll(polled.data(), polled.size(), static_cast<int>(most.count()));
    output_.write_ready();
    if (output_.broken() && !failure_ && interrupted_ == 0) {
      // The reader of our output is gone (`| head`): end quietly, as a single program would.
      interrupted_ = SIGPIPE;
      count_end();
      order_end(SIGTERM);
    }
    read_signals(scope);
    relay_.tick();
  }

  void read_signals(const LauncherScope& scope) {
    while (const int number = scope.next_signal()) {
      if (number == SIGCHLD || number == SIGPIPE) continue;
      if (number == SIGTSTP) {
        kill_all(SIGSTOP);
        raise(SIGSTOP);
        kill_all(SIGCONT);
      } else if (number == SIGUSR1 || number == SIGUSR2) {
        noted_until_ = Clock::now() + options_.interrupt_grace;
        kill_all(number);
      } else if (number == SIGHUP && std::exchange(hung_up_, true)) {
        // A closing terminal sends two: one from the kernel and one from its shell.
      } else if (++interruptions_; interrupted_ == number || interruptions_ > 2) {
        order_end(SIGKILL);
      } else {
        interrupted_ = number;
        ending_until_ = limit_ == never ? Clock::now() + options_.interrupt_grace : never;
        kill_all(number);
        kill_all(SIGCONT);  // a stopped process would not see it
      }
    }
  }

  // Writes the remaining output. Waits for the readers without a limit, unless the run was interrupted or is
  // interrupted now.
  void drain(const LauncherScope& scope) {
    const auto until = interrupted_ != 0 ? Clock::now() + options_.grace : never;
    const int before = interruptions_;
    while (!output_.empty() && interruptions_ == before && Clock::now() < until) wait_for_events(scope);
  }

  // Reaps orphaned descendants of the ranks, which became children of this process and were killed.
  void reap_left() {
    const auto until = Clock::now() + orphan_limit;
    for (const auto& child : children_)
      while (waitpid(-child.pid, nullptr, WNOHANG) >= 0 && Clock::now() < until)
        std::this_thread::sleep_for(orphan_pause);
  }

  void kill_all(int number) {
    for (const auto& child : children_)
      if (!child.ended) kill(-child.pid, number);
  }

  // Ends all ranks. SIGTERM spares ranks that have reported and are about to end by themselves.
  void order_end(int number) {
    for (auto& child : children_) {
      if (child.ended || (number == SIGTERM && child.reported())) continue;
      child.ordered_to_end = true;
      kill(-child.pid, number);
      kill(-child.pid, SIGCONT);  // a stopped process would not see it
    }
  }

  void reap() {
    for (auto& child : children_) {
      if (child.ended) {
        waitpid(-child.pid, nullptr, WNOHANG);  // orphaned descendants
        continue;
      }
      const auto find = [&](idtype_t type) {
        siginfo_t info{};
        waitid(type, static_cast<id_t>(child.pid), &info, WEXITED | WNOHANG | WNOWAIT);
        return info.si_pid;
      };
      for (pid_t orphan = 0; (orphan = find(P_PGID)) != 0 && orphan != child.pid;)
        waitpid(orphan, nullptr, 0);
      if (find(P_PID) == 0) continue;
      kill(-child.pid, SIGKILL);  // orphaned descendants; the zombie still reserves the group's number
      waitpid(child.pid, &child.status, 0);
      child.ended = true;
      child.ended_at = monotonic_nanoseconds();
      receive(child, report, true);
      take_end(child);
    }
  }

  // After a forwarded signal, ranks may end as they choose: by the signal or with a code of their own.
  // A stopped rank does so as well: the signal may have reached a rank of another host.
  void take_end(const Child& child) {
    const int signal = WIFSIGNALED(child.status) ? WTERMSIG(child.status) : 0;
    const bool stopped = signal == 0 && WEXITSTATUS(child.status) == stopped_exit_code;
    const bool asked = ending(), choosing = asked || Clock::now() < noted_until_ || stopped;
    if (asked || (choosing && child.status != 0)) count_end();
    auto failure = failure_by_status(child.rank, child.pid, child.status, child.ended_at);
    if (child.status == 0 && !child.reported() && !failure_) options_.ended_well(child.rank);
    // By a second signal, or since nobody reads the output.
    const bool killed = interrupted_ != 0 && child.ordered_to_end;
    if (choosing && (signal == 0 || signal == interrupted_ || killed)) {
      if (asked && child.status != 0 && !stopped && !failure_) {
        failure.kind = FailureKind::stopped;
        if (signal != 0) failure.message = "ended by " + signal_name(signal);
        tell(failure);
      }
    } else if (child.status != 0 && !child.reported() && !child.ordered_to_end) {
      add(std::move(failure));
    }
  }

  // A rank has ended, or must, as a signal asks for. The others have `interrupt_grace` from the first on.
  void count_end() {
    limit_ = std::min(limit_, Clock::now() + options_.interrupt_grace);
    if (interrupted_ != 0) ending_until_ = never;
  }
  // Returns whether the ranks are ending on request. False again if no rank has obeyed in time.
  [[nodiscard]] bool ending() const { return Clock::now() < ending_until_; }

  void add(Failure failure) {
    if (failures_.empty()) failing_since_ = Clock::now();
    failures_.push_back(std::move(failure));
  }

  // Calls `failed` once.
  void tell(const Failure& failure) {
    if (const auto failed = std::exchange(options_.failed, nullptr)) failed(failure);
  }

  // Returns whether a pipe of a rank is read now. While the first failure is undecided, the stderr of all ranks
  // is held back.
  [[nodiscard]] bool is_read(const Child& child, Source source) const {
    if (source == report || !child.pipes[source].open()) return child.pipes[source].open();
    const bool held = source == error && !failures_.empty() && !failure_;
    const bool full = output_.full(source) || relay_.full(child.first_stream + (source == error ? 1 : 0));
    return !held && (child.ended || !full);
  }

  void read_all() {
    for (auto& child : children_)
      for (const Source source : {report, out, error})
        if (is_read(child, source)) receive(child, source, source == report || child.ended);
  }

  // Takes `all` available bytes of a rank's pipe, or one piece of them.
  void receive(Child& child, Source source, bool all) {
    Descriptor& pipe = child.pipes[source];
    const std::size_t stream = child.first_stream + (source == error ? 1 : 0);
    const bool reported = child.reported();
    char buffer[1 << 16];
    for (bool more = true; more && pipe.open();) {
      const ssize_t length = read(pipe.get(), buffer, sizeof buffer);
      const std::string_view bytes(buffer, static_cast<std::size_t>(std::max<ssize_t>(length, 0)));
      if (source == report)
        child.report_bytes += bytes;
      else if (length > 0)
        relay_.feed(stream, bytes);
      more = length > 0 ? all : length < 0 && errno == EINTR;
      if (length == 0 || (length < 0 && errno != EINTR && errno != EAGAIN)) pipe.close();
    }
    if (child.ended) pipe.close();
    if (source != report && (all || !pipe.open())) relay_.close(stream);
    if (reported || !child.reported()) return;
    Failure failure = decode_report(child.report_bytes);
    failure.rank = child.rank;
    failure.pid = child.pid;
    // Ranks that end by a forwarded signal make other ranks fail, which is expected.
    if (!ending() || failure.kind != FailureKind::consequence) add(std::move(failure));
  }

  // Reports the first failure once it is decided, and orders the other ranks to end.
  void judge() {
    if (failure_) return;
    const auto waited = alive() ? Clock::now() - failing_since_ : Clock::duration::max();
    const Failure* const first = first_failure(failures_, waited);
    if (first == nullptr) return;
    const bool departed =
        first->kind == FailureKind::consequence && first->cause_kind == FailureKind::left_early;
    std::vector<int> gone;
    for (const auto& child : children_)
      if (child.ended && child.status == 0 &&
          (child.ended_at < first->time ||
           (departed && child.rank == first->cause)))  // it left before it ended
        gone.push_back(child.rank);
    failure_ = judged(*first, gone);
    expected_ = interrupted() || failure_->code == stopped_exit_code;
    for (auto& child : children_)  // the rank's own last output comes before the error
      for (const Source source : {out, error})
        if (child.pid == failure_->pid) receive(child, source, true);
    output_.put(2, formatted("error: {}\n", headline(*failure_, gone)));
    output_.write_ready();
    order_end(SIGTERM);
    limit_ = Clock::now() + options_.grace;
    Failure told = *failure_;
    if (expected_) told.kind = FailureKind::stopped;
    tell(told);
  }

  void enforce() {
    if (Clock::now() < limit_) return;
    if (failure_ || interrupted_ != 0) return order_end(SIGKILL);
    if (!failures_.empty()) return;
    for (const auto& child : children_)  // the other ranks have not ended, too
      if (child.status != 0) add(failure_by_status(child.rank, child.pid, child.status, child.ended_at));
  }

  [[nodiscard]] int exit_code() const {
    if (failure_) return failure_->code;
    if (interruptions_ > 0 && !output_.empty()) return 128 + interrupted_;  // its last output was not awaited
    for (const auto& child : children_)
      if (WIFSIGNALED(child.status)) return 128 + (interrupted_ != 0 ? interrupted_ : WTERMSIG(child.status));
    for (const auto& child : children_)
      if (child.status != 0) return WEXITSTATUS(child.status);
    return 0;
  }

  SupervisorOptions options_;
  OutputWriter output_;
  LineRelay relay_;
  std::vector<Child> children_;
  std::vector<Failure> failures_;    // until the first of them is decided
  Clock::time_point failing_since_;  // when the first of `failures_` was seen
  std::optional<Failure> failure_;   // the first
  bool expected_ = false;            // it came after a signal that asks the ranks to end
  int interrupted_ = 0;              // the signal that asks the ranks to end
  int interruptions_ = 0;            // how many such signals have arrived
  bool hung_up_ = false;             // a SIGHUP was among them
  // Until when the end of a rank is expected, after a signal that asks for it and after one that leaves it to the rank.
  Clock::time_point ending_until_{}, noted_until_{};
  Clock::time_point limit_ = never;  // when the ranks that still run have had their time to end
};

}  // namespace lockstep::inline v0_1::detail

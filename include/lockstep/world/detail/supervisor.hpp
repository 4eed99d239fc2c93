#pragma once

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/detail/format.hpp"
#include "lockstep/detail/lists.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/detail/child.hpp"
#include "lockstep/world/detail/failure.hpp"
#include "lockstep/world/detail/failure_text.hpp"
#include "lockstep/world/detail/handled_signals.hpp"
#include "lockstep/world/detail/line_relay.hpp"
#include "lockstep/world/launch_options.hpp"

namespace lockstep::detail {

/// Returns the pipe from the signal handler to the thread that waits for signals. It is never closed: a
/// handler may still run in another thread when its scope ends.
inline const Pipe& signal_pipe() {
  static const Pipe pipe = [] {
    Pipe made = make_pipe();
    fcntl(made.write.get(), F_SETFL, O_NONBLOCK);
    return made;
  }();
  return pipe;
}

inline std::atomic<int> signal_pipe_end{-1};
static_assert(std::atomic<int>::is_always_lock_free, "the signal handler reads it");

extern "C" inline void lockstep_write_signal(int number) {
  const int saved = errno;
  const auto byte = static_cast<unsigned char>(number);
  if (write(signal_pipe_end.load(), &byte, 1) < 0) {  // full: enough signals are pending
  }
  errno = saved;
}

/// While it lives, `handled_signals` do not interrupt the launching process but can be read from a
/// descriptor, whichever thread receives them. A signalfd would need the signals blocked in every thread,
/// including threads that LibTorch or the program started earlier. Ignored signals stay ignored (`nohup`,
/// background jobs of a shell). At most one SignalScope lives at a time.
class SignalScope {
 public:
  SignalScope() {
    signal_pipe_end = signal_pipe().write.get();
    sigset_t child;
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    pthread_sigmask(SIG_UNBLOCK, &child, &mask_before_);
    for (std::size_t i = 0; i < handled_signals.size(); ++i) {
      sigaction(handled_signals[i], nullptr, &before_[i]);
      // With SIGCHLD ignored, the kernel would reap the ranks.
      if (before_[i].sa_handler == SIG_IGN && handled_signals[i] != SIGCHLD) continue;
      if (is_left_to_program(handled_signals[i], before_[i])) continue;
      struct sigaction action {};
      action.sa_handler = lockstep_write_signal;
      action.sa_flags = SA_RESTART;  // restart other threads' system calls
      sigaction(handled_signals[i], &action, nullptr);
    }
  }
  SignalScope(const SignalScope&) = delete;
  SignalScope& operator=(const SignalScope&) = delete;
  ~SignalScope() {
    for (std::size_t i = 0; i < handled_signals.size(); ++i)
      sigaction(handled_signals[i], &before_[i], nullptr);
    pthread_sigmask(SIG_SETMASK, &mask_before_, nullptr);
    while (next() != 0) {
    }
  }

  /// Returns the next pending signal, 0 if there is none.
  [[nodiscard]] int next() const {
    unsigned char number = 0;
    ssize_t length = 0;
    do length = read(descriptor(), &number, 1);
    while (length < 0 && errno == EINTR);
    return length == 1 ? number : 0;
  }
  [[nodiscard]] int descriptor() const { return signal_pipe().read.get(); }
  /// Returns the initial signal mask for children.
  [[nodiscard]] const sigset_t& mask_before() const { return mask_before_; }

 private:
  sigset_t mask_before_{};
  std::array<struct sigaction, handled_signals.size()> before_{};
};

/// While it lives, orphaned descendants become children of this process, which can wait for them. Otherwise
/// they would remain zombies until the first process of a container reaps them.
class SubreaperScope {
 public:
  SubreaperScope() {
    prctl(PR_GET_CHILD_SUBREAPER, &before_);
    prctl(PR_SET_CHILD_SUBREAPER, 1);
  }
  SubreaperScope(const SubreaperScope&) = delete;
  SubreaperScope& operator=(const SubreaperScope&) = delete;
  ~SubreaperScope() { prctl(PR_SET_CHILD_SUBREAPER, before_); }

 private:
  int before_ = 0;
};

/// A process that failed, with its own report or one derived from its exit status.
struct Suspect {
  std::size_t child = 0;
  Failure failure;
  bool killed = false;  ///< by an external SIGKILL, which is never a consequence
};

inline std::string signal_name(int number) {
  const char* name = sigabbrev_np(number);
  return name ? detail::formatted("SIG{}", name) : detail::formatted("signal {}", number);
}

/// Returns the Suspect of a process that ended with `status` and without a report.
inline Suspect suspect_by_status(std::size_t child, int status) {
  const bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
  Failure failure{.kind = FailureKind::died, .time = monotonic_nanoseconds()};
  if (WIFSIGNALED(status)) {
    failure.code = 128 + WTERMSIG(status);
    failure.message =
        formatted("died ({}{})", signal_name(WTERMSIG(status)), killed ? ", perhaps for lack of memory" : "");
  } else {
    failure.code = WEXITSTATUS(status);
    failure.message = formatted("ended with exit code {}", WEXITSTATUS(status));
  }
  return {child, std::move(failure), killed};
}

/// Decides which of several failures was the first. A rank that dies makes other ranks fail, and their
/// reports may arrive before its death is seen. So a killed process ranks before all others, a cause before a
/// consequence, and otherwise the earlier failure first. A consequence waits for its cause.
class FirstFailure {
 public:
  using Clock = std::chrono::steady_clock;

  /// `cause_delay` is how long a consequence waits for a cause.
  explicit FirstFailure(std::chrono::milliseconds cause_delay) : cause_delay_(cause_delay) {}

  void add(Suspect suspect, Clock::time_point now = Clock::now()) {
    if (suspects_.empty()) since_ = now;
    suspects_.push_back(std::move(suspect));
  }

  [[nodiscard]] bool open() const { return !suspects_.empty(); }

  /// Returns the first failure once it is decided. `last` means that no process is left that could fail.
  [[nodiscard]] std::optional<Suspect> first(bool last, Clock::time_point now = Clock::now()) const {
    if (suspects_.empty()) return std::nullopt;
    const auto place = [](const Suspect& suspect) {
      const int order = suspect.killed ? 0 : suspect.failure.kind == FailureKind::consequence ? 2 : 1;
      return std::pair(order, suspect.failure.time);
    };
    const auto& earliest =
        *std::min_element(suspects_.begin(), suspects_.end(),
                          [&](const auto& a, const auto& b) { return place(a) < place(b); });
    const auto wait = earliest.failure.kind == FailureKind::consequence ? cause_delay_ : settling;
    if (!earliest.killed && !last && now - since_ < wait) return std::nullopt;
    return earliest;
  }

 private:
  // A death may be seen shortly after the report that it caused.
  static constexpr std::chrono::milliseconds settling{50};

  std::chrono::milliseconds cause_delay_;
  std::vector<Suspect> suspects_;
  Clock::time_point since_;
};

/// Returns the failure that a launcher reports, given the ranks that had ended before with exit code 0: one of them is
/// the cause if `failure` blames it or waited for it alone. Removes it from `gone`.
inline Failure judged(Failure failure, std::vector<int>& gone) {
  const bool blames = failure.kind == FailureKind::consequence || failure.kind == FailureKind::timed_out;
  if (!blames || std::erase(gone, failure.cause) == 0) return failure;
  Failure left =
      consequence_of(ended_early(failure.cause, failure.rank, failure.call), failure.rank, failure.call);
  left.pid = failure.pid;
  left.code = failure.code;
  left.time = failure.time;
  return left;
}

/// A process to start: its rank for messages, and the changes to its environment ("NAME=value" sets, "NAME" removes).
struct Job {
  int rank = 0;
  std::vector<std::string> environment;
};

struct SupervisorOptions {
  std::string program = own_program();
  std::vector<std::string> arguments;
  std::vector<Job> jobs;
  Prefix prefix = Prefix::automatic;
  /// The time from SIGTERM to SIGKILL.
  std::chrono::milliseconds grace{3000};
  /// The timeout of ranks that handle a forwarded signal: until the first of them ends, and from then until
  /// the last one ends.
  std::chrono::milliseconds interrupt_grace{30000};
  /// How long a consequence waits for its cause.
  std::chrono::milliseconds cause_delay{2000};
  /// Called once after all processes are started, before any of their output is read.
  std::function<void()> started = [] {};
  /// Called once, when the first failure is known or when a rank has ended by a forwarded signal. Its message is that of
  /// the rank.
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
        relay_(ranks(options_.jobs), options_.prefix, isatty(1) == 1, isatty(2) == 1,
               [this](int sink, std::string_view bytes) { output_.put(sink, bytes); }),
        first_failure_(options_.cause_delay) {}

  /// Blocks until all processes have ended. Returns 0, the exit code of the first failure, or 128 + signal.
  int run() {
    SignalScope signals;
    const SubreaperScope subreaper;
    try {
      start(signals);
      options_.started();
    } catch (...) {
      kill_all(SIGKILL);
      for (const auto& child : children_) waitpid(child.pid, nullptr, 0);
      throw;
    }
    while (alive() > 0) {
      wait_for_events(signals);
      reap();
      read_all();
      judge();
      enforce();
    }
    relay_.tick(Clock::now() + std::chrono::hours(1));
    drain(signals);
    reap_left();
    return exit_code();
  }

 private:
  using Clock = std::chrono::steady_clock;

  struct Child {
    int rank = 0;
    pid_t pid = 0;
    Descriptor out, error, report;
    std::string report_bytes;
    bool reported = false;  // it has reported its own failure
    bool ended = false;
    bool ordered_to_end = false;
    int status = 0;
    std::int64_t ended_at = 0;
  };

  static std::vector<int> ranks(const std::vector<Job>& jobs) {
    std::vector<int> result;
    for (const auto& job : jobs) result.push_back(job.rank);
    return result;
  }

  void start(const SignalScope& signals) {
    Descriptor nothing(open("/dev/null", O_RDONLY | O_CLOEXEC));
    children_.reserve(options_.jobs.size());
    for (const Job& job : options_.jobs) {
      auto out = make_pipe(), error = make_pipe(), report = make_pipe();
      auto changes = job.environment;
      changes.push_back(detail::formatted("LOCKSTEP_REPORT_FD={}", report.write.get()));
      // The kernel stops a process outside the terminal's foreground group that reads from the terminal.
      const int in = children_.empty() && isatty(0) != 1 ? 0 : nothing.get();
      Child child;
      child.rank = job.rank;
      child.pid =
          start_child(options_.program, options_.arguments, changed_environment(changes),
                      {in, out.write.get(), error.write.get(), report.write.get()}, signals.mask_before());
      child.out = std::move(out.read);
      child.error = std::move(error.read);
      child.report = std::move(report.read);
      children_.push_back(std::move(child));
    }
  }

  [[nodiscard]] std::size_t alive() const {
    return static_cast<std::size_t>(
        std::count_if(children_.begin(), children_.end(), [](const Child& child) { return !child.ended; }));
  }

  void wait_for_events(const SignalScope& signals) {
    std::vector<pollfd> polled{{signals.descriptor(), POLLIN, 0}};
    for (std::size_t i = 0; i < children_.size(); ++i) {
      const auto& child = children_[i];
      if (child.out.open() && !output_.full(1) && !relay_.full(2 * i))
        polled.push_back({child.out.get(), POLLIN, 0});
      if (child.error.open() && !holding_errors() && !output_.full(2) && !relay_.full(2 * i + 1))
        polled.push_back({child.error.get(), POLLIN, 0});
      if (child.report.open()) polled.push_back({child.report.get(), POLLIN, 0});
    }
    output_.poll_for(polled);
    // The poll timeout only bounds how late a deadline or an idle line is seen; every other event wakes it.
    poll(polled.data(), polled.size(), first_failure_.open() || interrupted_ != 0 ? 20 : 100);
    output_.write_ready();
    if (output_.broken() && !decided_ && interrupted_ == 0) {
      // The reader of our output is gone (`| head`): end quietly, as a single program would.
      told_ = Clock::now();
      interrupted_ = SIGPIPE;
      first_end_ = Clock::now();
      order_end(SIGTERM);
    }
    read_signals(signals);
    relay_.tick();
  }

  void read_signals(const SignalScope& signals) {
    while (const int number = signals.next()) {
      if (number == SIGCHLD || number == SIGPIPE) continue;
      if (number == SIGTSTP) {
        kill_all(SIGSTOP);
        raise(SIGSTOP);
        kill_all(SIGCONT);
      } else if (number == SIGUSR1 || number == SIGUSR2) {
        noted_ = Clock::now();
        kill_all(number);
      } else if (number == SIGHUP && std::exchange(hung_up_, true)) {
        // A closing terminal sends two: one from the kernel and one from its shell.
      } else if (++told_times_; interrupted_ == number || told_times_ > 2) {
        order_end(SIGKILL);
      } else {
        told_ = Clock::now();
        interrupted_ = number;
        kill_all(number);
        kill_all(SIGCONT);  // a stopped process would not see it
      }
    }
  }

  // Writes the remaining output. Waits for the readers without a limit, unless the run was interrupted or is
  // interrupted now.
  void drain(const SignalScope& signals) {
    const auto begin = Clock::now();
    const int told = told_times_;
    while (!output_.empty() && told_times_ == told) {
      if (interrupted_ != 0 && Clock::now() - begin > options_.grace) return;
      std::vector<pollfd> polled{{signals.descriptor(), POLLIN, 0}};
      output_.poll_for(polled);
      poll(polled.data(), polled.size(), 100);
      output_.write_ready();
      read_signals(signals);
    }
  }

  // Reaps orphaned descendants of the ranks, which became children of this process and were killed.
  void reap_left() {
    const auto until = Clock::now() + std::chrono::milliseconds(500);
    for (const auto& child : children_)
      while (waitpid(-child.pid, nullptr, WNOHANG) >= 0 && Clock::now() < until)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

  void kill_all(int number) {
    for (const auto& child : children_)
      if (!child.ended) kill(-child.pid, number);
  }

  // Ends all ranks. SIGTERM spares ranks that have reported and are about to end by themselves.
  void order_end(int number) {
    for (auto& child : children_) {
      if (child.ended) continue;
      if (number == SIGTERM && child.reported) continue;
      child.ordered_to_end = true;
      kill(-child.pid, number);
      if (number == SIGTERM) kill(-child.pid, SIGCONT);  // a stopped process would not see it
    }
  }

  void reap() {
    for (std::size_t i = 0; i < children_.size(); ++i) {
      auto& child = children_[i];
      if (child.ended) {
        waitpid(-child.pid, nullptr, WNOHANG);  // orphaned descendants
        continue;
      }
      siginfo_t info{};
      if (waitid(P_PID, static_cast<id_t>(child.pid), &info, WEXITED | WNOHANG | WNOWAIT) != 0 ||
          info.si_pid == 0)
        continue;
      kill(-child.pid, SIGKILL);  // orphaned descendants; the zombie still reserves the group's number
      waitpid(child.pid, &child.status, 0);
      child.ended = true;
      child.ended_at = monotonic_nanoseconds();
      read_report(i);
      // After a forwarded signal, ranks may end as they choose: by the signal or with a code of their own.
      // A stopped rank does so as well: the signal may have reached a rank of another host.
      const bool stopped = WIFEXITED(child.status) && WEXITSTATUS(child.status) == stopped_exit_code;
      const bool choosing = ending() || lately(noted_) || stopped;
      if (ending() || (choosing && child.status != 0)) first_end_ = first_end_.value_or(Clock::now());
      const bool chosen = choosing && (!WIFSIGNALED(child.status) || WTERMSIG(child.status) == interrupted_);
      if (ending() && WIFSIGNALED(child.status) && WTERMSIG(child.status) == interrupted_ && !decided_ &&
          !std::exchange(interruption_told_, true))
        options_.failed({.kind = FailureKind::died,
                         .rank = child.rank,
                         .pid = child.pid,
                         .code = 128 + interrupted_,
                         .message = "ended by " + signal_name(interrupted_)});
      if (child.status == 0 && !child.reported && !decided_) options_.ended_well(child.rank);
      if (child.reported || child.status == 0 || child.ordered_to_end) continue;
      if (!chosen)
        first_failure_.add(suspect_by_status(i, child.status));
      else if (!chose_)
        chose_ = i;
    }
  }

  [[nodiscard]] bool lately(const std::optional<Clock::time_point>& when) const {
    return when && Clock::now() - *when < options_.interrupt_grace;
  }
  // Returns whether the ranks are ending on request. False again if no rank has obeyed in time.
  [[nodiscard]] bool ending() const { return lately(told_) || (told_ && first_end_); }

  void read_report(std::size_t i) {
    auto& child = children_[i];
    if (!child.report.open()) return;
    if (!read_into(child.report, [&](std::string_view bytes) { child.report_bytes += bytes; }) || child.ended)
      child.report.close();
    if (child.report_bytes.empty() || child.reported) return;
    child.reported = true;
    Failure failure = decode_report(child.report_bytes);
    // Ranks that end by a forwarded signal make other ranks fail, which is expected.
    if (!ending() || failure.kind != FailureKind::consequence) first_failure_.add({i, std::move(failure)});
  }

  void read_all() {
    for (std::size_t i = 0; i < children_.size(); ++i) {
      auto& child = children_[i];
      read_report(i);
      relay_stream(child, child.out, 2 * i, 1);
      if (!holding_errors()) relay_stream(child, child.error, 2 * i + 1, 2);
    }
  }

  void relay_stream(const Child& child, Descriptor& stream, std::size_t id, int sink) {
    if (!stream.open()) return;
    if (!child.ended && (output_.full(sink) || relay_.full(id))) return;
    const bool more = read_into(
        stream, [&](std::string_view bytes) { relay_.feed(id, bytes); }, !child.ended);
    if (more && !child.ended) return;
    stream.close();
    relay_.close(id);
  }

  // Reads the available bytes, or one piece of them. Returns false at the end of the stream.
  template <class Take>
  static bool read_into(Descriptor& stream, Take&& take, bool one_piece = false) {
    char buffer[1 << 16];
    while (true) {
      const ssize_t length = read(stream.get(), buffer, sizeof buffer);
      if (length > 0) take(std::string_view(buffer, static_cast<std::size_t>(length)));
      if (length == 0) return false;
      if (length < 0 && errno != EINTR) return errno == EAGAIN;
      if (one_piece && length > 0) return true;
    }
  }

  // While the first failure is undecided, hold back the stderr of all ranks.
  [[nodiscard]] bool holding_errors() const { return first_failure_.open() && !decided_; }

  // Reports the first failure once it is decided, and orders the other ranks to end.
  void judge() {
    if (decided_) return;
    const auto first = first_failure_.first(alive() == 0);
    if (!first) return;
    decided_ = true;
    Failure failure = first->failure;
    const bool departed =
        failure.kind == FailureKind::consequence && failure.cause_kind == FailureKind::left_early;
    std::vector<int> gone;
    for (const auto& child : children_)
      if (child.ended && child.status == 0 &&
          (child.ended_at < failure.time ||
           (departed && child.rank == failure.cause)))  // it left before it ended
        gone.push_back(child.rank);
    auto& culprit = children_[first->child];
    failure.rank = culprit.rank;
    failure.pid = culprit.pid;
    failure_ = judged(std::move(failure), gone);
    read_remaining(culprit, first->child);  // the rank's own last output comes before the error
    output_.put(2, detail::formatted("error: {}\n", headline(*failure_, gone)));
    output_.flush();
    order_end(SIGTERM);
    ended_since_ = Clock::now();
    options_.failed(*failure_);
  }

  void read_remaining(Child& child, std::size_t i) {
    if (child.out.open()) read_into(child.out, [&](std::string_view bytes) { relay_.feed(2 * i, bytes); });
    if (child.error.open())
      read_into(child.error, [&](std::string_view bytes) { relay_.feed(2 * i + 1, bytes); });
    relay_.close(2 * i);
    relay_.close(2 * i + 1);
  }

  void enforce() {
    const auto now = Clock::now();
    if (ended_since_ && now - *ended_since_ > options_.grace) order_end(SIGKILL);
    if (decided_ || !first_end_ || now - *first_end_ <= options_.interrupt_grace) return;
    if (told_)
      order_end(SIGKILL);
    else if (chose_ && !first_failure_.open())  // the other ranks have not ended, too
      first_failure_.add(suspect_by_status(*chose_, children_[*chose_].status));
  }

  [[nodiscard]] int exit_code() const {
    if (failure_) return failure_->code;
    if (told_times_ > 0 && !output_.empty()) return 128 + interrupted_;  // its last output was not awaited
    for (const auto& child : children_)
      if (WIFSIGNALED(child.status)) return 128 + (interrupted_ != 0 ? interrupted_ : WTERMSIG(child.status));
    for (const auto& child : children_)
      if (WEXITSTATUS(child.status) != 0) return WEXITSTATUS(child.status);
    return 0;
  }

  SupervisorOptions options_;
  OutputWriter output_;
  LineRelay relay_;
  std::vector<Child> children_;
  FirstFailure first_failure_;
  std::optional<Clock::time_point> first_end_, ended_since_;
  std::optional<Failure> failure_;
  bool decided_ = false;
  std::optional<Clock::time_point> told_;   // when a signal was forwarded that asks the ranks to end
  std::optional<Clock::time_point> noted_;  // when a signal was forwarded that leaves it to them
  std::optional<std::size_t> chose_;        // the first rank that ended by its own choice
  int interrupted_ = 0;                     // the signal that asks the ranks to end
  int told_times_ = 0;                      // how many such signals arrived
  bool interruption_told_ = false;          // `failed` was called for a rank that ended by it
  bool hung_up_ = false;                    // a SIGHUP was among them
};

}  // namespace lockstep::detail

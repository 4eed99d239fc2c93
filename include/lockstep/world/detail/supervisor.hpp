#pragma once

#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/world/detail/child.hpp"
#include "lockstep/world/detail/first_failure.hpp"
#include "lockstep/world/detail/line_relay.hpp"
#include "lockstep/world/detail/output_writer.hpp"
#include "lockstep/world/detail/report.hpp"
#include "lockstep/world/detail/signal_scope.hpp"
#include "lockstep/world/launch_options.hpp"

namespace lockstep::detail {

/// One process to start: the rank by which it is called, and what its environment changes ("NAME=value",
/// "NAME").
struct Job {
  int rank = 0;
  std::vector<std::string> environment;
};

struct SupervisorOptions {
  std::string program = own_program();
  std::vector<std::string> arguments;
  std::vector<Job> jobs;
  Prefix prefix = Prefix::automatic;
  /// From the polite end (SIGTERM) to the other one (SIGKILL).
  std::chrono::milliseconds grace{3000};
  /// How long ranks that handle a forwarded signal may take: until the first ends, and from there until the
  /// last does.
  std::chrono::milliseconds interrupt_grace{30000};
  /// How long a consequence waits for its cause.
  std::chrono::milliseconds cause_delay{2000};
  /// Called once all have been started, before the first of their bytes is read.
  std::function<void()> started = [] {};
  /// Whether the first failure is written to stderr, before any later output.
  bool announce = true;
  /// Called once, when the first failure is known, or when a rank has ended by a forwarded signal.
  std::function<void(const RankFailure&)> failed = [](const RankFailure&) {};
};

/// Starts processes of one program, relays their lines and signals, and ends all when one fails. It has no
/// thread and knows nothing of LibTorch; one at a time in a process.
class Supervisor {
 public:
  explicit Supervisor(SupervisorOptions options)
      : options_(std::move(options)),
        relay_(ranks(options_.jobs), options_.prefix, isatty(1) == 1, isatty(2) == 1,
               [this](int sink, std::string_view bytes) { outlet_.put(sink, bytes); }),
        verdict_(options_.cause_delay) {}

  /// Returns when no process is left: 0, the culprit's exit code, or 128 + signal.
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
    bool reported = false;  // it has said itself why it ends
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
      changes.push_back(fmt::format("LOCKSTEP_REPORT_FD={}", report.write.get()));
      // A process outside the terminal's foreground group that reads from it would be stopped.
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
      if (child.out.open() && !outlet_.full(1) && !relay_.full(2 * i))
        polled.push_back({child.out.get(), POLLIN, 0});
      if (child.error.open() && !holding_errors() && !outlet_.full(2) && !relay_.full(2 * i + 1))
        polled.push_back({child.error.get(), POLLIN, 0});
      if (child.report.open()) polled.push_back({child.report.get(), POLLIN, 0});
    }
    outlet_.poll_for(polled);
    // The time limits only bound how late a deadline or a quiet line is seen; all else wakes us.
    poll(polled.data(), polled.size(), verdict_.open() || interrupted_ != 0 ? 20 : 100);
    outlet_.write_ready();
    if (outlet_.broken() && !decided_ && interrupted_ == 0) {
      // Nobody reads us any more (`| head`): end as a single program would, quietly.
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
        // A terminal that closes sends two: the kernel's and its shell's.
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

  // Writes what is left, waiting for the readers: as long as they like, unless the run was interrupted or is
  // now.
  void drain(const SignalScope& signals) {
    const auto begin = Clock::now();
    const int told = told_times_;
    while (!outlet_.empty() && told_times_ == told) {
      if (interrupted_ != 0 && Clock::now() - begin > options_.grace) return;
      std::vector<pollfd> polled{{signals.descriptor(), POLLIN, 0}};
      outlet_.poll_for(polled);
      poll(polled.data(), polled.size(), 100);
      outlet_.write_ready();
      read_signals(signals);
    }
  }

  // What ranks had started is a child of this process once they are gone, and was killed with them.
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

  // Ends everyone but those that are about to end by themselves, having reported.
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
        waitpid(-child.pid, nullptr, WNOHANG);  // what it had left behind
        continue;
      }
      siginfo_t info{};
      if (waitid(P_PID, static_cast<id_t>(child.pid), &info, WEXITED | WNOHANG | WNOWAIT) != 0 ||
          info.si_pid == 0)
        continue;
      kill(-child.pid, SIGKILL);  // what it left behind; while it is a zombie nobody else can have its number
      waitpid(child.pid, &child.status, 0);
      child.ended = true;
      child.ended_at = monotonic_nanoseconds();
      read_report(i);
      // After a signal was passed on, ranks end as they choose, by it or with a code that means something.
      const bool choosing = ending() || lately(noted_);
      if (ending() || (choosing && child.status != 0)) first_end_ = first_end_.value_or(Clock::now());
      const bool chosen = choosing && (!WIFSIGNALED(child.status) || WTERMSIG(child.status) == interrupted_);
      if (ending() && WIFSIGNALED(child.status) && WTERMSIG(child.status) == interrupted_ && !decided_ &&
          !std::exchange(interruption_told_, true))
        options_.failed(
            {fmt::format("rank {} (pid {}) ended by {}", child.rank, child.pid, signal_name(interrupted_)),
             128 + interrupted_});
      if (child.reported || child.status == 0 || child.ordered_to_end) continue;
      if (!chosen)
        verdict_.add(suspect_by_status(i, child.status));
      else if (!chose_)
        chose_ = i;
    }
  }

  [[nodiscard]] bool lately(const std::optional<Clock::time_point>& when) const {
    return when && Clock::now() - *when < options_.interrupt_grace;
  }
  // Whether the ranks are about to end because they were asked to; those that none has obeyed in time go on.
  [[nodiscard]] bool ending() const { return lately(told_) || (told_ && first_end_); }

  void read_report(std::size_t i) {
    auto& child = children_[i];
    if (!child.report.open()) return;
    if (!read_into(child.report, [&](std::string_view bytes) { child.report_bytes += bytes; }) || child.ended)
      child.report.close();
    if (child.report_bytes.empty() || child.reported) return;
    child.reported = true;
    const auto report = decode(child.report_bytes);
    // Ranks that end by a signal make others fail, which is as it should be.
    if (!ending() || report.kind != FailureKind::peer) verdict_.add({i, report});
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
    if (!child.ended && (outlet_.full(sink) || relay_.full(id))) return;
    const bool more = read_into(
        stream, [&](std::string_view bytes) { relay_.feed(id, bytes); }, !child.ended);
    if (more && !child.ended) return;
    stream.close();
    relay_.close(id);
  }

  // Reads what is there (one piece, or all of it); false at the end.
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

  // While the first failure is being looked for, what others say about it waits.
  [[nodiscard]] bool holding_errors() const { return verdict_.open() && !decided_; }

  // Once the first failure can be told: shows it and orders the others to end.
  void judge() {
    if (decided_) return;
    const auto first = verdict_.first(alive() == 0);
    if (!first) return;
    decided_ = true;
    std::vector<int> gone;
    for (const auto& child : children_)
      if (child.ended && child.status == 0 && child.ended_at < first->report.when) gone.push_back(child.rank);
    auto& culprit = children_[first->child];
    failure_ = describe_failure(first->report, culprit.rank, culprit.pid, gone);
    read_remaining(culprit, first->child);  // its own last words come before the verdict
    if (options_.announce) outlet_.put(2, fmt::format("error: {}\n", failure_->text));
    outlet_.flush();
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
    else if (chose_ && !verdict_.open())  // the others do not follow it
      verdict_.add(suspect_by_status(*chose_, children_[*chose_].status));
  }

  [[nodiscard]] int exit_code() const {
    if (failure_) return failure_->code;
    if (told_times_ > 0 && !outlet_.empty()) return 128 + interrupted_;  // its last lines were not awaited
    for (const auto& child : children_)
      if (WIFSIGNALED(child.status)) return 128 + (interrupted_ != 0 ? interrupted_ : WTERMSIG(child.status));
    for (const auto& child : children_)
      if (WEXITSTATUS(child.status) != 0) return WEXITSTATUS(child.status);
    return 0;
  }

  SupervisorOptions options_;
  OutputWriter outlet_;
  LineRelay relay_;
  std::vector<Child> children_;
  FirstFailure verdict_;
  std::optional<Clock::time_point> first_end_, ended_since_;
  std::optional<RankFailure> failure_;
  bool decided_ = false;
  std::optional<Clock::time_point> told_;   // when a signal was passed on that asks the ranks to end
  std::optional<Clock::time_point> noted_;  // ... and one that leaves it to them
  std::optional<std::size_t> chose_;        // the first that ended by its own choice
  int interrupted_ = 0;                     // the signal that asks them to end
  int told_times_ = 0;                      // how many such signals came
  bool interruption_told_ = false;          // `failed` knows that a rank has ended by it
  bool hung_up_ = false;                    // ... and whether a SIGHUP was among them
};

}  // namespace lockstep::detail
